"""Reaching a pool's posters from a test: their handles, and code run inside of them.

Ray gives every actor a method ``__ray_call__`` that runs a function on it; on an async actor it runs on
the default group's loop, so that blocking or raising in it does to the poster what a bug would.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import ray

from chaos import Injury, strike
from dispatch.posting import PosterPool


def actor_of(pool: PosterPool, index: int = 0) -> Any:
    """The Ray handle of a poster as it is now."""
    lane = pool._keepers[index].lane
    assert lane is not None
    return lane._actor


def on_poster(pool: PosterPool, code: str, index: int = 0) -> asyncio.Future[Any]:
    """Run ``code`` on the loop of a poster; a future for its end, whose outcome is of no interest."""

    async def call() -> None:
        def run(self: Any, code: str = code) -> None:
            exec(code, {"poster": self})

        with contextlib.suppress(ray.exceptions.RayError):
            await actor_of(pool, index).__ray_call__.remote(run)

    return asyncio.ensure_future(call())


def kill_poster(pool: PosterPool, how: signal.Signals = signal.SIGKILL, key: str | None = None) -> Injury:
    """Send a signal to a poster that serves; LookupError when none is there."""
    return strike(pool.stats().posters, how, key=key, state="serving")
