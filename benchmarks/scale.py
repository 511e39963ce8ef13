"""``python -m benchmarks.scale``: thousands of POSTs in flight, for long enough to see what grows.

A closed loop of 4,096 callers makes 200,000 POSTs against a bare server. What must hold: a POST costs the
driver little CPU time, and neither memory nor descriptors of the driver or its posters grow. Whether they
do is read off a straight line through what was measured after the first fifth: until then connections are
opened, pages touched for the first time, and each poster fills its memory of 20,000 ended attempts. A broken
limit ends the run with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import psutil
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.pool import PAYLOAD, POSTERS
from benchmarks.server import serving
from dispatch.posting import PosterPool
from protocol import CodedError

IN_FLIGHT: Final = 4096
POSTS: Final = 200_000
SERVICE_TIME: Final = 0.1
SLICE: Final = 10_000
"""POSTs over which driver CPU is averaged; the median of the slices counts."""
SAMPLE: Final = 2_500
"""POSTs from one look at the processes to the next."""
SETTLED: Final = 0.2
"""Share of the POSTs after which nothing may grow any more."""
MOST_CPU: Final = 60.0
"""Driver CPU a POST, in microseconds."""
MOST_GROWTH: Final = 0.05


@dataclass(slots=True)
class Course:
    """How memory (MiB) and descriptors of one process went, by POSTs done."""

    process: psutil.Process
    done: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)

    def look(self, done: int) -> None:
        self.done.append(done)
        self.memory.append(self.process.memory_info().rss / 2**20)
        self.descriptors.append(self.process.num_fds())

    def growth(self, values: list[float], settled: int) -> tuple[float, float, float]:
        """From where to where a straight line through the values leads after ``settled`` POSTs, and that
        growth as a share."""
        points = [(done, value) for done, value in zip(self.done, values, strict=True) if done >= settled]
        xs, ys = zip(*points, strict=True)
        slope, start = statistics.linear_regression(xs, ys)
        first, last = start + slope * xs[0], start + slope * xs[-1]
        return first, last, last / first - 1


@dataclass(slots=True)
class Progress:
    """The run as it goes. ``slices`` are microseconds of driver CPU a POST."""

    done: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    slices: list[float] = field(default_factory=list)
    own: float = 0.0  # seconds of CPU that the looking took; they are not the pool's


def _finished(progress: Progress, courses: list[Course], marks: list[float]) -> None:
    progress.done += 1
    if progress.done % SAMPLE == 0:
        before = time.process_time()
        for course in courses:
            course.look(progress.done)
        progress.own += time.process_time() - before
    if progress.done % SLICE == 0:
        now = time.process_time() - progress.own
        progress.slices.append((now - marks[-1]) / SLICE * 1e6)
        marks.append(now)


async def _caller(
    pool: PosterPool,
    url: str,
    left: Iterator[int],
    progress: Progress,
    courses: list[Course],
    marks: list[float],
) -> None:
    for _ in left:  # one iterator for all callers: so many POSTs in all
        try:
            await pool.post(url, PAYLOAD)
        except CodedError as error:
            progress.failed[str(error.code)] += 1
        _finished(progress, courses, marks)


async def main(posts: int) -> int:
    """Print the table; 1 when a limit is broken."""
    progress = Progress()
    with serving(SERVICE_TIME) as url:
        async with PosterPool(IN_FLIGHT, POSTERS) as pool:
            posters = pool.stats().posters
            courses = [Course(psutil.Process()), *(Course(psutil.Process(one.pid)) for one in posters)]
            left = itertools.islice(itertools.count(), posts)
            marks = [time.process_time()]
            began = time.perf_counter()
            callers = [_caller(pool, url, left, progress, courses, marks) for _ in range(IN_FLIGHT)]
            await asyncio.gather(*callers)
            seconds = time.perf_counter() - began
            stats = pool.stats()
    broken: list[str] = []
    table = Table(
        title=f"{posts} POSTs, {IN_FLIGHT} in flight, {POSTERS} posters, {SERVICE_TIME * 1000:.0f} ms"
    )
    for column in ("", "measured", "from", "to", "growth", "limit"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("POST/s", f"{posts / seconds:.0f}")
    cpu = statistics.median(progress.slices)
    table.add_row("driver CPU a POST, µs", f"{cpu:.1f}", "", "", "", f"< {MOST_CPU:g}")
    if cpu >= MOST_CPU:
        broken.append(f"{cpu:.1f} µs of driver CPU a POST")
    table.add_row("the dearest slice, µs", f"{max(progress.slices):.1f}")
    table.add_row("most in flight", str(stats.peak), "", "", "", f"≤ {IN_FLIGHT}")
    if stats.peak > IN_FLIGHT:
        broken.append(f"{stats.peak} places were taken of {IN_FLIGHT}")
    table.add_row("failed", str(stats.failed), "", "", "", "0")
    if stats.failed or stats.succeeded != posts or not stats.balanced:
        broken.append(f"{stats.failed} of {posts} failed, {stats.succeeded} did not: {dict(progress.failed)}")
    if stats.recreated:
        broken.append("a poster was replaced meanwhile: what follows says nothing")
    for name, course in zip(["driver", *(one.key for one in posters)], courses, strict=True):
        for what, values in (("MiB", course.memory), ("descriptors", course.descriptors)):
            first, last, growth = course.growth(values, int(SETTLED * posts))
            table.add_row(
                f"{name}, {what}", "", f"{first:.1f}", f"{last:.1f}", f"{growth:+.1%}", f"< {MOST_GROWTH:.0%}"
            )
            if growth >= MOST_GROWTH:
                broken.append(f"{name}: {what} grew by {growth:.1%}")
    Console(width=110).print(table)
    for line in broken:
        print(f"over the limit: {line}", file=sys.stderr)
    return 1 if broken else 0


def _posts(text: str) -> int:
    number = int(text)
    if number < 2 * SLICE:
        raise argparse.ArgumentTypeError(f"at least {2 * SLICE}: two slices, or there is no median")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a POST costs, and what grows, at 4,096 in flight.")
    parser.add_argument("--posts", type=_posts, default=POSTS)
    said = parser.parse_args()
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    code = asyncio.run(main(said.posts))
    ray.shutdown()
    sys.exit(code)
