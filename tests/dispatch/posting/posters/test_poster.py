"""What a poster says of itself, without an actor around it."""

from __future__ import annotations

import time

from dispatch.posting.posters.poster import BEAT, Poster


async def test_the_first_pulse_after_a_standstill_of_the_process_is_fresh(ray_local: None) -> None:
    """SIGSTOP and SIGCONT, or a machine that was paused: whatever runs first then, the loop is not wedged."""
    poster = Poster(1)
    await poster.start()
    try:
        time.sleep(10 * BEAT)  # noqa: ASYNC251 - the standstill
        assert (await poster.pulse()).age < 5 * BEAT
    finally:
        await poster._close()
