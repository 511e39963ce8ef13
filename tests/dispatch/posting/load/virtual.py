"""Time that passes only when nothing else can happen: an event loop whose clock jumps to its next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """A clock that tests set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class _Jumping(selectors.DefaultSelector):
    """A selector that lets its waits pass at once."""

    clock: Clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left that could ever happen: a lost wake-up"
        self.clock.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self.clock = Clock()
        selector = _Jumping()
        selector.clock = self.clock
        super().__init__(selector)

    def time(self) -> float:
        return self.clock.now


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run ``scenario`` in virtual time. AssertionError where it waits for what cannot come."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


async def settle() -> None:
    """Let everything that can move do so; no time passes."""
    for _ in range(6):
        await asyncio.sleep(0)
