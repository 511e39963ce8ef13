"""Metrics of a pool, through `ray.util.metrics`: Prometheus scrapes them from Ray, with ``ray_`` before
each name. `TABLE` is all there is; docs/metrics.md shows it.

Nothing here is on the path of a POST but `Metrics.observe`. The pool calls `publish` once a second with
its accounting, and what has changed since the last time is recorded then.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from ray.util.metrics import Counter, Gauge

from dispatch.posting.observe.stats import PoolStats

BOUNDS: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
"""Upper bounds of the latency's buckets, in seconds: from a score to a long generation."""
STATES: Final = ("starting", "serving", "quarantined", "dead", "abandoned")
MAX_CODES: Final = 200
"""Most codes that a pool tells apart; all further ones, which only servers could make up, are "other"."""


class Instrument(NamedTuple):
    """One metric. Each has the label ``pool`` besides its own."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    meaning: str


TABLE: Final = (
    Instrument("failsoft_pool_submitted_total", "counter", (), "POSTs that callers have submitted"),
    Instrument(
        "failsoft_pool_posts_total",
        "counter",
        ("outcome", "code"),
        "POSTs that have ended: succeeded, failed (with the code), cancelled",
    ),
    Instrument("failsoft_pool_attempts_total", "counter", ("via",), "attempts sent: poster, local"),
    Instrument("failsoft_pool_retries_total", "counter", ("code",), "attempts that failed and were repeated"),
    Instrument(
        "failsoft_pool_poster_recreations_total", "counter", ("code",), "posters replaced, by why they ended"
    ),
    Instrument("failsoft_pool_in_flight", "gauge", (), "POSTs that callers wait for"),
    Instrument("failsoft_pool_waiting", "gauge", (), "attempts that wait for a place"),
    Instrument("failsoft_pool_occupied", "gauge", (), "places that are taken"),
    Instrument("failsoft_pool_peak", "gauge", (), "most places that were ever taken at once"),
    Instrument(
        "failsoft_pool_posters",
        "gauge",
        ("state",),
        "posters: starting, serving, quarantined, dead, abandoned",
    ),
    # Ray's own Histogram takes one call a sample. These are what it would make of them, already added up:
    # only the type that Prometheus is told differs, and neither rate() nor histogram_quantile() asks.
    Instrument(
        "failsoft_pool_attempt_seconds_bucket", "gauge", ("le",), "good exchanges that took `le` s at most"
    ),
    Instrument("failsoft_pool_attempt_seconds_sum", "gauge", (), "seconds that good exchanges took, in all"),
    Instrument("failsoft_pool_attempt_seconds_count", "gauge", (), "good exchanges"),
)

Tags = dict[str, str]
Record = Callable[[float, Tags], None]


def in_ray(instrument: Instrument) -> Record:
    """How ``instrument`` is recorded: a counter by what it grows, a gauge by what it is."""
    labels = (*instrument.labels, "pool")
    if instrument.kind == "counter":
        return Counter(instrument.name, instrument.meaning, labels).inc
    return Gauge(instrument.name, instrument.meaning, labels).set


_open: Final[set[str]] = set()
"""The labels of this process's open pools."""


class Metrics:
    """See the module. ``pool`` is the label that tells pools of a process apart (see `open`); ``make`` is for
    tests."""

    def __init__(self, pool: str = "pool", *, make: Callable[[Instrument], Record] = in_ray) -> None:
        self._pool = pool
        self._record = {one.name: make(one) for one in TABLE}
        self._before: dict[tuple[str, ...], float] = {}
        self._codes: set[str] = set()
        self._states: set[str] = set(STATES)
        self._buckets = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def open(self) -> None:
        """A pool begins. Where another one has its label already, each would overwrite the other's gauges: so
        it gets the first free one of ``pool-2``, ``pool-3`` and so on, until `close`."""
        numbered = (f"{self._pool}-{number}" for number in itertools.count(2))
        if self._pool in _open:
            self._pool = next(label for label in numbered if label not in _open)
        _open.add(self._pool)

    def observe(self, seconds: float) -> None:
        """One good exchange took so long."""
        self._buckets[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def publish(self, stats: PoolStats) -> None:
        """Record what has changed since the last time, and what is so now."""
        self._count("failsoft_pool_submitted_total", stats.submitted)
        posts = "failsoft_pool_posts_total"
        self._count(posts, stats.succeeded, outcome="succeeded", code="")
        self._count(posts, stats.cancelled, outcome="cancelled", code="")
        for code, number in self._bounded(stats.failed_by_code):
            self._count(posts, number, outcome="failed", code=code)
        self._count("failsoft_pool_attempts_total", stats.sent - stats.local, via="poster")
        self._count("failsoft_pool_attempts_total", stats.local, via="local")
        for code, number in self._bounded(stats.retried_by_code):
            self._count("failsoft_pool_retries_total", number, code=code)
        self._recreations(stats)
        self._set("failsoft_pool_peak", stats.peak)
        self._now(stats.in_flight, stats.waiting, stats.occupied, (one.state for one in stats.posters))
        self._latencies()

    def close(self) -> None:
        """The pool is closed: nothing is in flight, there is no poster. Counters stay what they are."""
        self._now(0, 0, 0, ())
        _open.discard(self._pool)

    def _now(self, in_flight: int, waiting: int, occupied: int, states: Iterable[str]) -> None:
        self._set("failsoft_pool_in_flight", in_flight)
        self._set("failsoft_pool_waiting", waiting)
        self._set("failsoft_pool_occupied", occupied)
        listed = list(states)
        self._states.update(listed)
        for state in self._states:  # those at zero as well: a gauge keeps what it was last told
            self._set("failsoft_pool_posters", listed.count(state), state=state)

    def _recreations(self, stats: PoolStats) -> None:
        # By number, not by position: only the latest recoveries may have been kept.
        new = stats.recreated - int(self._before.get(("recreated",), 0))
        self._before["recreated",] = stats.recreated
        if new <= 0:
            return
        told = [one.code for one in stats.recoveries[-new:]]
        for code, number in self._bounded({code: told.count(code) for code in set(told)}):
            self._add("failsoft_pool_poster_recreations_total", number, code=code)
        self._add("failsoft_pool_poster_recreations_total", new - len(told), code="")

    def _latencies(self) -> None:
        counts = list(accumulate(self._buckets))
        for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
            self._set("failsoft_pool_attempt_seconds_bucket", count, le=str(bound))
        self._set("failsoft_pool_attempt_seconds_count", counts[-1])
        self._set("failsoft_pool_attempt_seconds_sum", self._seconds)

    def _bounded(self, by_code: Mapping[str, int]) -> Iterable[tuple[str, int]]:
        out: dict[str, int] = {}
        for code, number in by_code.items():
            if len(self._codes) < MAX_CODES:
                self._codes.add(code)
            name = code if code in self._codes else "other"
            out[name] = out.get(name, 0) + number
        return out.items()

    def _count(self, name: str, total: int, **labels: str) -> None:
        key = (name, *labels.values())
        self._add(name, total - self._before.get(key, 0), **labels)
        self._before[key] = total

    def _add(self, name: str, number: float, **labels: str) -> None:
        if number > 0:  # Ray refuses to count nothing
            self._record[name](number, {**labels, "pool": self._pool})

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._record[name](value, {**labels, "pool": self._pool})


def as_markdown() -> str:
    """`TABLE` as docs/metrics.md shows it."""
    rows = []
    for one in TABLE:
        labels = ", ".join(f"`{label}`" for label in one.labels) or "—"
        rows.append(f"| `{one.name}` | {one.kind} | {labels} | {one.meaning} |")
    return "\n".join(["| name | type | labels | what it tells |", "|---|---|---|---|", *rows])
