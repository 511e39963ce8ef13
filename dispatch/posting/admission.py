"""Admission: exact capacity, first come first served.

Two bounds hold at once: the whole never exceeds the configured concurrency, and a lane never its
share. The first counts what was abandoned (timed out, cancelled) until its remote end is known to
have stopped, so that no re-split can let the servers see more than was configured.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

from dispatch.posting.placement import split
from protocol import CodedError


class Capacity(Protocol):
    """What admission knows of a lane; ``name`` tells a poster's generations apart."""

    name: str
    share: int
    occupied: int


L = TypeVar("L", bound=Capacity)
_Waiter = tuple["asyncio.Future[L]", Collection[str]]


class Admission(Generic[L]):
    """Hands out places in lanes. Lives on one event loop and needs no lock."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.occupied = 0
        self.peak = 0
        self._lanes: Sequence[L] = ()
        self._waiters: deque[_Waiter[L]] = deque()
        self._closed: CodedError | None = None

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return sum(1 for future, _ in self._waiters if not future.done())

    @property
    def lanes(self) -> Sequence[L]:
        """The lanes that take work now."""
        return self._lanes

    def serve(self, lanes: Sequence[L]) -> None:
        """From now on work goes to ``lanes``; their shares are split anew and sum to the concurrency
        exactly. Lanes that are not among them keep what they hold until it is released."""
        for gone in self._lanes:
            gone.share = 0
        for lane, share in zip(lanes, split(self.concurrency, len(lanes)), strict=True):
            lane.share = share
        self._lanes = tuple(lanes)
        self._hand_out()

    def try_acquire(self, avoid: Collection[str] = ()) -> L | None:
        """As `acquire`, where that need not wait; None otherwise."""
        if self._closed is not None:
            raise self._closed
        if self._waiters:
            return None
        lane = self._pick(avoid)
        return None if lane is None else self._take(lane)

    async def acquire(self, avoid: Collection[str] = ()) -> L:
        """A place in the emptiest lane, rather not one named in ``avoid``. Waits as long as its
        caller lets it: every caller has a deadline around this. Raises the error given to `close`."""
        lane = self.try_acquire(avoid)
        if lane is not None:
            return lane
        future: asyncio.Future[L] = asyncio.get_running_loop().create_future()
        self._waiters.append((future, avoid))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())  # handed over in the instant of the cancellation
            raise

    def release(self, lane: L) -> None:
        """Give a place back; it goes to whoever has waited longest."""
        lane.occupied -= 1
        self.occupied -= 1
        assert lane.occupied >= 0 <= self.occupied, "a place was released twice"
        self._hand_out()

    def close(self, error: CodedError) -> None:
        """Refuse everybody, those who wait included, with ``error``."""
        self._closed = error
        while self._waiters:
            future, _ = self._waiters.popleft()
            if not future.done():
                future.set_exception(error)

    def _hand_out(self) -> None:
        while self._waiters:
            future, avoid = self._waiters[0]
            if future.done():  # cancelled while it waited
                self._waiters.popleft()
                continue
            lane = self._pick(avoid)
            if lane is None:
                return
            self._waiters.popleft()
            future.set_result(self._take(lane))

    def _pick(self, avoid: Collection[str]) -> L | None:
        if self.occupied >= self.concurrency:
            return None
        free = [lane for lane in self._lanes if lane.occupied < lane.share]
        if not free:
            return None
        welcome = [lane for lane in free if lane.name not in avoid] if avoid else free
        # What is to be avoided still beats waiting: it may well have recovered.
        return max(welcome or free, key=lambda lane: lane.share - lane.occupied)

    def _take(self, lane: L) -> L:
        lane.occupied += 1
        self.occupied += 1
        self.peak = max(self.peak, self.occupied)
        return lane
