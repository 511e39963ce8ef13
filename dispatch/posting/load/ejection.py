"""ejection: whether one server gets requests at all.

Outlier detection as Envoy has it (consecutive failures of the upstream eject a host for a time that
grows), with the half-open state of a circuit breaker (Nygard, "Release It!", 2007) at its end: one
request tries whether the server is back, and the others wait for what becomes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum


class Standing(StrEnum):
    """How a server stands: it serves; it is ejected; or its time is up and one trial may be made."""

    SERVING = "serving"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"


class Ejection:
    """The standing of one server.

    ``threshold`` failures in a row eject it for ``base`` seconds (by ``now``), each further time for
    twice as long, up to ``most``. A good trial brings it back; one that breaks again within ``most``
    seconds of that goes on where it had stopped, so that a server which only ever survives its trial
    is not back every second. ``out`` is whether it is ejected or half-open."""

    __slots__ = (
        "_back",
        "_base",
        "_most",
        "_now",
        "_term",
        "_threshold",
        "_times",
        "_trial",
        "failures",
        "out",
        "until",
    )

    def __init__(
        self, now: Callable[[], float], *, threshold: int = 5, base: float = 1.0, most: float = 30.0
    ) -> None:
        self.failures = 0
        self.out = False
        self.until = -math.inf
        self._now = now
        self._threshold = threshold
        self._base = base
        self._most = most
        self._times = 0
        self._back = -math.inf
        self._trial = False
        # Each ejection begins a new term, and a verdict counts only in its own: what was sent before the
        # last one says nothing new.
        self._term = 0

    @property
    def standing(self) -> Standing:
        """How it stands now."""
        if not self.out:
            return Standing.SERVING
        return Standing.EJECTED if self._now() < self.until else Standing.HALF_OPEN

    def ejected_for(self, now: float) -> float:
        """Seconds until a trial may be made; 0 when it is not ejected."""
        return max(self.until - now, 0.0) if self.out else 0.0

    def may_send(self, now: float) -> bool:
        """Whether a request may be sent at ``now``, be it as the trial."""
        return not self.out or (not self._trial and self.until <= now)

    def sent(self) -> int:
        """One is sent. Its term, to be handed to exactly one of the methods below."""
        if self.out:
            self._trial = True  # until it ends nothing else is sent, so no other has its term
        return self._term

    def answered(self, term: int) -> None:
        """The server answered what it should, or refused the request (4xx): it is alive."""
        if term != self._term:
            return
        self.failures = 0
        if self.out:
            self.out = self._trial = False
            self._back = self._now()

    def failed(self, term: int) -> bool:
        """The server failed: 5xx other than 503, a broken connection, a timeout that is its own. True
        when that ejects it now."""
        if term != self._term:
            return False
        self.failures += 1
        if not self.out:
            if self.failures < self._threshold:
                return False
            if self._now() - self._back > self._most:
                self._times = 0
        now = self._now()
        # ldexp instead of **: no integer of a thousand digits after a year of failures.
        self.until = now + min(self._most, math.ldexp(self._base, min(self._times, 64)))
        self.out, self._trial = True, False
        self._times += 1
        self._term += 1
        return True

    def ended(self, term: int) -> None:
        """It ended without a verdict (cancelled, or 429 and 503, which speak of load): nothing is
        counted, and a trial is given back."""
        if term == self._term and self.out:
            self._trial = False
