"""aimd: how many requests one server gets at once.

Additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the Increase and Decrease
Algorithms for Congestion Avoidance in Computer Networks", 1989), with at most one decrease for what
was under way together, as TCP's congestion avoidance has one a window (RFC 5681, 3.1; RFC 6582).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from faults.http_faults import MAX_RETRY_AFTER

DECREASE: Final = 0.7
"""What is left of the limit after a pushback."""


class Limit:
    """The concurrency limit of one server, and what of it is in use.

    ``limit`` starts at ``ceiling`` requests and stays between 1 and that. ``held_until`` is the
    instant (by ``now``, in seconds) before which nothing new is sent, since a Retry-After said so."""

    __slots__ = ("_epoch", "_now", "ceiling", "held_until", "in_flight", "limit")

    def __init__(self, ceiling: int, now: Callable[[], float]) -> None:
        self.ceiling = ceiling
        self.limit = float(ceiling)
        self.in_flight = 0
        self.held_until = -math.inf
        self._epoch = 0
        self._now = now

    def may_send(self, now: float) -> bool:
        """Whether one more may be sent at ``now``."""
        return self.in_flight + 1 <= self.limit and self.held_until <= now

    def sent(self) -> int:
        """One is sent. Its epoch, to be handed to `succeeded` or `pushed_back`."""
        self.in_flight += 1
        return self._epoch

    def succeeded(self, epoch: int) -> None:
        """It went well. About ``limit`` successes make room for one more. Those that were sent before
        the last decrease do not count, as TCP does not grow its window while it recovers: a hundred
        late replies would undo every decrease of a small limit."""
        self.in_flight -= 1
        if epoch == self._epoch and self.limit < self.ceiling:
            self.limit = min(float(self.ceiling), self.limit + 1.0 / self.limit)

    def pushed_back(self, epoch: int, retry_after: float | None) -> None:
        """The server had enough (429, 503). ``retry_after`` is what it asked for, in seconds; it counts
        whenever the request was sent, the decrease only once for what was under way together."""
        self.in_flight -= 1
        if epoch == self._epoch:
            self.limit = max(1.0, self.limit * DECREASE)
            self._epoch += 1
        if retry_after is not None and retry_after > 0.0:
            self.held_until = max(self.held_until, self._now() + min(retry_after, MAX_RETRY_AFTER))

    def ended(self) -> None:
        """It ended and says nothing about the server's load."""
        self.in_flight -= 1
