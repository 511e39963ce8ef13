"""What can happen to one poster, each ending it in the end. They take the pool and the poster's index."""

from __future__ import annotations

import signal
from collections.abc import Callable

import ray

from dispatch.posting import PosterPool
from tests.support.ray_side import actor_of, kill_poster, on_poster


def process(pool: PosterPool, index: int = 0) -> tuple[int, float]:
    """Pid and start time of a poster."""
    poster = pool.stats().posters[index]
    return poster.pid, poster.create_time


INJURIES: dict[str, Callable[[PosterPool, int], object]] = {
    "SIGKILL": lambda pool, index: kill_poster(pool, signal.SIGKILL, f"poster/{index}"),
    "SIGSEGV": lambda pool, index: kill_poster(pool, signal.SIGSEGV, f"poster/{index}"),
    "SIGSTOP": lambda pool, index: kill_poster(pool, signal.SIGSTOP, f"poster/{index}"),
    "ray.kill": lambda pool, index: ray.kill(actor_of(pool, index), no_restart=True),
    "KeyboardInterrupt": lambda pool, index: on_poster(pool, "raise KeyboardInterrupt", index),
    "SystemExit": lambda pool, index: on_poster(pool, "raise SystemExit(3)", index),
    "blocked": lambda pool, index: on_poster(pool, "import time; time.sleep(60)", index),
    "os._exit": lambda pool, index: on_poster(pool, "import os; os._exit(1)", index),
}
