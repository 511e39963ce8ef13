"""A driver of its own, run as ``python -m tests.chaos.drive NODES URL EVENTS``.

With NODES 1 it prints its posters and posts until it is killed; with more it builds a cluster, removes a
node in the middle of the load, and prints what came of it as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from dispatch.posting import PosterPool, Request
from dispatch.processes import same_process
from protocol import Events
from tests.support.fixtures import KEEP_TRYING, QUICK
from tests.support.wait import until

CONCURRENCY = 18
QUIET = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}


async def until_killed(url: str, events: Path) -> None:
    ray.init(address="local", num_cpus=2, object_store_memory=100 * 1024 * 1024, **QUIET)
    async with PosterPool(4, 2, events=Events.to_file(events, run="driver", role="pool")) as pool:
        print(json.dumps([[one.pid, one.create_time] for one in pool.stats().posters]), flush=True)
        while True:
            await pool.post(url, {})


async def with_a_node_removed(nodes: int, url: str, events: Path) -> dict[str, Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    others = [cluster.add_node(num_cpus=2) for _ in range(nodes - 1)]
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    sink = Events.to_file(events, run="cluster", role="pool")
    pool = PosterPool(CONCURRENCY, 1, health=QUICK, recreation=KEEP_TRYING, events=sink)
    stop = asyncio.Event()
    codes: list[str] = []
    good = balanced = 0

    def requests() -> Any:
        number = 0
        while not stop.is_set():
            number += 1
            yield Request(url=url, payload={}, request_id=f"node-{number}", deadline=60.0)

    async def load() -> None:
        nonlocal good, balanced
        async for done in pool.post_many(requests()):
            good += done.reply is not None
            if done.error is not None:
                codes.append(str(done.error.code))
            balanced += pool.stats().balanced

    try:
        async with pool:
            posting = asyncio.create_task(load())
            await until(lambda: good >= 200, 60)
            lost = others[-1].node_id
            victims = [one for one in pool.stats().posters if one.node == lost]
            await asyncio.to_thread(cluster.remove_node, others[-1], allow_graceful=False)
            await until(lambda: all(same_process(v.pid, v.create_time) is None for v in victims), 60)
            await until(
                lambda: all(one.state == "serving" and one.node != lost for one in pool.stats().posters), 60
            )
            before = good
            await until(lambda: good >= before + 200, 60)
            stop.set()
            await posting
            await until(lambda: pool.stats().occupied == 0, 30)
            stats = pool.stats()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {
        "victims": [[v.pid, v.create_time] for v in victims],
        "good": good,
        "codes": codes,
        "balanced": balanced,
        "submitted": stats.submitted,
        "succeeded": stats.succeeded,
        "peak": stats.peak,
    }


def main() -> None:
    nodes, url, events = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if nodes > 1:
        print(json.dumps(asyncio.run(with_a_node_removed(nodes, url, events))), flush=True)
    else:
        asyncio.run(until_killed(url, events))


if __name__ == "__main__":
    main()
