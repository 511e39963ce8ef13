"""A pool in a driver of its own, under which Ray itself is hurt; the scenario is the argument, the witness's
URL the second one. It prints what it has seen as one JSON object.

A process apart, because each scenario breaks the Ray that it runs on, or ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray.cluster_utils import Cluster

from dispatch.posting import PosterPool
from dispatch.posting.posters import batching, roster
from dispatch.posting.posters.keeper import Recreation
from dispatch.processes import is_alive
from faults import Backoff
from protocol import CodedError, Events
from tests.dispatch.posting.posters.cluster_drive import SOON_DEAD, add_node, beating, cluster_of, process_of
from tests.support.events import EventFile
from tests.support.fixtures import KEEP_TRYING, QUICK
from tests.support.wait import until

CONCURRENCY: Final = 11
"""Prime, so that no split is even."""
QUIET: Final[dict[str, Any]] = {
    "address": "local",
    "include_dashboard": False,
    "log_to_driver": False,
    "configure_logging": False,
    "num_cpus": 2,
    "object_store_memory": 100 * 1024 * 1024,
}


class Load:
    """POSTs without a pause, to one URL after the other, and what became of them."""

    def __init__(self, pool: PosterPool, tasks: int, *urls: str) -> None:
        self.pool = pool
        self.urls = urls
        self.via: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.shares: set[int] = set()
        self.unbalanced = 0
        self.longest = 0.0
        self._number = 0
        self._tasks = tasks
        self._stop = False

    @property
    def good(self) -> int:
        return sum(self.via.values())

    async def _post(self) -> None:
        while not self._stop:
            self._number += 1
            url = self.urls[self._number % len(self.urls)]
            began = time.monotonic()
            try:
                reply = await self.pool.post(url, {}, request_id=f"load-{self._number}", deadline=60.0)
            except CodedError as error:
                self.codes[str(error.code)] += 1
            else:
                self.via[reply.via] += 1
            self.longest = max(self.longest, time.monotonic() - began)

    async def _watch(self) -> None:
        while not self._stop:
            stats = self.pool.stats()
            self.unbalanced += not stats.balanced
            self.shares.add(sum(one.share for one in stats.posters))
            await asyncio.sleep(0.005)

    async def more(self, number: int, timeout: float = 30.0) -> None:
        goal = self.good + number
        await until(lambda: self.good >= goal, timeout, f"{number} more replies")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._tasks):
                group.create_task(self._post())
            group.create_task(self._watch())
            try:
                await self.more(50)
                yield self
            finally:
                self._stop = True

    def told(self) -> dict[str, Any]:
        stats = self.pool.stats()
        return {
            "good": self.good,
            "via": dict(self.via),
            "codes": dict(self.codes),
            "shares": sorted(self.shares),
            "unbalanced": self.unbalanced,
            "longest_s": self.longest,
            "submitted": stats.submitted,
            "succeeded": stats.succeeded,
            "peak": stats.peak,
            "recreated": stats.recreated,
            "retried": stats.retried,
        }


def pool_of(posters_per_node: int, **more: Any) -> PosterPool:
    settings = {"health": QUICK, "recreation": KEEP_TRYING, "deadline": 40.0, **more}
    return PosterPool(CONCURRENCY, posters_per_node, **settings)


async def code_of(awaitable: Any) -> list[Any]:
    """The code that it raises, its text, and the seconds that this took."""
    began = time.monotonic()
    try:
        said = await awaitable
    except CodedError as error:
        return [str(error.code), error.detail, time.monotonic() - began]
    return ["", repr(said), time.monotonic() - began]


def alive_nodes() -> list[str]:
    return [one["NodeID"] for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]


# -- the cluster changes


async def drain(cluster: Cluster, node: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address),
        *("--node-id", node, "--deadline-remaining-seconds", "600"),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test drains it"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()[-500:]


def on(pool: PosterPool, node: str) -> list[Any]:
    return [one for one in pool.stats().posters if one.node == node]


async def serving_on(pool: PosterPool, node: str, number: int) -> None:
    await until(
        lambda: [one.state for one in on(pool, node)] == ["serving"] * number, 40, f"posters on {node}"
    )


async def nodes(cluster: Cluster, url: str) -> dict[str, Any]:
    """A node joins, drains and leaves; another joins and is gone without a word."""
    roster.LOOK_EVERY = 0.3  # type: ignore[misc]
    head = cluster.head_node.node_id
    told: dict[str, Any] = {}
    # Large replies too, which go with the object store of a node that is killed.
    urls = f"{url}?delay=0.1", url.removesuffix("ok") + "big?size=300000"
    async with pool_of(2) as pool, Load(pool, 2 * CONCURRENCY, *urls).running() as load:
        joined = add_node(cluster).node_id
        await serving_on(pool, joined, 2)
        told["joined"] = [one.share for one in pool.stats().posters]
        await until(lambda: all(one.occupied for one in on(pool, joined)), 10, "work on the new node")

        going = [(one.pid, one.create_time) for one in on(pool, joined)]
        most = Counter[int]()  # by poster: what it had in flight when it was first seen without a share
        grown = 0

        async def watch() -> None:
            nonlocal grown
            while one_left := on(pool, joined):
                for one in one_left:
                    if one.share == 0:
                        most.setdefault(one.pid, one.occupied)
                        grown += one.occupied > most[one.pid]
                        most[one.pid] = min(most[one.pid], one.occupied)
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        await drain(cluster, joined)
        await asyncio.wait_for(watching, 40)
        told["drained"] = [one.share for one in pool.stats().posters]
        told["drained_took_new_work"] = grown
        await until(
            lambda: not any(is_alive(*one) for one in going), 10, "the drained node's posters are gone"
        )
        told["retried_by_the_drain"] = pool.stats().retried
        await until(lambda: joined not in alive_nodes(), 60, "the drained node has left")

        killed = add_node(cluster)
        await serving_on(pool, killed.node_id, 2)
        await until(lambda: all(one.occupied for one in on(pool, killed.node_id)), 10)
        await asyncio.to_thread(cluster.remove_node, killed, allow_graceful=False)
        await until(lambda: [one.node for one in pool.stats().posters] == [head] * 2, 60, "only the head's")
        told["killed"] = [one.share for one in pool.stats().posters]
        await load.more(100)
    return told | load.told()


# -- the GCS


async def gcs(cluster: Cluster, url: str) -> dict[str, Any]:
    """The GCS is stopped and goes on, then killed and started anew; each time a poster dies meanwhile."""
    told: dict[str, Any] = {}
    async with pool_of(2) as pool, Load(pool, CONCURRENCY, f"{url}?delay=0.02").running() as load:
        async with beating() as heart:
            heart.gap = 0.0
            process = process_of(cluster, "gcs_server")
            os.kill(process, signal.SIGSTOP)
            try:
                before = load.good
                await asyncio.sleep(4.0)
                told["while_stopped"] = [load.good - before, pool.stats().recreated]
                os.kill(pool.stats().posters[0].pid, signal.SIGKILL)
                await asyncio.sleep(1.0)
            finally:
                os.kill(process, signal.SIGCONT)
            await until(lambda: pool.stats().recreated == 1, 30, "the first poster is replaced")
            told["stopped_gap_s"] = heart.gap
            await load.more(100)

            cluster.head_node.kill_gcs_server()
            heart.gap = 0.0
            before = load.good
            await asyncio.sleep(2.0)
            told["while_dead"] = [load.good - before, pool.stats().recreated]
            os.kill(pool.stats().posters[1].pid, signal.SIGKILL)
            await asyncio.sleep(1.0)
            told["dead_gap_s"] = heart.gap
            cluster.head_node.start_gcs_server()  # blocks the loop: it wants the main thread
            await asyncio.sleep(0.1)
            heart.gap = 0.0
            await until(lambda: pool.stats().recreated == 2, 40, "the second poster is replaced")
            told["back_gap_s"] = heart.gap
        await load.more(100)
        told["states"] = [one.state for one in pool.stats().posters]
    return told | load.told()


# -- the raylet


async def raylet(cluster: Cluster, url: str) -> dict[str, Any]:
    """The own raylet is killed with POSTs in flight, and with bodies that go through the object store."""
    told: dict[str, Any] = {}
    async with pool_of(2, deadline=25.0) as pool:
        posters = [(one.pid, one.create_time) for one in pool.stats().posters]
        tasks = [
            asyncio.create_task(code_of(pool.post(f"{url}?delay=1", {}))) for _ in range(2 * CONCURRENCY)
        ]
        await until(lambda: pool.stats().occupied == CONCURRENCY)
        began = time.monotonic()
        os.kill(process_of(cluster, "raylet"), signal.SIGKILL)
        tasks += [asyncio.create_task(code_of(pool.post(url, "x" * 300_000))) for _ in range(4)]
        ended = await asyncio.gather(*tasks)
        told["ended"] = [one[0] for one in ended]
        told["ended_in_s"] = time.monotonic() - began
        await until(lambda: {one.state for one in pool.stats().posters} == {"abandoned"}, 40, "given up")
        told["small"] = (await pool.post(url, {})).via
        told["large"] = (await pool.post(url, "x" * 300_000)).via
        told["left"] = [is_alive(*one) for one in posters]
        began = time.monotonic()
    stats = pool.stats()
    told["close_s"] = time.monotonic() - began
    told["balanced"] = stats.balanced and stats.occupied == 0
    told["peak"] = stats.peak
    return told


# -- calls and replies that are lost


async def lost(url: str, count: int) -> dict[str, Any]:
    """Calls and replies are lost, as RAY_testing_rpc_failure says; no poster dies."""
    failures: Counter[str] = Counter()
    told_of = batching.Batcher._failed

    def counted(self: Any, call: Any, exc: Exception) -> None:
        failures[type(exc).__name__] += 1
        told_of(self, call, exc)

    batching.Batcher._failed = counted  # type: ignore[method-assign]
    ray.init(**QUIET)
    done: Counter[str] = Counter()
    health = type(QUICK)(interval=0.1, timeout=2.0, strikes=20, wedge_after=20.0, unavailable=60.0)
    # Probes are lost too: when both posters are out of service for one, nothing is to go anywhere else.
    async with pool_of(2, health=health, deadline=90.0, local_fallback=False) as pool:

        async def one(number: int) -> None:
            try:
                reply = await pool.post(
                    f"{url}?delay=0.05", {}, request_id=f"lost-{number}", idempotent=number % 2 == 0
                )
            except CodedError as error:
                done[str(error.code)] += 1
            else:
                done[reply.via] += 1

        began = time.monotonic()
        await asyncio.gather(*(one(number) for number in range(count)))
        seconds = time.monotonic() - began
        await until(lambda: pool.stats().occupied == 0, 20)
        stats = pool.stats()
    return {
        "done": dict(done),
        "recreated": stats.recreated,
        "retried": stats.retried,
        "peak": stats.peak,
        "seconds": seconds,
        "failures": dict(failures),
    }


# -- Ray is shut down under the pool


async def shutdown(url: str) -> dict[str, Any]:
    ray.init(**QUIET)
    told: dict[str, Any] = {}
    async with pool_of(2) as pool:
        posters = [(one.pid, one.create_time) for one in pool.stats().posters]
        flying = [asyncio.create_task(code_of(pool.post(f"{url}?delay=20", {}))) for _ in range(CONCURRENCY)]
        waiting = [asyncio.create_task(code_of(pool.post(url, {}))) for _ in range(5)]
        await until(lambda: pool.stats().occupied == CONCURRENCY)
        began = time.monotonic()
        ray.shutdown()
        told["at_once"] = await code_of(pool.post(url, {}))
        told["flying"] = [one[0] for one in await asyncio.gather(*flying)]
        told["waiting"] = [one[0] for one in await asyncio.gather(*waiting)]
        told["ended_in_s"] = time.monotonic() - began
        await asyncio.sleep(1.0)  # several probes, each of which might start a Ray of its own
        told["another_ray"] = ray.is_initialized()
        ray.init(**QUIET)
        told["on_another_ray"] = await code_of(pool.post(url, {}))
        began = time.monotonic()
    told["close_s"] = time.monotonic() - began
    told["left"] = [is_alive(*one) for one in posters]
    stats = pool.stats()
    told["balanced"] = stats.balanced and stats.occupied == stats.in_flight == 0
    async with pool_of(2) as again:
        told["a_new_pool"] = (await again.post(url, {})).via
    return told


# -- settings that cannot work here


async def few_descriptors(url: str) -> dict[str, Any]:
    """This process and all that Ray starts may have a few thousand descriptors each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
    ray.init(**QUIET)
    told: dict[str, Any] = {}
    for name, local in (("local", True), ("posters", False)):
        pool = PosterPool(5000, 2, health=QUICK, local_fallback=local)
        told[name] = await code_of(pool.start())
        told[f"{name}_tried"] = [one.generation for one in pool.stats().posters]
    return told


async def no_environment(url: str) -> dict[str, Any]:
    """Posters whose runtime_env asks for a package that does not exist."""
    ray.init(**QUIET)
    options = {"runtime_env": {"pip": ["failsoft-has-no-such-package==0.0.0"]}}
    with tempfile.TemporaryDirectory() as folder:
        file = EventFile(Path(folder) / "events.jsonl")
        with contextlib.closing(Events.to_file(file.path, run="driver", role="pool")) as events:
            told = await _no_environment(url, options, events)
        abandoned = file.named("poster.abandoned")
    details = [event["detail"] for event in abandoned]
    return told | {"abandoned": [event["code"] for event in abandoned], "details": details}


async def _no_environment(url: str, options: dict[str, Any], events: Events) -> dict[str, Any]:
    recreation = Recreation(Backoff(0.05, 0.1), budget=2)
    health = dataclasses.replace(QUICK, start_timeout=100.0)  # pip says why it fails, a time limit does not
    settings = {"poster_options": options, "recreation": recreation, "events": events, "health": health}
    async with pool_of(2, **settings) as pool:
        await until(lambda: {one.state for one in pool.stats().posters} == {"abandoned"}, 180)
        tried = [one.generation for one in pool.stats().posters]
        via = (await pool.post(url, {})).via
        await asyncio.sleep(1.0)
        later = [one.generation for one in pool.stats().posters]
    return {"tried": tried, "later": later, "via": via}


# -- the owner ends


def below() -> list[tuple[int, float, str]]:
    """Every process below this one: pid, start time, command."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends some that it needs no more
            found.append((one.pid, one.create_time(), " ".join(one.cmdline())))
    return found


async def owner(url: str, how: str) -> None:
    """Print every process below this one, and end: by an exception, or by what the test sends."""
    ray.init(**QUIET)
    async with pool_of(2) as pool:
        tasks = [asyncio.create_task(pool.post(f"{url}?delay=60", {})) for _ in range(CONCURRENCY)]
        await until(lambda: pool.stats().occupied == CONCURRENCY)
        # The roster looks at the cluster through an actor of its own, and a worker's title names its actor.
        await until(lambda: any("Eye" in name for _, _, name in below()), 30, "the roster's eye")
        print(json.dumps(below()), flush=True)
        if how == "raises":
            raise ZeroDivisionError("the owner's own bug")
        await asyncio.gather(*tasks)


def main() -> None:
    scenario, url, *rest = sys.argv[1:]
    on_cluster = {"nodes": nodes, "gcs": gcs, "raylet": raylet}
    alone = {"shutdown": shutdown, "few_descriptors": few_descriptors, "no_environment": no_environment}
    if scenario == "owner":
        asyncio.run(owner(url, rest[0]))
        return
    if scenario == "lost":
        told = asyncio.run(lost(url, int(rest[0])))
    elif scenario in alone:
        told = asyncio.run(alone[scenario](url))
    else:
        with cluster_of(1, SOON_DEAD) as cluster:
            told = asyncio.run(on_cluster[scenario](cluster, url))
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
