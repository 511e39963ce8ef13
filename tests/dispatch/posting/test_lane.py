"""A lane's places come back whatever becomes of the task that holds one."""

import asyncio

from dispatch.posting.lane import Health, PosterLane
from dispatch.posting.request import Item


async def test_a_place_comes_back_when_the_lane_ends_before_its_keeper_task_has_begun() -> None:
    released: list[PosterLane] = []
    lane = PosterLane("poster/0.1", released.append, lambda lane: None, Health())
    lane._abandon(None, Item("r", "r.1", "http://h/", b"{}", {}))
    for task in list(lane._abandoned):
        task.cancel()  # a task that is cancelled before its first step never runs its `finally`
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert released == [lane]
    assert not lane._abandoned
