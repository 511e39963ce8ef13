"""The demonstration's two failures: one poster and one embedded engine, SIGKILLed in the middle."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

from chaos import Injury, strike
from dispatch.engines import EngineFleet
from dispatch.posting import PosterPool
from protocol import Events

POSTER_AT: Final = 0.2
ENGINE_AT: Final = 0.4
"""When, as shares of the samples that are settled."""


async def break_things(
    pool: PosterPool,
    fleet: EngineFleet | None,
    settled: Callable[[], float],
    progressed: asyncio.Condition,
    events: Events,
    injuries: list[Injury],
) -> None:
    """Kill a poster once ``settled()`` (0 to 1) reaches `POSTER_AT`, and an engine at `ENGINE_AT`.
    What was hit is appended to ``injuries``. Ends when both are done; is cancelled with the run."""
    await _reached(POSTER_AT, settled, progressed)
    _note(strike(pool.stats().posters, signal.SIGKILL, state="serving"), events, injuries)
    if fleet is None:
        return
    await _reached(ENGINE_AT, settled, progressed)
    _note(strike(fleet.engines(), signal.SIGKILL, state="ready"), events, injuries)


async def _reached(share: float, settled: Callable[[], float], progressed: asyncio.Condition) -> None:
    async with progressed:
        # Bounded by the run: every sample has a deadline, and the run cancels this at its end.
        await progressed.wait_for(lambda: settled() >= share)


def _note(injury: Injury, events: Events, injuries: list[Injury]) -> None:
    injuries.append(injury)
    events.emit(
        "chaos.injected", level="warning", key=injury.key, detail=f"{injury.signal} to pid {injury.pid}"
    )
