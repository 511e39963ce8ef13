"""Waiting in tests: poll for what has to come true, up to a deadline, instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

STEP = 0.02


async def until(predicate: Callable[[], object], timeout: float = 20.0, what: str = "") -> None:
    """Return as soon as ``predicate`` holds; AssertionError after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < end, f"not within {timeout} s: {what or predicate}"
        await asyncio.sleep(STEP)


def until_sync(predicate: Callable[[], object], timeout: float = 20.0, what: str = "") -> None:
    """`until` for tests without a loop."""
    end = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < end, f"not within {timeout} s: {what or predicate}"
        time.sleep(STEP)
