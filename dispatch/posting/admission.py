"""Admission: exact capacity, fair between callers.

Two bounds hold at once: the whole never exceeds the configured concurrency, and a lane never its
share. The first counts what was abandoned (timed out, cancelled) until its remote end is known to
have stopped, so that no re-split can let the servers see more than was configured.

Who waits is served first come first served for each caller, and the callers take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from dispatch.posting.load import FairQueue
from dispatch.posting.posters.placement import split
from protocol import CodedError

LOOK: Final = 8
"""Among how many lanes with free places the emptiest is looked for: with a thousand posters, looking at
all of them would cost more than the POST."""


class Capacity(Protocol):
    """What admission knows of a lane; ``name`` tells a poster's generations apart."""

    name: str
    share: int
    occupied: int


L = TypeVar("L", bound=Capacity)


class _Waiter(Generic[L]):
    __slots__ = ("avoid", "future")

    def __init__(self, future: asyncio.Future[L], avoid: Collection[str]) -> None:
        self.future = future
        self.avoid = avoid

    def dead(self) -> bool:
        return self.future.done()


class Admission(Generic[L]):
    """Hands out places in lanes. Lives on one event loop and needs no lock."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.occupied = 0
        self.peak = 0
        self._lanes: Sequence[L] = ()
        self._free: deque[L] = deque()  # lanes in turn; every serving lane with a free place is among them
        self._listed: set[str] = set()  # the names of those in it
        self._queue: FairQueue[_Waiter[L]] = FairQueue(_Waiter.dead)
        self._closed: CodedError | None = None

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._queue)

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
        self._free = deque(lanes)
        self._listed = {lane.name for lane in lanes}
        self._hand_out()

    def try_acquire(self, avoid: Collection[str] = ()) -> L | None:
        """As `acquire`, where that need not wait; None otherwise."""
        if self._closed is not None:
            raise self._closed
        if self._queue:
            return None
        lane = self._pick(avoid)
        return None if lane is None else self._take(lane)

    async def acquire(
        self, avoid: Collection[str] = (), caller: Hashable = None, *, first: bool = False
    ) -> L:
        """A place in an empty lane, rather not one named in ``avoid``. Waits as long as its caller lets
        it: every caller has a deadline around this. ``first``: before what else the caller has waiting.
        Raises the error given to `close`."""
        lane = self.try_acquire(avoid)
        if lane is not None:
            return lane
        future: asyncio.Future[L] = asyncio.get_running_loop().create_future()
        entry = self._queue.push(caller, _Waiter(future, avoid), first=first)
        try:
            return await future
        except BaseException:  # raised again: whatever ends the wait must not keep a place
            self._queue.discard(entry)
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())  # handed over in the instant of the cancellation
            raise

    def release(self, lane: L) -> None:
        """Give a place back; it goes to whoever's turn it is."""
        self._give_back(lane)
        if self._queue:
            self._hand_out()

    def move(self, lane: L, avoid: Collection[str]) -> L | None:
        """A place elsewhere for the one in ``lane``, which nothing came of; whoever waits had no part in it.
        None, and the place is released, where no other is free. Raises as `acquire`."""
        self._give_back(lane)
        if self._closed is not None:
            raise self._closed
        other = self._pick(avoid)
        if other is None:
            return None
        return self._take(other)

    def close(self, error: CodedError) -> None:
        """Refuse everybody, those who wait included, with ``error``."""
        self._closed = error
        while (waiter := self._queue.pop()) is not None:
            waiter.future.set_exception(error)

    def _hand_out(self) -> None:
        while self._queue and self._pick(()) is not None:
            waiter = self._queue.pop()
            if waiter is None:
                return
            lane = self._pick(waiter.avoid)
            assert lane is not None
            waiter.future.set_result(self._take(lane))

    def _give_back(self, lane: L) -> None:
        lane.occupied -= 1
        self.occupied -= 1
        assert lane.occupied >= 0 <= self.occupied, "a place was released twice"
        if lane.occupied < lane.share and lane.name not in self._listed:
            self._free.append(lane)
            self._listed.add(lane.name)

    def _pick(self, avoid: Collection[str]) -> L | None:
        if self.occupied >= self.concurrency:
            return None
        free = self._free
        best: L | None = None
        second: L | None = None  # what is to be avoided still beats waiting: it may well have recovered
        looked = 0
        while looked < len(free) and looked < LOOK + len(avoid):
            lane = free[0]
            if lane.occupied >= lane.share:
                free.popleft()
                self._listed.discard(lane.name)
                continue
            looked += 1
            free.rotate(-1)
            if avoid and lane.name in avoid:
                second = lane
            elif best is None or lane.share - lane.occupied > best.share - best.occupied:
                best = lane
        return best or second

    def _take(self, lane: L) -> L:
        lane.occupied += 1
        self.occupied += 1
        self.peak = max(self.peak, self.occupied)
        return lane
