"""``make bench``: PosterPool beside a plain Ray-actor POST pool and beside the bare transport, in one run.

Closed loops: so many callers, each of which posts again as soon as it has its reply, against a server that
answers after a fixed time. Interleaved rounds, medians. Only the ratios carry over to another machine; the
limits are the project's own, and a broken one ends the run with status 1.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import ray
from rich.console import Console
from rich.table import Table

from benchmarks.plain_pool import PlainPool
from benchmarks.server import serving
from dispatch.posting import PosterPool
from dispatch.posting.request import Item, encode
from dispatch.posting.transports.client import make_client
from dispatch.posting.transports.transport import exchange

SERVICE_TIME: Final = 0.1
POSTERS: Final = 2
ROUNDS: Final = 3
IN_FLIGHT: Final = (1, 64, 256, 512, 1024)
SECONDS: Final = 5.0
"""How long each is measured."""
WARM: Final = 20.0
"""Seconds at most until each caller has had its first reply."""
PAYLOAD: Final = {"text": "prompt " * 40, "sampling_params": {"max_new_tokens": 64}}

Post = Callable[[str, Any], Awaitable[Any]]


class Sample(NamedTuple):
    """POST/s; CPU of this process in microseconds a POST; median latency in milliseconds."""

    rate: float
    cpu: float
    p50: float


async def measure(post: Post, url: str, in_flight: int) -> Sample:
    """One closed loop. What did not finish a single POST in its time has a rate of 0."""
    latencies: list[float] = []
    warm = asyncio.Event()
    waiting = in_flight
    stop = False

    async def caller() -> None:
        nonlocal waiting
        await post(url, PAYLOAD)
        waiting -= 1
        if not waiting:
            warm.set()
        while not stop:
            began = time.perf_counter()
            await post(url, PAYLOAD)
            latencies.append(time.perf_counter() - began)

    callers = [asyncio.create_task(caller()) for _ in range(in_flight)]
    try:
        async with asyncio.timeout(WARM):
            await warm.wait()
    except TimeoutError:
        pass  # it is measured as it is
    latencies.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(SECONDS)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    done = list(latencies)
    stop = True
    for task in callers:
        task.cancel()
    await asyncio.wait(callers)
    if not done:
        return Sample(0.0, float("inf"), float("inf"))
    return Sample(len(done) / wall, cpu / len(done) * 1e6, statistics.median(done) * 1e3)


async def plain(url: str, in_flight: int) -> Sample:
    """The pool that people have today."""
    pool = PlainPool(in_flight, POSTERS)
    try:
        return await measure(pool.post, url, in_flight)
    finally:
        await pool.close()


async def ours(url: str, in_flight: int) -> Sample:
    """PosterPool with its defaults."""
    async with PosterPool(max(in_flight, POSTERS), POSTERS, 120.0) as pool:
        return await measure(pool.post, url, in_flight)


async def bare(url: str, in_flight: int) -> Sample:
    """The transport alone, in this process: no Ray, no pool, no retries."""
    client = make_client(in_flight)

    async def post(url: str, payload: Any) -> Any:
        return await exchange(client, Item("bare", 0, url, encode(payload), {}), 120.0)

    try:
        return await measure(post, url, in_flight)
    finally:
        await client.aclose()


def median(samples: list[Sample]) -> Sample:
    """The median of each column."""
    return Sample(*(statistics.median(column) for column in zip(*samples, strict=True)))


async def main() -> int:
    """Print the table; 1 when a limit is broken."""
    table = Table(
        title=f"{SERVICE_TIME * 1000:.0f} ms service time, {POSTERS} posters, medians of {ROUNDS} rounds"
    )
    for column in (
        *("in flight", "plain POST/s", "ours POST/s", "ratio", "bare POST/s", "of the possible"),
        *("plain CPU µs", "ours CPU µs", "ratio", "plain p50 ms", "ours p50 ms"),
    ):
        table.add_column(column, justify="right")
    broken: list[str] = []
    with serving(SERVICE_TIME) as url:
        for in_flight in IN_FLIGHT:
            runs: dict[Callable[[str, int], Awaitable[Sample]], list[Sample]] = {
                plain: [],
                ours: [],
                bare: [],
            }
            for _ in range(ROUNDS):
                for system, samples in runs.items():
                    samples.append(await system(url, in_flight))
            theirs, mine, alone = (median(samples) for samples in runs.values())
            possible = min(in_flight / SERVICE_TIME, alone.rate)
            table.add_row(
                str(in_flight),
                f"{theirs.rate:.0f}",
                f"{mine.rate:.0f}",
                f"{mine.rate / theirs.rate:.1f}" if theirs.rate else "∞",
                f"{alone.rate:.0f}",
                f"{mine.rate / possible:.0%}",
                f"{theirs.cpu:.0f}",
                f"{mine.cpu:.0f}",
                f"{theirs.cpu / mine.cpu:.1f}",
                f"{theirs.p50:.1f}",
                f"{mine.p50:.1f}",
            )
            if in_flight in (256, 1024) and mine.rate < 10 * theirs.rate:
                broken.append(f"{in_flight} in flight: less than 10 times the plain pool's throughput")
            if in_flight in (256, 1024) and mine.rate < 0.85 * possible:
                broken.append(f"{in_flight} in flight: less than 85% of the possible throughput")
            if in_flight == 512 and mine.cpu > theirs.cpu / 10:
                broken.append("512 in flight: more than a tenth of the plain pool's CPU a POST")
            if in_flight == 1 and mine.p50 > theirs.p50:
                broken.append("1 in flight: a median latency above the plain pool's")
    Console(width=140).print(table)
    for line in broken:
        print(f"over the limit: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    code = asyncio.run(main())
    ray.shutdown()
    sys.exit(code)
