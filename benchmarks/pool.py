"""``make bench``: PosterPool beside a plain Ray-actor POST pool, interleaved in one run.

Only the ratios carry over to another machine. Medians of three runs each.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from benchmarks.plain_pool import PlainPool
from benchmarks.server import serving
from dispatch.posting import PosterPool

SERVICE_TIME = 0.1
POSTERS = 2
ROUNDS = 3
PAYLOAD = {"text": "prompt " * 40, "sampling_params": {"max_new_tokens": 64}}


async def _measure(post: Any, url: str, in_flight: int) -> tuple[float, float]:
    """POST/s and driver CPU in microseconds a POST, at ``in_flight`` at once."""
    total = max(in_flight * 4, 20)
    await asyncio.gather(*(post(url, PAYLOAD) for _ in range(min(in_flight, 32))))
    gate = asyncio.Semaphore(in_flight)

    async def one() -> None:
        async with gate:
            await post(url, PAYLOAD)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one() for _ in range(total)))
    return total / (time.perf_counter() - wall), (time.process_time() - cpu) / total * 1e6


async def main() -> None:
    table = Table(title=f"service time {SERVICE_TIME * 1000:.0f} ms, {POSTERS} posters, medians of {ROUNDS}")
    for column in (
        "in flight",
        "plain POST/s",
        "failsoft POST/s",
        "ratio",
        "plain µs/POST",
        "failsoft µs/POST",
    ):
        table.add_column(column, justify="right")
    with serving(SERVICE_TIME) as url:
        for in_flight in (1, 64, 256):
            plain_runs, our_runs = [], []
            for _ in range(ROUNDS):
                plain = PlainPool(in_flight, POSTERS)
                plain_runs.append(await _measure(plain.post, url, in_flight))
                await plain.close()
                async with PosterPool(max(in_flight, POSTERS), POSTERS, 120.0) as pool:
                    our_runs.append(await _measure(pool.post, url, in_flight))
            plain_rate, plain_cpu = (statistics.median(column) for column in zip(*plain_runs, strict=True))
            our_rate, our_cpu = (statistics.median(column) for column in zip(*our_runs, strict=True))
            table.add_row(
                str(in_flight),
                f"{plain_rate:.0f}",
                f"{our_rate:.0f}",
                f"{our_rate / plain_rate:.2f}",
                f"{plain_cpu:.0f}",
                f"{our_cpu:.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    asyncio.run(main())
    ray.shutdown()
