"""suspects: the request that takes its server down with it.

What was in flight on an engine or a poster when that died is a suspect: sending it again, to one after
the other, may cost them all. Yet one death makes a suspect of everything that was in flight there, a
thousand requests of which at most one is guilty; trying each of those alone would bring the pool to a
stand. So after a first death it is tried again among the others, which clears nearly all of them; what
was there at a second one too is tried alone, one suspect at a time; a third death while it is tried
alone has hardly another cause, and ends it as REQUEST.POISON.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from typing import Final

from protocol import Code, CodedError

_OPEN: Final[AbstractAsyncContextManager[None]] = contextlib.nullcontext()


class Strikes:
    """The deaths that one request was there at. Its POST makes one when it sees the first of them, and
    keeps it: not by id, which two POSTs may share.

    ``gate`` is one for the whole pool; asyncio's own lock is what is wanted of it: first come first
    served, and no turn is lost to a cancellation. ``most`` deaths end the request."""

    __slots__ = ("_deaths", "_gate", "_most")

    def __init__(self, gate: asyncio.Lock, most: int = 3) -> None:
        self._gate = gate
        self._most = most
        self._deaths: list[tuple[str, str]] = []

    @property
    def deaths(self) -> int:
        """How many engines or posters died with the request in flight."""
        return len(self._deaths)

    def died(self, what: str, code: Code | str) -> CodedError | None:
        """``what`` (an engine, a poster) died with the request in flight, seen as ``code``. The error to
        end the request with, None while it may be tried again."""
        self._deaths.append((what, str(code)))
        if len(self._deaths) < self._most:
            return None
        named = [what for what, _ in self._deaths]
        return CodedError(
            "REQUEST.POISON",
            f"in flight at {len(named)} deaths, at the last of them alone: {', '.join(named)}",
            {"deaths": named, "codes": [code for _, code in self._deaths]},
        )

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Around each attempt, and around the wait for its place, so that whoever waits here occupies none:
        passes at once, until only one more death is left; then one suspect at a time."""
        return self._gate if len(self._deaths) >= self._most - 1 else _OPEN
