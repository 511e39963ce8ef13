"""Reaching a pool's posters from a test: their handles, and code run inside of them.

Ray gives every actor a method ``__ray_call__`` that runs a function on it. Through it a test blocks the
poster's loop, or raises in it, as a bug would; posters need no hook for that.
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
    assert pool._roster is not None
    lane = pool._roster.keepers[index].lane
    assert lane is not None
    return lane._actor


def on_poster(pool: PosterPool, code: str, index: int = 0) -> asyncio.Future[Any]:
    """Have the loop of a poster run ``code``; a future for the request, whose outcome is of no interest."""

    async def call() -> None:
        def run(self: Any, code: str = code) -> None:
            # The call itself runs on the actor's main thread; what is to be hurt is the loop.
            self._loop.call_soon_threadsafe(exec, code, {"poster": self})

        with contextlib.suppress(ray.exceptions.RayError):
            await actor_of(pool, index).__ray_call__.remote(run)

    return asyncio.ensure_future(call())


def kill_poster(pool: PosterPool, how: signal.Signals = signal.SIGKILL, key: str | None = None) -> Injury:
    """Send a signal to a poster that serves; LookupError when none is there."""
    return strike(pool.stats().posters, how, key=key, state="serving")
