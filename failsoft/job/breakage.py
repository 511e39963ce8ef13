"""The demonstration's two failures: one poster and one embedded engine, SIGKILLed in the middle."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Final

from chaos import Injury, Victim, strike
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
    What was hit is appended to ``injuries``. Where there is none to hit just then (all of them are
    suspects, or on other nodes), it is tried again with each sample. Ends when both are done; is
    cancelled with the run."""

    async def hit(share: float, victims: Callable[[], Sequence[Victim]], state: str) -> None:
        async with progressed:
            # Bounded by the run: every sample has a deadline, and the run cancels this at its end.
            await progressed.wait_for(lambda: settled() >= share)
            while (injury := _strike(victims(), state)) is None:
                await progressed.wait()
        injuries.append(injury)
        detail = f"{injury.signal} to pid {injury.pid}"
        events.emit("chaos.injected", level="warning", key=injury.key, detail=detail)

    await hit(POSTER_AT, lambda: pool.stats().posters, "serving")
    if fleet is not None:
        await hit(ENGINE_AT, fleet.engines, "ready")


def _strike(victims: Sequence[Victim], state: str) -> Injury | None:
    try:
        return strike(victims, signal.SIGKILL, state=state)
    except (LookupError, ProcessLookupError):
        return None
