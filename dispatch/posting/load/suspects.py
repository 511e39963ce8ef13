"""suspects: the request that takes its server down with it.

What was in flight on an engine or a poster when that died is a suspect: sending it again, to one after
the other, may cost them all. Yet one death makes a suspect of everything that was in flight there, a
thousand requests of which at most one is guilty; trying each of those alone would bring the pool to a
stand. So after a first death it is tried again among the others, which clears nearly all of them; what
was there at a second one too is tried alone, with no other suspect of either kind under way; a third death
while it is tried alone has hardly another cause, and ends it as REQUEST.POISON.

Where things die anyway, being there proves nothing: deaths of late at which a request was not there count
for it. A poison is there at all of them; a bystander on a cluster that loses a poster a second is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from protocol import Code, CodedError

WINDOW: Final = 60.0
"""Seconds for which a death counts as of late."""
SAME: Final = 2.0
"""Seconds within which all who were there tell of one death."""
KEEP: Final = 256
"""Most deaths that are remembered."""
_OPEN: Final[AbstractAsyncContextManager[None]] = contextlib.nullcontext()


class Turns:
    """Suspects among each other: any number together, or one alone, first come first served. asyncio's own
    lock is what is wanted for that: no turn is lost to a cancellation. Whoever waits to be alone holds it,
    so that nobody can keep it waiting by coming after it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._together = 0
        self._nobody = asyncio.Event()
        self._nobody.set()

    @property
    def idle(self) -> bool:
        """Whether no suspect is under way."""
        return not self._lock.locked() and self._together == 0

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """With others that are here in the same way."""
        async with self._lock:
            self._together += 1
            self._nobody.clear()
        try:
            yield
        finally:
            self._together -= 1
            if self._together == 0:
                self._nobody.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """With no other suspect under way."""
        async with self._lock:
            await self._nobody.wait()
            yield


class Deaths:
    """The deaths of late, of engines and of posters; one for the whole pool. ``now`` is its clock
    (seconds), ``turns`` whose turn it is among the suspects."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.turns = Turns()
        self._now = now
        self._numbers = 0
        self._late: deque[tuple[float, int]] = deque(maxlen=KEEP)
        self._last: dict[str, tuple[float, int]] = {}

    def note(self, what: str) -> int:
        """``what`` died. The death's number, the same for all who tell of it."""
        now = self._now()
        known = self._last.get(what)
        if known is not None and now - known[0] <= SAME:
            return known[1]
        self._numbers += 1
        if len(self._last) >= KEEP:
            self._last = {one: seen for one, seen in self._last.items() if now - seen[0] <= SAME}
        self._last[what] = now, self._numbers
        self._late.append((now, self._numbers))
        return self._numbers

    def others(self, attended: set[int]) -> int:
        """How many deaths of late there were besides those in ``attended``."""
        since = self._now() - WINDOW
        while self._late and self._late[0][0] < since:
            self._late.popleft()
        return sum(1 for _, number in self._late if number not in attended)


class Strikes:
    """The deaths that one request was there at. Its POST makes one when it sees the first of them, and
    keeps it: not by id, which two POSTs may share. ``most`` deaths that nothing else explains end it."""

    __slots__ = ("_attended", "_deaths", "_most", "_register", "weight")

    def __init__(self, register: Deaths, most: int = 3) -> None:
        self.weight = 0
        """How many of its deaths nothing else explains."""
        self._register = register
        self._most = most
        self._attended: set[int] = set()
        self._deaths: list[tuple[str, str]] = []

    def died(self, what: str, code: Code | str) -> CodedError | None:
        """``what`` (an engine, a poster) died with the request in flight, seen as ``code``. The error to
        end the request with, None while it may be tried again."""
        self._attended.add(self._register.note(what))
        self._deaths.append((what, str(code)))
        self.weight = max(len(self._deaths) - self._register.others(self._attended), 0)
        if self.weight < self._most:
            return None
        named = [what for what, _ in self._deaths]
        return CodedError(
            "REQUEST.POISON",
            f"in flight at {len(named)} deaths, at the last of them alone: {', '.join(named)}",
            {"deaths": named, "codes": [code for _, code in self._deaths]},
        )

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Around each attempt, and around the wait for its place, so that whoever waits here occupies none.
        Without a death it passes at once; with one or more, when no suspect is being tried alone; when only
        one more death is left, alone. A suspect's own attempt must not be what another one dies of."""
        if self.weight >= self._most - 1:
            return self._register.turns.alone()
        return self._register.turns.together() if self.weight else _OPEN
