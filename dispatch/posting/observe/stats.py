"""Accounting: ``submitted = succeeded + failed + cancelled + in_flight``, at every instant."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec

from dispatch.posting.load import TargetStats

RECOVERIES: Final = 1000
"""How many of the last recoveries are kept: all of them are read once a second."""


class Recovery(msgspec.Struct, frozen=True):
    """One replacement: what (``key``), why (``code``), how long from seeing it to serving again
    (``seconds``)."""

    key: str
    code: str
    seconds: float


class PosterStats(msgspec.Struct, frozen=True):
    """One poster. ``state`` is starting, serving, quarantined, dead or abandoned. ``pid`` (0 before it
    has started) counts only together with ``create_time`` (unix seconds)."""

    key: str
    state: str
    pid: int
    create_time: float
    node: str
    generation: int
    share: int
    occupied: int


class PoolStats(msgspec.Struct, frozen=True):
    """A moment of the pool.

    ``in_flight`` counts POSTs that callers wait for, ``waiting`` those of them that wait for a place in the
    pool or at their server; ``occupied`` the places that are taken, which
    includes attempts whose caller has gone and whose remote end is not yet known to have stopped.
    ``sent`` counts attempts, ``retried`` those after a first, ``hedged`` second copies beside a first,
    ``local`` those by the local client. ``recreated`` counts posters that were replaced, and ``recoveries``
    are the last `RECOVERIES` of those. ``targets`` are the servers."""

    submitted: int
    succeeded: int
    failed: int
    cancelled: int
    in_flight: int
    waiting: int
    occupied: int
    peak: int
    sent: int
    retried: int
    hedged: int
    local: int
    failed_by_code: dict[str, int]
    retried_by_code: dict[str, int]
    recreated: int
    recoveries: tuple[Recovery, ...]
    posters: tuple[PosterStats, ...]
    targets: tuple[TargetStats, ...]

    @property
    def balanced(self) -> bool:
        """Whether the accounting holds. It always does; tests and operators may look."""
        return self.submitted == self.succeeded + self.failed + self.cancelled + self.in_flight


class Ledger:
    """The counters behind `PoolStats`. Each is counted for itself, so that the sum can be wrong."""

    def __init__(self) -> None:
        self.submitted = self.succeeded = self.failed = self.cancelled = self.in_flight = 0
        self.sent = self.retried = self.hedged = self.local = self.recreated = 0
        self.failed_by_code: Counter[str] = Counter()
        self.retried_by_code: Counter[str] = Counter()
        self.recoveries: deque[Recovery] = deque(maxlen=RECOVERIES)
