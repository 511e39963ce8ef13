"""suspects: the request that takes its server down with it.

What was in flight on an engine or a poster when that died is a suspect: sending it again, to one after
the other, may cost them all. Yet one death makes a suspect of everything that was in flight there, a
thousand requests of which at most one is guilty; trying each of those alone would bring the pool to a
stand. So after a first death it is tried again among the others, which clears nearly all of them; what
was there at a second one too is tried alone, with no other suspect of either kind under way; a third death
while it is tried alone has hardly another cause, and ends it as REQUEST.POISON.

Where things die anyway, being there proves nothing: deaths of late at which a request was not there count
for it, once all who were there have come through and so are cleared. A bystander on a cluster that loses a
poster a second has many of those. Copies of one poison that end an engine each do not speak for one another.
Who was there and ended in between, of something else or because its caller went away, is no longer asked, so
long as another one came through: among a thousand there is always one of those.
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
OPEN: Final[AbstractAsyncContextManager[None]] = contextlib.nullcontext()
"""The turn of what no death speaks against."""


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
    async def turn(self, alone: Callable[[], bool]) -> AsyncIterator[None]:
        """With no other suspect under way where ``alone`` says so when the turn has come, else with others
        that are here in the same way: what was to be alone when it began to wait may be excused by then."""
        await self._lock.acquire()
        try:
            if alone():
                await self._nobody.wait()
            if alone():
                yield
                return
            self._together += 1
            self._nobody.clear()
        finally:
            self._lock.release()
        try:
            yield
        finally:
            self._together -= 1
            if self._together == 0:
                self._nobody.set()


class Death:
    """One death. ``suspects``: how many were there and may still be the cause; ``cleared``: whether one who
    was there has come through since."""

    __slots__ = ("cleared", "suspects", "when")

    def __init__(self, when: float) -> None:
        self.when = when
        self.suspects = 0
        self.cleared = False

    @property
    def unexplained(self) -> bool:
        """Whether it was nobody's doing, as far as can be known."""
        return self.cleared and not self.suspects


class Deaths:
    """The deaths of late, of engines and of posters; one for the whole pool. ``now`` is its clock
    (seconds), ``turns`` whose turn it is among the suspects."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.turns = Turns()
        self._now = now
        self._late: deque[Death] = deque(maxlen=KEEP)
        self._last: dict[str, Death] = {}

    def note(self, what: str) -> Death:
        """``what`` died; the same death for all who tell of it."""
        now = self._now()
        known = self._last.get(what)
        if known is not None and now - known.when <= SAME:
            return known
        if len(self._last) >= KEEP:
            self._last = {one: death for one, death in self._last.items() if now - death.when <= SAME}
        death = self._last[what] = Death(now)
        self._late.append(death)
        return death

    def unexplained(self, attended: set[Death]) -> int:
        """How many deaths of late, besides ``attended``, were nobody's doing."""
        since = self._now() - WINDOW
        while self._late and self._late[0].when < since:
            self._late.popleft()
        return sum(1 for death in self._late if death.unexplained and death not in attended)


class Strikes:
    """The deaths that one request was there at. Its POST makes one when it sees the first of them, and
    keeps it: not by id, which two POSTs may share. ``most`` deaths that nothing else explains end it, the
    last of them while it was tried alone: what excused it when it was sent may be long ago when it ends."""

    __slots__ = ("_attended", "_deaths", "_most", "_register", "_sent_with")

    def __init__(self, register: Deaths, most: int = 3) -> None:
        self._register = register
        self._most = most
        self._sent_with = 0  # its weight when it was sent last
        self._attended: set[Death] = set()
        self._deaths: list[tuple[str, str]] = []

    @property
    def weight(self) -> int:
        """How many of its deaths nothing else explains."""
        if not self._deaths:
            return 0
        return max(len(self._deaths) - self._register.unexplained(self._attended), 0)

    def died(self, what: str, code: Code | str) -> CodedError | None:
        """``what`` (an engine, a poster) died with the request in flight, seen as ``code``. The error to
        end the request with, None while it may be tried again."""
        death = self._register.note(what)
        if death not in self._attended:
            self._attended.add(death)
            death.suspects += 1
        elif code == "ACTOR.DIED":
            return None  # a poster dies once: both copies of a hedged request were in it
        self._deaths.append((what, str(code)))
        alone = self._sent_with >= self._most - 1
        self._sent_with = self.weight
        if self._sent_with < self._most or not alone:
            return None
        named = [what for what, _ in self._deaths]
        return CodedError(
            "REQUEST.POISON",
            f"in flight at {len(named)} deaths, at the last of them alone: {', '.join(named)}",
            {"deaths": named, "codes": [code for _, code in self._deaths]},
        )

    def came_through(self) -> None:
        """The request was answered: none of the deaths was its doing."""
        for death in self._attended:
            death.cleared = True
        self._leave()

    def ended(self, exc: BaseException) -> None:
        """The request ended with ``exc``, and nobody sends it again. Unless that is a death it is no suspect
        any more, though not cleared either."""
        code = str(exc.data.get("cause", exc.code)) if isinstance(exc, CodedError) else ""
        if code != "REQUEST.POISON" and (not self._deaths or code != self._deaths[-1][1]):
            self._leave()

    def _leave(self) -> None:
        for death in self._attended:
            death.suspects -= 1
        self._attended.clear()
        self._deaths.clear()
        self._sent_with = 0

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Around each attempt, and around the wait for its place, so that whoever waits here occupies none.
        Without a death it passes at once; with one or more, when no suspect is being tried alone; when only
        one more death is left, alone. A suspect's own attempt must not be what another one dies of."""
        self._sent_with = self.weight
        return self._register.turns.turn(self._alone) if self._sent_with else OPEN

    def _alone(self) -> bool:
        self._sent_with = self.weight
        return self._sent_with >= self._most - 1
