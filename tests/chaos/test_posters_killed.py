"""Posters killed, stopped, wedged and blocked under continuous load: nothing is lost, nothing is sent
twice unseen, and the servers never see more than the ceiling."""

from __future__ import annotations

import pytest

from tests.chaos.injuries import INJURIES, process
from tests.chaos.load import Load
from tests.chaos.tally import Tally
from tests.support.events import EventFile
from tests.support.fixtures import MakePool
from tests.support.ray_side import kill_poster, on_poster
from tests.support.wait import until
from tests.support.witness import Witness

pytestmark = pytest.mark.timeout(120)

CONCURRENCY = 24


@pytest.mark.parametrize("injury", list(INJURIES))
async def test_one_poster_is_hit(
    make_pool: MakePool, witness: Witness, events: EventFile, tally: Tally, injury: str
) -> None:
    async with make_pool(CONCURRENCY, posters_per_node=2) as pool:
        async with Load(pool, witness, events, CONCURRENCY) as load:
            victim, other = process(pool), process(pool, 1)
            INJURIES[injury](pool, 0)
            await load.replaced(tally, [victim])
            await load.more(300)
        await load.verify(least=500)
        assert process(pool, 1) == other
        stats = pool.stats()
        assert stats.recreated == 1
        assert [one.key for one in stats.recoveries] == ["poster/0"]
        assert stats.recoveries[0].seconds < 60
        assert set(load.via) == {"poster"}
    died = events.named("poster.died")
    assert [event["key"] for event in died] == ["poster/0"]
    assert died[0]["data"]["confirmed_gone"] is True


async def test_a_short_block_costs_no_poster(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    async with make_pool(CONCURRENCY, posters_per_node=2) as pool:
        async with Load(pool, witness, events, CONCURRENCY) as load:
            before = process(pool)
            await on_poster(pool, "import time; time.sleep(0.8)")
            await load.more(200)
        await load.verify(least=300)
        assert process(pool) == before
        assert pool.stats().retried == 0


async def test_every_poster_killed_at_once_local_service_and_the_way_back(
    make_pool: MakePool, witness: Witness, events: EventFile, tally: Tally
) -> None:
    async with make_pool(CONCURRENCY, posters_per_node=3) as pool:
        async with Load(pool, witness, events, CONCURRENCY) as load:
            victims = [process(pool, index) for index in range(3)]
            for index in range(3):
                kill_poster(pool, key=f"poster/{index}")
            await until(lambda: load.via["local"] > 0, what="the local client serves")
            await load.replaced(tally, victims)
            served = load.via["poster"]
            await until(lambda: load.via["poster"] >= served + 100, what="posters serve again")
            await load.more(300)
        await load.verify(least=500)
        assert pool.stats().local > 0
    assert len(events.named("pool.local")) == 1
    assert len(events.named("pool.remote")) == 1


async def test_killed_again_and_again(
    make_pool: MakePool, witness: Witness, events: EventFile, tally: Tally
) -> None:
    async with make_pool(16, posters_per_node=2) as pool:
        async with Load(pool, witness, events, 16) as load:
            for round in range(5):
                victim = process(pool, round % 2)
                kill_poster(pool, key=f"poster/{round % 2}")
                await load.replaced(tally, [victim])
                await load.more(100)
        await load.verify(least=1000)
        assert pool.stats().recreated == 5
