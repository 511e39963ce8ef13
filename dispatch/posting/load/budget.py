"""budget: how often anything is sent again.

A token bucket as Finagle's RetryBudget has it: retries are a share of what was sent for the first
time, so that a fleet which breaks down is not sent a multiple of the load that it broke under.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_NEARLY: Final = 1e-6  # tokens: what rounding may cost one who waited exactly as long as `wait_for` said


class RetryBudget:
    """Each first attempt deposits ``share`` tokens, ``floor`` tokens a second flow in (by ``now``, in
    seconds), and up to ``burst`` of them are kept, which is also how many there are at the start.
    A retry takes one.

    Only a retry after a failure that is blamed on the upstream takes one: what a dead poster never
    sent, or only could not bring back, was no load that a server broke under. Whoever finds none
    waits (`wait_for`) and asks again within its deadline: retries are paced, not refused."""

    __slots__ = ("_burst", "_floor", "_last", "_now", "_share", "_tokens")

    def __init__(
        self, now: Callable[[], float], *, share: float = 0.2, floor: float = 10.0, burst: float = 100.0
    ) -> None:
        # Without a floor a pool that only retries would wait for ever; below one token none is ever whole.
        if not (share >= 0.0 and floor > 0.0 and burst >= 1.0):
            raise ValueError(f"a retry budget of share {share}, floor {floor}, burst {burst} cannot work")
        self._now = now
        self._share = share
        self._floor = floor
        self._burst = burst
        self._tokens = burst
        self._last = now()

    def deposit(self) -> None:
        """Something is sent for the first time."""
        # No look at the clock: what has flowed in since the last one comes on top of it, up to the burst.
        self._tokens = min(self._burst, self._tokens + self._share)

    def try_take(self) -> bool:
        """Take a token for a retry; False where there is none."""
        if self._refill() < 1.0 - _NEARLY:
            return False
        self._tokens -= 1.0
        return True

    def wait_for(self) -> float:
        """Seconds until there could be a token by what flows in alone; 0 where there is one."""
        return max(1.0 - self._refill(), 0.0) / self._floor

    def _refill(self) -> float:
        now = self._now()
        self._tokens = min(self._burst, self._tokens + (now - self._last) * self._floor)
        self._last = now
        return self._tokens
