"""A driver of the Ray at the address that it is given, for tests that kill it: it starts a group under the
name that it is given, prints its ranks' processes, and has them compute."""

from __future__ import annotations

import asyncio
import json
import sys

import ray

from dispatch.roles import TrainingGroup
from tests.dispatch.roles.ranks import Trainer


async def main(name: str) -> None:
    async with TrainingGroup(Trainer, 2, name=name, resources={"CPU": 0.1}) as group:
        print(json.dumps([[info.pid, info.create_time] for info in group.ranks if info]), flush=True)
        await group.call("sleep", 100.0, timeout=100.0)


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    asyncio.run(main(sys.argv[2]))
