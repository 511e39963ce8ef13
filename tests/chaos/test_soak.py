"""Everything at once, for as long as FAILSOFT_SOAK_SECONDS says (60 by default), from a printed seed."""

from __future__ import annotations

import asyncio
import os
import random
import time

import pytest

from tests.chaos.load import Load
from tests.chaos.tally import Tally
from tests.chaos.test_posters_killed import INJURIES, process
from tests.support.events import EventFile
from tests.support.fixtures import MakePool
from tests.support.ray_side import kill_poster
from tests.support.witness import Witness

SECONDS = float(os.environ.get("FAILSOFT_SOAK_SECONDS", "60"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
async def test_soak(
    make_pool: MakePool, witness: Witness, events: EventFile, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("FAILSOFT_SOAK_SEED", time.time_ns() % 1_000_000))
    with capsys.disabled():
        print(f"\nsoak: {SECONDS:g} s, FAILSOFT_SOAK_SEED={seed}")
    rng = random.Random(seed)
    end = time.monotonic() + SECONDS
    async with make_pool(32, posters_per_node=3) as pool:
        async with Load(pool, witness, events, 32) as load:
            while time.monotonic() < end:
                injury = rng.choice([*INJURIES, "all", "cancel"])
                if injury == "cancel":
                    storm = [
                        asyncio.create_task(pool.post(witness.url("hang"), {}, request_id=f"storm-{n}"))
                        for n in range(16)
                    ]
                    await load.more(rng.randint(1, 50))
                    for task in storm:
                        task.cancel()
                    await asyncio.wait(storm)
                    load.extra(len(storm))
                    continue
                victims = [process(pool, index) for index in range(3)] if injury == "all" else [process(pool)]
                if injury == "all":
                    for index in range(3):
                        kill_poster(pool, key=f"poster/{index}")
                else:
                    INJURIES[injury](pool)
                await load.replaced(tally, victims)
                await load.more(rng.randint(1, 100))
        await load.verify(least=100)
