"""``python -m tests.engine_matrix.driver ADDRESS TAGS``: the program that has the fleet, as a user has it.

Prints every change of an engine as a JSON line, with the time (unix seconds), and does what the lines on its
standard input say: ``{"do": "restart", "key": "engine/0"}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import msgspec
import ray

from dispatch.engines import EngineFleet, EngineStatus, embedded_spec
from protocol import CodedError
from tests.engine_matrix.expected import HOLD, PROBES, START_DELAY, STATES


def say(status: EngineStatus) -> None:
    print(json.dumps({"at": time.time(), **msgspec.to_builtins(status)}), flush=True)


async def do(fleet: EngineFleet, order: dict[str, Any]) -> None:
    """One order. One that fails is not the matrix's business: what became of the engine is."""
    try:
        if order["do"] == "hold":
            await fleet.hold(order["key"], HOLD, "weight update")
        else:
            await getattr(fleet, order["do"])(order["key"])
    except CodedError as exc:
        print(order, exc, file=sys.stderr, flush=True)


async def main(address: str, tags: list[str]) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    specs = [
        embedded_spec(
            token_rate=50,
            start_delay=START_DELAY if state == "starting" else None,
            arguments=("--litter",),
            env={"TEST_TAG": tag},
            resources={"engines": 1.0},
            **PROBES,
        )
        for state, tag in zip(STATES, tags, strict=True)
    ]
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    # The budget is not what is tried here: some engines are killed in every round, while they start.
    async with EngineFleet(specs, restart_backoff=(0.05, 0.2), restart_budget=1000) as fleet:
        fleet.on_change(say)
        doing: set[asyncio.Task[None]] = set()
        while line := await orders.readline():
            doing.add(asyncio.create_task(do(fleet, json.loads(line))))
        await asyncio.gather(*doing)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2].split(",")))
