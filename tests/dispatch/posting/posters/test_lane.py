"""A lane's watch over its poster, without one."""

import asyncio

from dispatch.posting.posters.lane import Health, PosterLane
from dispatch.posting.posters.session import Session
from protocol import CodedError


async def test_an_unavailable_poster_is_probed_at_its_interval_and_not_in_a_hot_loop(ray_local: None) -> None:
    """The death detector breaks off with the first trouble; from then on only the interval paces."""
    health = Health(interval=0.1, unavailable=1.0)
    lane = PosterLane("poster/0.1", lambda _: None, lambda _: None, health, Session())
    probes = 0

    async def away() -> CodedError:
        nonlocal probes
        probes += 1
        return CodedError("ACTOR.UNAVAILABLE", "out of reach")

    async def broken() -> None:
        raise ConnectionResetError

    lane._probe = away  # type: ignore[method-assign]
    lane._hold = asyncio.create_task(broken())
    async with asyncio.timeout(20):
        why = await lane.watch()
    assert why.code == "ACTOR.UNAVAILABLE"
    assert lane.trouble is why
    assert 2 <= probes <= 20
    assert isinstance(lane._hold.exception(), ConnectionResetError)
