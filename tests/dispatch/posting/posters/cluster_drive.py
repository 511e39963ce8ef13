"""A driver of its own on a cluster of its own; the scenario is the argument.

It prints what it has seen as one JSON object. A process apart, since that of the tests has a Ray already."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import psutil
import ray
from ray.cluster_utils import Cluster

from dispatch.posting import Health, PosterPool, Request
from dispatch.posting.posters.placement import affinity
from dispatch.posting.posters.scout import Change, Nodes, Scout
from dispatch.processes import is_alive
from protocol import CodedError
from tests.support.wait import until

QUIET: Final[dict[str, Any]] = {"log_to_driver": False, "configure_logging": False}
SMALL: Final = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}
# Ray's own settings take 15 seconds to call a node dead whose processes were killed.
SOON_DEAD: Final = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
BEAT: Final = 0.01
LOOK: Final = 1.0
"""Seconds after which a look that nobody answers ends; what is to be answered has `IN_TIME`."""
IN_TIME: Final = 20.0
UNHURRIED: Final = Health(timeout=20.0, wedge_after=60.0, start_timeout=300.0)
"""Health for more posters than the machine has processors: slow is not dead."""
STOPPED: Final = 3.0
"""Seconds for which the GCS is stopped."""


@contextlib.contextmanager
def cluster_of(nodes: int, system_config: dict[str, Any] | None = None) -> Iterator[Cluster]:
    """A cluster of so many small nodes, with this process as its driver."""
    head: dict[str, Any] = {**SMALL, "include_dashboard": False}
    if system_config:
        head["_system_config"] = system_config
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**SMALL)
        ray.init(address=cluster.address, **QUIET)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Watched:
    """What a scout's `watch` has told so far."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    @contextlib.asynccontextmanager
    async def by(self, scout: Scout) -> AsyncIterator[Watched]:
        async def follow() -> None:
            async for change in scout.watch(0.2, LOOK):
                self.changes.append(change)

        task = asyncio.create_task(follow())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait({task})

    def told(self, kind: str, node: str) -> bool:
        return any(one.id == node for change in self.changes for one in getattr(change, kind))

    async def until(self, kind: str, node: str, timeout: float = 30.0) -> float:
        """Wait until that node has been told of as ``kind``; the seconds it took."""
        began = time.monotonic()
        await until(lambda: self.told(kind, node), timeout, f"{kind}: {node}")
        return round(time.monotonic() - began, 2)


class Heart:
    """Beats on the loop, and knows the longest time that the loop stood still."""

    def __init__(self) -> None:
        self.gap = 0.0

    async def beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT)
            self.gap = max(self.gap, time.monotonic() - before - BEAT)


@contextlib.asynccontextmanager
async def beating() -> AsyncIterator[Heart]:
    heart = Heart()
    task = asyncio.create_task(heart.beat())
    try:
        yield heart
    finally:
        task.cancel()
        await asyncio.wait({task})


@ray.remote(num_cpus=0)
class Echo:
    async def echo(self, value: Any) -> Any:
        return value


def process_of(cluster: Cluster, kind: str) -> int:
    return int(cluster.head_node.all_processes[kind][0].process.pid)


def add_node(cluster: Cluster) -> Any:
    """Add a small node. Blocks the loop for a second, since Ray wants the main thread for its handlers."""
    return cluster.add_node(**SMALL)


def ids(nodes: Nodes | None) -> list[str] | None:
    return None if nodes is None else [node.id for node in nodes.alive]


async def membership(cluster: Cluster) -> dict[str, Any]:
    """Nodes that come, drain and go; the scout's own actor killed; its end."""
    told: dict[str, Any] = {"head": cluster.head_node.node_id}
    scout = Scout()
    told["at_first"] = ids(await scout.look(30))
    async with Watched().by(scout) as watched:
        await watched.until("joined", told["head"])
        added = add_node(cluster)
        told["added"] = added.node_id
        told["joined_in_s"] = await watched.until("joined", added.node_id)

        assert scout._sight is not None
        first = scout._sight
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: scout._sight is not None and scout._sight.pid != first.pid, 20)
        told["after_its_actor_died"] = ids(await scout.look(IN_TIME))

        # Ray ends a node that drains as soon as it is idle: something like a poster has to be there.
        busy: Any = Echo.options(num_cpus=0.001, scheduling_strategy=affinity(added.node_id)).remote()
        await asyncio.wait_for(_await(busy.echo.remote(1)), 30)
        drain = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address),
            *("--node-id", added.node_id, "--deadline-remaining-seconds", "600"),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test drains it"),
            stderr=subprocess.PIPE,
        )
        _, said = await drain.communicate()
        told["drain"] = [drain.returncode, said.decode()[-500:]]
        told["draining_in_s"] = await watched.until("draining", added.node_id)
        seen = await scout.look(IN_TIME)
        assert seen is not None
        told["busy"] = await asyncio.wait_for(_await(busy.echo.remote("still served")), IN_TIME)
        told["open_while_draining"] = list(seen.open)
        told["alive_while_draining"] = ids(seen)

        killed = add_node(cluster)
        told["killed"] = killed.node_id
        await watched.until("joined", killed.node_id)
        await asyncio.to_thread(cluster.remove_node, killed, allow_graceful=False)
        told["left_in_s"] = await watched.until("left", killed.node_id)
        ray.kill(busy, no_restart=True)
        told["drained_left_in_s"] = await watched.until("left", added.node_id)
        told["changes"] = [[len(c.joined), len(c.left), len(c.draining)] for c in watched.changes]
    sight = scout._sight
    assert sight is not None
    await scout.close()
    told["actor_left"] = is_alive(sight.pid, sight.create_time)
    told["look_after_close"] = ids(await scout.look(LOOK))
    return told


async def stopped_gcs(cluster: Cluster) -> dict[str, Any]:
    """The GCS is stopped: what the scout says, and what the loop and Ray's other calls go on doing."""
    told: dict[str, Any] = {}
    scout = Scout()
    echo: Any = Echo.remote()
    other: Any = Echo.remote()
    spare = Scout()
    before = await scout.look(30)
    await spare.look(30)
    sight = spare._sight
    assert sight is not None
    await asyncio.gather(echo.echo.remote(1), other.echo.remote(1))
    gcs = process_of(cluster, "gcs_server")
    async with beating() as heart, Watched().by(scout) as watched:
        await until(lambda: watched.changes, 10)
        heart.gap = 0.0
        os.kill(gcs, signal.SIGSTOP)
        try:
            began = time.monotonic()
            looks = []
            while time.monotonic() - began < STOPPED:
                asked = time.monotonic()
                looks.append([ids(await scout.look(LOOK)), time.monotonic() - asked])
            told["looks"] = looks
            told["echo"] = await asyncio.wait_for(_await(echo.echo.remote("still there")), IN_TIME)
            # Each of these was seen not to wait for the GCS, and the pool counts on it.
            ray.kill(other, no_restart=True)
            late: Any = Echo.options(
                scheduling_strategy=affinity(ray.get_runtime_context().get_node_id())
            ).remote()
            reply = asyncio.ensure_future(_await(late.echo.remote("late")))
            ray.cancel(echo.echo.remote(2))
            await spare.close()
            told["closed_actor_left"] = is_alive(sight.pid, sight.create_time)
        finally:
            os.kill(gcs, signal.SIGCONT)
        told["gap_s"] = heart.gap
        told["late"] = await asyncio.wait_for(reply, 20)
        began = time.monotonic()
        after = None
        while after is None and time.monotonic() - began < 20:
            after = await scout.look(LOOK)
        told["back_in_s"] = time.monotonic() - began
        told["same"] = after == before
        told["changes"] = len(watched.changes)
    await scout.close()
    return told


async def restarted_gcs(cluster: Cluster) -> dict[str, Any]:
    """The GCS is killed and started again, with tables that outlive it."""
    told: dict[str, Any] = {}
    scout = Scout()
    echo: Any = Echo.remote()
    before = await scout.look(30)
    await echo.echo.remote(1)
    async with beating() as heart, Watched().by(scout) as watched:
        await until(lambda: watched.changes, 10)
        cluster.head_node.kill_gcs_server()
        heart.gap = 0.0
        told["while_down"] = [ids(await scout.look(LOOK)) for _ in range(3)]
        told["echo"] = await asyncio.wait_for(_await(echo.echo.remote("still there")), IN_TIME)
        told["gap_s"] = heart.gap
        cluster.head_node.start_gcs_server()
        began = time.monotonic()
        after = None
        while after is None and time.monotonic() - began < 30:
            after = await scout.look(LOOK)
        told["back_in_s"] = time.monotonic() - began
        told["same"] = after == before
        told["echo_after"] = await asyncio.wait_for(_await(echo.echo.remote("as before")), IN_TIME)
        late: Any = Echo.remote()
        told["late"] = await asyncio.wait_for(_await(late.echo.remote("late")), 20)
        await asyncio.sleep(2.0)  # long enough for several looks
        told["changes"] = len(watched.changes)
    await scout.close()
    return told


async def split(nodes: int, posters_per_node: int, concurrency: int, url: str, count: int) -> dict[str, Any]:
    """A pool over the cluster, and ``count`` POSTs through it."""
    pool = PosterPool(concurrency, posters_per_node, health=UNHURRIED)
    began, free = time.monotonic(), psutil.virtual_memory().available
    codes: list[str] = []
    good = 0
    async with pool:
        started = time.monotonic() - began
        posters = pool.stats().posters
        used = free - psutil.virtual_memory().available
        own = sum(psutil.Process(one.pid).memory_full_info().uss for one in posters)
        requests = (Request(url=url, payload={"n": n}, request_id=f"n-{n}") for n in range(count))
        began = time.monotonic()
        async for done in pool.post_many(requests):
            good += done.reply is not None
            if isinstance(done.error, CodedError):
                codes.append(str(done.error.code))
        posted = time.monotonic() - began
        stats = pool.stats()
        began = time.monotonic()
    return {
        "alive": sorted(node["NodeID"] for node in ray.nodes() if node["Alive"]),  # type: ignore[no-untyped-call]
        "nodes": [one.node for one in posters],
        "shares": [one.share for one in posters],
        "states": [one.state for one in posters],
        "pids": [one.pid for one in posters],
        "good": good,
        "codes": codes,
        "recreated": stats.recreated,
        "peak": stats.peak,
        "start_s": started,
        "post_s": posted,
        "close_s": time.monotonic() - began,
        "machine_bytes": used,
        "posters_uss_bytes": own,
    }


async def _await(ref: Any) -> Any:
    return await ref


def main() -> None:
    scenario, rest = sys.argv[1], sys.argv[2:]
    if scenario == "split":
        nodes, each, concurrency, count = (int(word) for word in rest[:4])
        began = time.monotonic()
        with cluster_of(nodes):
            up = time.monotonic() - began
            told = asyncio.run(split(nodes, each, concurrency, rest[4], count)) | {"cluster_s": up}
    else:
        run = {"membership": membership, "stopped_gcs": stopped_gcs, "restarted_gcs": restarted_gcs}[scenario]
        with cluster_of(2 if scenario == "restarted_gcs" else 1, SOON_DEAD) as cluster:
            told = asyncio.run(run(cluster))
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
