"""``python -m benchmarks.goodput``: what is left of a pool's goodput while a poster is killed every second.

A closed loop of callers against a server that answers after a fixed time and counts what arrives by
X-Request-Id: first undisturbed, then the same load from the same seed while one poster a second is ended by
SIGKILL. Afterwards the server's counts are set against the reasons that the pool recorded for sending an id
again. A broken limit ends the run with status 1.

The pool has its defaults but for one thing: a poster that lives for a second or two, sixty times in a row,
is what `Recreation` calls hopeless. With its defaults it would be left alone for up to 10 s at a time and
given up after the seventh life, and there would be nobody to kill. So here it is replaced at once, however
often.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
from rich.console import Console
from rich.table import Table

from benchmarks.server import serving
from chaos import strike
from dispatch.posting import PosterPool
from dispatch.posting.observe.stats import PoolStats
from dispatch.posting.posters.keeper import Recreation
from faults import Backoff
from protocol import CodedError, Events

SERVICE_TIME: Final = 0.1
POSTERS: Final = 4
IN_FLIGHT: Final = 64
"""Two cores, of which a new Ray worker takes 0.6 s a second: with more in flight these two compete, and it
is the machine that is measured."""
WARM: Final = 60.0
"""Seconds at most until the measuring begins."""
EVERY: Final = 1.0
"""Seconds from one kill to the next."""
LEAST_KILLED: Final = 0.75
"""Share of the kills that have to have hit somebody: while no poster serves there is nobody to hit."""
LEAST_GOODPUT: Final = 0.9
MOST_P99: Final = 3.0
AT_ONCE: Final = Recreation(Backoff(0.1, 0.1), budget=10_000)


@dataclass(slots=True)
class Run:
    """What one run came to. ``began`` and ``ends`` bound the measured time (``time.perf_counter``)."""

    began: float = float("inf")
    ends: float = float("inf")
    warm: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: int = 0
    replies: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    in_time: int = 0
    kills: int = 0
    nobody: int = 0
    stats: PoolStats | None = None
    ids: int = 0
    repeated: int = 0
    unexplained: dict[str, int] = field(default_factory=dict)
    local_seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """Replies a second."""
        return self.in_time / (self.ends - self.began)

    def latency(self, share: float) -> float:
        """A percentile of the latencies, in milliseconds, retries and waits included."""
        ranked = sorted(self.latencies)
        return ranked[min(int(share * len(ranked)), len(ranked) - 1)] * 1e3

    @property
    def lost(self) -> int:
        """Submitted, and no reply."""
        return self.submitted - self.replies


async def _caller(pool: PosterPool, url: str, run: Run, number: int, seed: int) -> None:
    """Posts, and posts again as soon as it has its reply, until the time is up."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - nothing secret
    sent = 0
    while time.perf_counter() < run.ends:
        payload = {"text": "prompt " * rng.randint(10, 80), "sampling_params": {"max_new_tokens": 64}}
        sent += 1
        run.submitted += 1
        began = time.perf_counter()
        try:
            await pool.post(url, payload, request_id=f"{number}-{sent}")
        except CodedError as error:
            run.failed[str(error.code)] += 1
            continue
        ended = time.perf_counter()
        run.replies += 1
        if run.replies == 4 * IN_FLIGHT:  # until then connections are being opened
            run.warm.set()
        run.in_time += run.began <= ended <= run.ends
        if run.began <= began:
            run.latencies.append(ended - began)


async def _killer(pool: PosterPool, run: Run, seed: int) -> None:
    """One poster of those that serve, every second."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    due = run.began
    while (due := due + EVERY) < run.ends:
        await asyncio.sleep(due - time.perf_counter())
        serving = [one for one in pool.stats().posters if one.state == "serving"]
        try:
            strike([rng.choice(serving)], signal.SIGKILL, state="serving")
            run.kills += 1
        except (IndexError, LookupError):
            run.nobody += 1


async def measure(seconds: float, seed: int, events: Path, *, kill: bool) -> Run:
    """One run, on a pool and a server of its own."""
    run = Run()
    with (
        serving(SERVICE_TIME, counting=True) as url,
        Events.to_file(events, run="goodput", role="pool") as sink,
    ):
        async with PosterPool(IN_FLIGHT, POSTERS, 120.0, recreation=AT_ONCE, events=sink) as pool:
            callers = [asyncio.create_task(_caller(pool, url, run, n, seed)) for n in range(IN_FLIGHT)]
            async with asyncio.timeout(WARM):
                await run.warm.wait()
            run.began = time.perf_counter()
            run.ends = run.began + seconds
            killer = asyncio.create_task(_killer(pool, run, seed)) if kill else None
            await asyncio.wait(callers)
            if killer is not None:
                await killer
            run.stats = pool.stats()
        with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
            counts: dict[str, Any] = json.load(answer)
    run.ids = counts["ids"]
    run.repeated = sum(counts["more"].values()) - len(counts["more"])
    _explain(run, counts["more"], events)
    return run


def _explain(run: Run, more: dict[str, int], events: Path) -> None:
    """Set the arrivals beyond an id's first against the reasons that the pool wrote down."""
    reasons: Counter[str] = Counter()
    local_since: float | None = None
    with events.open() as lines:
        for line in lines:
            event = json.loads(line)
            if event["event"] in ("post.retried", "post.hedged"):
                reasons[event["key"]] += 1
            elif event["event"] == "pool.local":
                local_since = event["ts"]
            elif event["event"] == "pool.remote" and local_since is not None:
                run.local_seconds += event["ts"] - local_since
                local_since = None
    run.unexplained = {id: count for id, count in more.items() if count - 1 > reasons[id]}


def _broken(run: Run, what: str) -> list[str]:
    """The limits that hold for each run by itself."""
    stats = run.stats
    assert stats is not None
    out: list[str] = []
    if run.lost:
        out.append(f"{what}: {run.lost} lost: {dict(run.failed)}")
    if run.unexplained:
        some = dict(list(run.unexplained.items())[:5])
        out.append(f"{what}: {len(run.unexplained)} ids arrived more often than recorded: {some}")
    if run.ids != run.submitted:
        out.append(f"{what}: {run.submitted} POSTs were submitted, and {run.ids} ids arrived")
    if not stats.balanced or stats.submitted != run.submitted:
        out.append(f"{what}: the pool counts otherwise: {stats}")
    if stats.peak > IN_FLIGHT:
        out.append(f"{what}: {stats.peak} places were taken of {IN_FLIGHT}")
    return out


def _table(calm: Run, hurt: Run, seconds: float, seed: int) -> Table:
    table = Table(
        title=f"{IN_FLIGHT} in flight, {SERVICE_TIME * 1000:.0f} ms service time, {POSTERS} posters, "
        f"{seconds:g} s each, seed {seed}"
    )
    for column in ("", "no kills", "a kill a second", "limit"):
        table.add_column(column, justify="right" if column else "left")

    def row(what: str, left: object, right: object, limit: str = "") -> None:
        table.add_row(what, str(left), str(right), limit)

    assert calm.stats is not None
    assert hurt.stats is not None
    ratio = hurt.goodput / calm.goodput
    row("goodput, POST/s", f"{calm.goodput:.0f}", f"{hurt.goodput:.0f}")
    row("goodput, ratio", "", f"{ratio:.1%}", f"≥ {LEAST_GOODPUT:.0%}")
    row("p50, ms", f"{calm.latency(0.5):.0f}", f"{hurt.latency(0.5):.0f}")
    row("p99, ms", f"{calm.latency(0.99):.0f}", f"{hurt.latency(0.99):.0f}")
    row("p99, ratio", "", f"{hurt.latency(0.99) / calm.latency(0.99):.1f}", f"≤ {MOST_P99:g}")
    row("slowest, ms", f"{calm.latency(1.0):.0f}", f"{hurt.latency(1.0):.0f}")
    row("submitted", calm.submitted, hurt.submitted)
    row("lost", calm.lost, hurt.lost, "0")
    row("arrivals beyond an id's first", calm.repeated, hurt.repeated)
    row("ids with unexplained ones", len(calm.unexplained), len(hurt.unexplained), "0")
    row("posters killed", calm.kills, hurt.kills, f"≥ {LEAST_KILLED * int((seconds - 0.001) / EVERY):.0f}")
    row("seconds with nobody to kill", calm.nobody, hurt.nobody)
    recoveries = [one.seconds for one in hurt.stats.recoveries]
    row("seconds until replaced, median", "", f"{statistics.median(recoveries):.2f}" if recoveries else "")
    row("seconds posted locally", f"{calm.local_seconds:.1f}", f"{hurt.local_seconds:.1f}")
    row("attempts made locally", f"{_share(calm.stats):.1%}", f"{_share(hurt.stats):.1%}")
    row("retried", calm.stats.retried, hurt.stats.retried)
    return table


def _share(stats: PoolStats) -> float:
    return stats.local / stats.sent if stats.sent else 0.0


async def main(seconds: float, seed: int) -> tuple[Table, list[str]]:
    """The table, and which limits are broken."""
    with tempfile.TemporaryDirectory() as folder:
        calm = await measure(seconds, seed, Path(folder) / "calm.jsonl", kill=False)
        hurt = await measure(seconds, seed, Path(folder) / "hurt.jsonl", kill=True)
    broken = [*_broken(calm, "no kills"), *_broken(hurt, "kills")]
    if hurt.goodput < LEAST_GOODPUT * calm.goodput:
        broken.append(f"goodput is less than {LEAST_GOODPUT:.0%} of that without kills")
    if hurt.latency(0.99) > MOST_P99 * calm.latency(0.99):
        broken.append(f"p99 is more than {MOST_P99:g} times that without kills")
    if hurt.kills < LEAST_KILLED * int((seconds - 0.001) / EVERY):
        broken.append(f"only {hurt.kills} posters were killed: this shows little")
    return _table(calm, hurt, seconds, seed), broken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Goodput while a poster a second is killed.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two runs")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    said = parser.parse_args()
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    outcome, over = asyncio.run(main(said.seconds, said.seed))
    ray.shutdown()  # first, since Ray prints something of its own about each killed worker
    Console(width=110).print(outcome)
    for text in over:
        print(f"over the limit: {text}", file=sys.stderr)
    print(f"again: python -m benchmarks.goodput --seconds {said.seconds:g} --seed {said.seed}")
    sys.exit(1 if over else 0)
