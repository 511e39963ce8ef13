"""hedge: when a second copy of a request is worth sending.

Hedged requests (Dean and Barroso, "The Tail at Scale", 2013): what has taken longer than nearly all
others is sent once more, elsewhere, and the first reply wins. It costs about as many more requests as
the percentile leaves out, and never more than a share of them.
"""

from __future__ import annotations

import itertools
import math
from array import array
from typing import Final

WINDOW: Final = 256
"""How many latencies of an origin are remembered."""
EVERY: Final = 32
"""After how many new ones its percentile is worked out again; while it has fewer, at each."""
KEEP: Final = 1024
"""Of how many origins latencies are remembered."""


class _Latencies:
    """The last `WINDOW` latencies of one origin, in seconds, as a ring."""

    __slots__ = ("_ring", "_seen", "_value", "_worked_out")

    def __init__(self) -> None:
        self._ring: array[float] = array("d")
        self._seen = 0
        self._worked_out = 0
        self._value = 0.0

    def add(self, seconds: float) -> None:
        if self._seen < WINDOW:
            self._ring.append(seconds)
        else:
            self._ring[self._seen % WINDOW] = seconds
        self._seen += 1

    def percentile(self, share: float, least: int) -> float | None:
        """The latency (seconds) that ``share`` of them do not exceed, by nearest rank."""
        if self._seen < least:
            return None
        new = self._seen - self._worked_out
        if new >= EVERY or (new and self._seen <= EVERY):
            ranked = sorted(self._ring)
            self._value = ranked[max(math.ceil(share * len(ranked)), 1) - 1]
            self._worked_out = self._seen
        return self._value


class Hedging:
    """When to hedge, by origin, and how often at most.

    ``delay`` is the ``percentile`` of what `learn` was told, from ``least`` latencies on. A hedge takes
    a token; each first attempt deposits ``share`` of one, and up to ``burst`` are kept: there are
    never more hedges than that share of the attempts."""

    __slots__ = ("_burst", "_least", "_origins", "_percentile", "_share", "_tokens")

    def __init__(
        self, *, percentile: float = 0.95, share: float = 0.05, least: int = 20, burst: float = 16.0
    ) -> None:
        if not (0.0 < percentile <= 1.0 and 0.0 <= share <= 1.0 and least >= 1 and burst >= 1.0):
            raise ValueError(
                f"hedging at percentile {percentile}, share {share}, least {least}, burst {burst} cannot work"
            )
        self._percentile = percentile
        self._share = share
        self._least = least
        self._burst = burst
        self._tokens = 0.0
        self._origins: dict[str, _Latencies] = {}

    def deposit(self) -> None:
        """Something is sent for the first time."""
        self._tokens = min(self._burst, self._tokens + self._share)

    def learn(self, origin: str, seconds: float) -> None:
        """A request to ``origin`` took ``seconds``. Of a first copy that lost against its hedge, tell how
        long it had taken until then: without the slow ones the percentile would sink by itself."""
        known = self._origins.get(origin)
        if known is None:
            if len(self._origins) >= KEEP:
                # The older half at once, so that it costs O(1) an origin.
                for old in list(itertools.islice(self._origins, KEEP // 2)):
                    del self._origins[old]
            known = self._origins[origin] = _Latencies()
        known.add(seconds)

    def delay(self, origin: str) -> float | None:
        """Seconds after which a request to ``origin`` is worth a hedge; None until that is learned."""
        known = self._origins.get(origin)
        return None if known is None else known.percentile(self._percentile, self._least)

    def try_take(self) -> bool:
        """Take a token for a hedge; False where there is none."""
        if self._tokens < 1.0 - 1e-9:  # twenty times 0.05 is one, whatever floating point says
            return False
        self._tokens -= 1.0
        return True
