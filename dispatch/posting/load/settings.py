"""The settings of load control."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol import CodedError


@dataclass(frozen=True, slots=True)
class LoadControl:
    """How a pool treats servers that are slow, full or broken; the defaults suit engines behind HTTP.

    ``eject_after`` failures in a row eject a server, for ``eject_first`` seconds and each further time
    for twice as long, up to ``eject_most``. ``retry_share`` of what is sent for the first time may be
    sent again after a failure of its server, and ``retry_floor`` a second besides; what is over that
    waits. ``hedge_at`` (a share, 0.95) sends an idempotent POST a second time once it has taken longer
    than that share of the last ones, for at most ``hedge_share`` of the POSTs; None never does.
    ``poison_after`` deaths of engines or posters that a request was in flight at end it. Where a good part
    of all attempts ends in a death, raise it (docs/performance.md, Kills)."""

    eject_after: int = 5
    eject_first: float = 1.0
    eject_most: float = 30.0
    retry_share: float = 0.2
    retry_floor: float = 10.0
    hedge_at: float | None = None
    hedge_share: float = 0.05
    poison_after: int = 3

    def __post_init__(self) -> None:
        for name, good in (
            ("eject_after", self.eject_after >= 1),
            ("eject_first", 0 < self.eject_first <= self.eject_most < math.inf),
            ("retry_share", 0 <= self.retry_share < math.inf),
            ("retry_floor", 0 < self.retry_floor < math.inf),
            ("hedge_at", self.hedge_at is None or 0 < self.hedge_at <= 1),
            ("hedge_share", 0 <= self.hedge_share <= 1),
            ("poison_after", self.poison_after >= 2),
        ):
            if not good:
                raise CodedError("CONFIG.INVALID", f"{name} is {getattr(self, name)!r}: that cannot work")
