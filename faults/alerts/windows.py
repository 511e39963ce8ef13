"""The sliding window of a frequency rule: did ``count`` matches ever lie within ``within`` seconds?

It is exact, also for events that arrive late by up to ``within`` seconds (several processes append
to one events file, and their clocks differ a little), and holds at most ``2 × count`` numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class SlidingWindow:
    """The times of the matches that can still be part of a full window.

    ``within`` is closed: matches exactly ``within`` seconds apart share a window. Memory stays
    bounded without a cap of its own: as long as `add` has answered False, any stretch of ``within``
    seconds holds fewer than ``count`` matches, and two such stretches are kept. After it has
    answered True the owner calls `clear`."""

    __slots__ = ("_count", "_times", "_within")

    def __init__(self, count: int, within: float) -> None:
        self._count = count
        self._within = within
        self._times: list[float] = []

    def add(self, ts: float) -> bool:
        """Note a match at ``ts`` (unix seconds); True when it completes a full window.

        A match that is later than ``within`` behind the newest is still looked at, but only against
        what is kept."""
        insort(self._times, ts)
        full = self._full_around(bisect_left(self._times, ts))
        # Late matches reach back one window from the newest; what they complete begins one earlier.
        oldest = self._times[-1] - 2 * self._within
        del self._times[: bisect_left(self._times, oldest)]
        return full

    def clear(self) -> None:
        """Forget every match: an alert that was resolved starts counting anew."""
        self._times.clear()

    def __len__(self) -> int:
        return len(self._times)

    def _full_around(self, at: int) -> bool:
        times, count = self._times, self._count
        first = max(0, at - count + 1)
        last = min(at, len(times) - count)
        return any(times[i + count - 1] - times[i] <= self._within for i in range(first, last + 1))
