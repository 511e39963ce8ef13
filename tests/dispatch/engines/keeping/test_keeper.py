"""Orders to a fleet and what comes of them, with all that a keeper does left out: without Ray and waiting."""

from __future__ import annotations

import asyncio

import pytest

from dispatch.engines import EngineFleet, EngineSpec
from dispatch.engines.keeping import lifecycle as event
from dispatch.engines.keeping.keeper import Keeper
from protocol import CodedError, Events
from tests.support.events import EventFile

EXITED = CodedError("ENGINE.EXITED", "signal 9")
LEFT = CodedError("ENGINE.STOP_FAILED", "pid 7 is left")
SERVING = (event.Begun(), event.Proving(), event.Proven())


class Idle(EngineFleet):
    """A fleet of one engine to which only happens what a test says."""

    def __init__(self, events: Events) -> None:
        super().__init__([EngineSpec(command=("serve", "{port}"))], events=events)
        self._tasks = [asyncio.create_task(asyncio.sleep(0))]

    async def happens(self, *happened: event.Event) -> None:
        keeper = self._keepers[0]
        for one in happened:
            keeper.tell(one)
        while not keeper._inbox.empty():
            await keeper._take(keeper._inbox.get_nowait())


@pytest.fixture(autouse=True)
def nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(keeper: Keeper) -> None:
        return None

    monkeypatch.setattr(Keeper, "_do", dict.fromkeys(Keeper._do, nothing))


async def test_a_drain_while_it_rests_returns(events: EventFile) -> None:
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        fleet = Idle(sink)
        await fleet.happens(*SERVING, event.Lost(EXITED), event.Stopped())
        draining = asyncio.create_task(fleet.drain("engine/0", 5.0))
        await asyncio.sleep(0)  # it waits
        await fleet.happens()
        await draining
        await fleet.drain("engine/0", 5.0)
        await fleet.happens()
    assert [one["event"] for one in events.all()][-2:] == ["engine.restarting", "engine.stopped"]


async def test_a_restart_that_cannot_stop_the_last_life_says_so(events: EventFile) -> None:
    """At once, not when its time is over: no start follows that it could wait for."""
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        fleet = Idle(sink)
        await fleet.happens(*SERVING)
        restarting = asyncio.create_task(fleet.restart("engine/0", 5.0))
        await asyncio.sleep(0)  # it waits
        await fleet.happens(event.Drained(), event.StopFailed(LEFT))
        with pytest.raises(CodedError) as caught:
            await restarting
        assert caught.value is LEFT
        # Given up already, and asked for once more.
        restarting = asyncio.create_task(fleet.restart("engine/0", 5.0))
        await asyncio.sleep(0)
        await fleet.happens(event.Proven())
        assert (await restarting).state == "ready"


async def test_an_order_that_another_one_undoes_says_so(events: EventFile) -> None:
    """From two shells: whoever waits for what will not come is told, not kept until the time is over."""
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        fleet = Idle(sink)
        await fleet.happens(*SERVING)
        restarting = asyncio.create_task(fleet.restart("engine/0", 5.0))
        await asyncio.sleep(0)  # it waits
        draining = asyncio.create_task(fleet.drain("engine/0", 5.0))
        await asyncio.sleep(0)
        await fleet.happens(event.Drained(), event.Stopped())
        await draining
        with pytest.raises(CodedError, match=r"CANCEL\.CALLER.*engine/0 is to stay down, by another order"):
            await restarting
        await fleet.happens(event.Restart(), event.Proving(), event.Proven())
        draining = asyncio.create_task(fleet.drain("engine/0", 5.0))
        await asyncio.sleep(0)
        restarting = asyncio.create_task(fleet.restart("engine/0", 5.0))
        await asyncio.sleep(0)
        await fleet.happens(event.Drained(), event.Stopped(), event.Begun(), event.Proving(), event.Proven())
        with pytest.raises(CodedError, match=r"CANCEL\.CALLER.*engine/0 is to serve again, by another order"):
            await draining
        assert (await restarting).state == "ready"
