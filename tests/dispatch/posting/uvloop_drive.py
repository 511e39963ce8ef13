"""A driver that runs on uvloop, and whose Ray workers do too; what it has seen as one JSON object."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from typing import Any

import ray
import uvloop

from dispatch.posting import PosterPool
from protocol import CodedError
from tests.support.fixtures import KEEP_TRYING, QUICK
from tests.support.ray_side import kill_poster
from tests.support.wait import until

ROUNDS = 9
IN_TIME = 15.0


class Victim:
    """An async actor that is about to be killed."""

    async def pid(self) -> int:
        return os.getpid()

    async def loop(self) -> str:
        return type(asyncio.get_running_loop()).__module__

    async def hang(self) -> None:
        await asyncio.Event().wait()


async def ended(ref: Any) -> str:
    try:
        async with asyncio.timeout(IN_TIME):
            await ref
    except TimeoutError:
        return "did not end"
    except ray.exceptions.RayError as exc:
        return type(exc).__name__
    return "answered"


async def awaits_on_killed_actors() -> dict[str, Any]:
    """Calls made before and just after an actor's death, each way of killing in turn."""
    seen: Counter[str] = Counter()
    loop = ""
    for number in range(ROUNDS):
        remote: Any = ray.remote(num_cpus=0.001)(Victim)
        victim = remote.remote()
        pid, loop = await victim.pid.remote(), await victim.loop.remote()
        before = [asyncio.ensure_future(ended(victim.hang.remote())) for _ in range(3)]
        await victim.pid.remote()
        if number % 2:
            os.kill(pid, signal.SIGKILL)
        else:
            ray.kill(victim)
        after = [asyncio.ensure_future(ended(victim.pid.remote())) for _ in range(3)]
        seen.update(await asyncio.gather(*before, *after))
    return {"actor_loop": loop, "calls": dict(seen)}


async def pool_with_killed_posters(url: str) -> dict[str, Any]:
    """A pool whose posters are killed while they work."""
    async with PosterPool(32, 2, 30.0, health=QUICK, recreation=KEEP_TRYING) as pool:
        for round in range(1, 4):
            posts = [asyncio.create_task(pool.post(url, {})) for _ in range(32)]
            await until(lambda: pool.stats().occupied == 32)
            kill_poster(pool)
            replies = await asyncio.gather(*posts, return_exceptions=True)
            failed = [str(one.code) for one in replies if isinstance(one, CodedError)]
            await until(lambda round=round: pool.stats().recreated == round, 40)
            if failed:
                return {"failed": failed}
        stats = pool.stats()
    return {"failed": [], "succeeded": stats.succeeded, "balanced": stats.balanced}


async def main(url: str) -> dict[str, Any]:
    return {
        "driver_loop": type(asyncio.get_running_loop()).__module__,
        **await awaits_on_killed_actors(),
        "pool": await pool_with_killed_posters(url),
    }


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    result = uvloop.run(main(sys.argv[1]))
    ray.shutdown()
    print(json.dumps(result))
