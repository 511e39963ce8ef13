"""A first death is forgiven, after the second one suspect at a time, the third is the end."""

from __future__ import annotations

import asyncio
import random

from dispatch.posting.load.suspects import Strikes
from protocol import CodedError
from tests.dispatch.posting.load.virtual import run, settle


def struck(gate: asyncio.Lock, deaths: int = 2) -> Strikes:
    strikes = Strikes(gate)
    for number in range(deaths):
        assert strikes.died(f"poster/{number}", "ACTOR.DIED") is None
    return strikes


def test_the_third_death_is_the_end_and_tells_of_all() -> None:
    strikes = struck(asyncio.Lock())
    error = strikes.died("engine/7", "ENGINE.EXITED")
    assert isinstance(error, CodedError)
    assert error.code == "REQUEST.POISON"
    assert error.data == {
        "deaths": ["poster/0", "poster/1", "engine/7"],
        "codes": ["ACTOR.DIED", "ACTOR.DIED", "ENGINE.EXITED"],
    }
    assert strikes.deaths == 3


def test_how_many_is_a_setting() -> None:
    gate = asyncio.Lock()
    assert Strikes(gate, most=1).died("a", "ACTOR.DIED") is not None
    two = Strikes(gate, most=2)
    assert two.turn() is not gate
    two.died("a", "ACTOR.DIED")
    assert two.turn() is gate


def test_up_to_one_death_nobody_waits() -> None:
    async def scenario() -> None:
        gate = asyncio.Lock()
        alone, first, second = struck(gate), struck(gate, 0), struck(gate, 1)
        async with alone.turn(), first.turn(), second.turn(), second.turn():
            assert gate.locked()
        assert not gate.locked()

    run(scenario())


def test_one_suspect_at_a_time_in_order_whoever_is_cancelled() -> None:
    async def scenario(seed: int) -> None:
        rng = random.Random(seed)
        gate = asyncio.Lock()
        inside: list[int] = []
        order: list[int] = []

        async def one(number: int) -> None:
            async with struck(gate).turn():
                inside.append(number)
                order.append(number)
                assert len(inside) == 1
                try:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside.remove(number)

        tasks = []
        for number in range(50):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0)
            if rng.random() < 0.7:
                rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settle()
        assert order == sorted(order)
        assert not gate.locked()

    for seed in range(50):
        run(scenario(seed))
