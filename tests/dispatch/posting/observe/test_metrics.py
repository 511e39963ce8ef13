"""Metrics: what is published adds up to the accounting, and stays bounded."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.posting.observe.metrics import (
    BOUNDS,
    MAX_CODES,
    STATES,
    TABLE,
    Instrument,
    Metrics,
    Record,
    Tags,
    as_markdown,
    in_ray,
)
from dispatch.posting.observe.stats import RECOVERIES, Ledger, PoolStats, PosterStats, Recovery
from tests.support.witness import ROOT

CODES = ("UPSTREAM.ABORTED", "TRANSPORT.RESET", "TIMEOUT.DEADLINE")


class Board:
    """What was recorded, by name and labels, as Prometheus would show it."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def make(self, instrument: Instrument) -> Record:
        def record(value: float, tags: Tags) -> None:
            assert set(tags) == {*instrument.labels, "pool"}, "a label that was not announced"
            assert all(isinstance(one, str) for one in tags.values())
            key = (instrument.name, frozenset(tags.items()))
            if instrument.kind == "counter":
                assert value > 0, "Ray refuses this"
                value += self.values.get(key, 0)
            self.values[key] = value

        return record

    def __call__(self, name: str, pool: str = "pool", **labels: str) -> float:
        return self.values.get((f"failsoft_pool_{name}", frozenset({"pool": pool, **labels}.items())), 0)


def poster(state: str, key: str = "poster/0") -> PosterStats:
    known: Any = {"key": key, "state": state}
    return PosterStats(**{**dict.fromkeys(PosterStats.__struct_fields__, 0), **known})


def stats(**known: Any) -> PoolStats:
    """A moment of a pool: nothing but what is given."""
    empty: Any = {"failed_by_code": {}, "retried_by_code": {}, "recoveries": (), "posters": ()}
    return PoolStats(**{**dict.fromkeys(PoolStats.__struct_fields__, 0), **empty, **known})


@pytest.fixture
def board() -> Board:
    return Board()


def test_counters_grow_by_what_has_changed(board: Board) -> None:
    metrics = Metrics(make=board.make)
    metrics.publish(stats())
    metrics.publish(
        stats(submitted=10, succeeded=5, failed=3, cancelled=1, in_flight=1, sent=12, local=2, peak=7)
    )
    for _ in range(3):  # nothing new is nothing new
        metrics.publish(
            stats(
                submitted=20, succeeded=11, failed=4, cancelled=2, in_flight=3, waiting=2, occupied=1,
                sent=30, local=5, peak=9,
                failed_by_code={"UPSTREAM.ABORTED": 3, "TIMEOUT.DEADLINE": 1},
                retried_by_code={"TRANSPORT.RESET": 8},
            )
        )  # fmt: skip
    assert board("submitted_total") == 20
    assert board("posts_total", outcome="succeeded", code="") == 11
    assert board("posts_total", outcome="cancelled", code="") == 2
    assert board("posts_total", outcome="failed", code="UPSTREAM.ABORTED") == 3
    assert board("posts_total", outcome="failed", code="TIMEOUT.DEADLINE") == 1
    assert board("attempts_total", via="poster") == 25
    assert board("attempts_total", via="local") == 5
    assert board("retries_total", code="TRANSPORT.RESET") == 8
    assert (board("in_flight"), board("waiting"), board("occupied"), board("peak")) == (3, 2, 1, 9)


def test_posters_are_told_by_state_and_states_go_back_to_zero(board: Board) -> None:
    metrics = Metrics(make=board.make)
    metrics.publish(
        stats(posters=(poster("serving"), poster("serving"), poster("quarantined"), poster("new")))
    )
    assert [board("posters", state=state) for state in (*STATES, "new")] == [0, 2, 1, 0, 0, 1]
    metrics.publish(stats(posters=(poster("serving"), poster("dead"))))
    assert [board("posters", state=state) for state in (*STATES, "new")] == [0, 1, 0, 1, 0, 0]
    metrics.close()
    assert [board("posters", state=state) for state in (*STATES, "new")] == [0] * 6


def test_closing_leaves_nothing_in_flight_and_the_counts_as_they_are(board: Board) -> None:
    metrics = Metrics(make=board.make)
    metrics.publish(stats(submitted=5, succeeded=4, in_flight=1, occupied=1, waiting=1))
    metrics.close()
    assert (board("in_flight"), board("waiting"), board("occupied")) == (0, 0, 0)
    assert board("submitted_total") == 5


def test_recreations_are_told_once_each(board: Board) -> None:
    metrics = Metrics(make=board.make)
    died, wedged = Recovery("poster/0", "ACTOR.DIED", 1.0), Recovery("poster/1", "ACTOR.WEDGED", 2.0)
    metrics.publish(stats(recreated=1, recoveries=(died,)))
    metrics.publish(stats(recreated=1, recoveries=(died,)))
    metrics.publish(stats(recreated=3, recoveries=(died, wedged, died)))
    assert board("poster_recreations_total", code="ACTOR.DIED") == 2
    assert board("poster_recreations_total", code="ACTOR.WEDGED") == 1
    metrics.publish(stats(recreated=10, recoveries=(died, wedged)))  # the others were not kept
    assert board("poster_recreations_total", code="ACTOR.DIED") == 3
    assert board("poster_recreations_total", code="ACTOR.WEDGED") == 2
    assert board("poster_recreations_total", code="") == 5


def test_latencies_fall_into_cumulative_buckets(board: Board) -> None:
    metrics = Metrics(make=board.make)
    for seconds in (0.0, 0.01, 0.0100001, 0.3, 5.0, 1800.0, 1801.0, 1e9):
        metrics.observe(seconds)
    metrics.publish(stats())
    buckets = [board("attempt_seconds_bucket", le=str(bound)) for bound in (*BOUNDS, "+Inf")]
    assert buckets == sorted(buckets)
    assert board("attempt_seconds_bucket", le="0.01") == 2  # a bound belongs to its bucket
    assert board("attempt_seconds_bucket", le="0.025") == 3
    assert board("attempt_seconds_bucket", le="5.0") == 5
    assert board("attempt_seconds_bucket", le="1800.0") == 6
    assert board("attempt_seconds_bucket", le="+Inf") == board("attempt_seconds_count") == 8
    assert board("attempt_seconds_sum") == pytest.approx(1e9 + 3606.3200001)


@given(st.lists(st.floats(0, 1e5), max_size=60))
def test_every_sample_is_in_the_buckets_at_and_above_it(samples: list[float]) -> None:
    board = Board()
    metrics = Metrics(make=board.make)
    for sample in samples:
        metrics.observe(sample)
    metrics.publish(stats())
    for bound in BOUNDS:
        assert board("attempt_seconds_bucket", le=str(bound)) == sum(one <= bound for one in samples)
    assert board("attempt_seconds_sum") == pytest.approx(math.fsum(samples))


growth = st.fixed_dictionaries(
    {"succeeded": st.integers(0, 5), "cancelled": st.integers(0, 5), "sent": st.integers(0, 5)}
    | {f"{kind} {code}": st.integers(0, 3) for kind in ("failed", "retried") for code in CODES}
)


@given(st.lists(growth, max_size=8))
def test_what_is_published_adds_up_to_the_accounting(steps: list[dict[str, int]]) -> None:
    board, total = Board(), Counter[str]()
    metrics = Metrics(make=board.make)
    for step in steps:
        total.update(step)
        by_code = {
            kind: {code: total[f"{kind} {code}"] for code in CODES if total[f"{kind} {code}"]}
            for kind in ("failed", "retried")
        }
        metrics.publish(
            stats(
                succeeded=total["succeeded"],
                cancelled=total["cancelled"],
                sent=total["sent"],
                failed_by_code=by_code["failed"],
                retried_by_code=by_code["retried"],
            )
        )
    assert board("posts_total", outcome="succeeded", code="") == total["succeeded"]
    assert board("posts_total", outcome="cancelled", code="") == total["cancelled"]
    assert board("attempts_total", via="poster") == total["sent"]
    for code in CODES:
        assert board("posts_total", outcome="failed", code=code) == total[f"failed {code}"]
        assert board("retries_total", code=code) == total[f"retried {code}"]


def test_codes_are_bounded_and_none_is_lost(board: Board) -> None:
    """Catalogued codes are a few dozen; a server that makes some up cannot fill Prometheus."""
    metrics = Metrics(make=board.make)
    failed: dict[str, int] = {}
    for number in range(3 * MAX_CODES):
        failed[f"UPSTREAM.X{number}"] = 2
        metrics.publish(stats(failed_by_code=dict(failed), retried_by_code=dict(failed)))
    told = {
        dict(labels)["code"]: value for (name, labels), value in board.values.items() if "retries" in name
    }
    assert len(told) == MAX_CODES + 1
    assert sum(told.values()) == 2 * 3 * MAX_CODES
    assert told["other"] == 2 * 2 * MAX_CODES


def test_pools_of_a_process_are_told_apart(board: Board) -> None:
    train, evaluation = Metrics("train", make=board.make), Metrics("eval", make=board.make)
    train.publish(stats(submitted=3, in_flight=3))
    evaluation.publish(stats(submitted=5, in_flight=1))
    assert (board("submitted_total", "train"), board("submitted_total", "eval")) == (3, 5)
    assert (board("in_flight", "train"), board("in_flight", "eval")) == (3, 1)


def test_ray_takes_them_all(ray_local: None) -> None:
    """Ray checks names, labels and values where they are recorded. (What arrives at Prometheus takes
    the agent of ray[default], which this project does not need otherwise.)"""
    for name in ("first", "second"):  # two pools register the same names
        metrics = Metrics(name)
        metrics.observe(0.5)
        failed = {"UPSTREAM.ABORTED": 1}
        metrics.publish(stats(submitted=5, failed=1, failed_by_code=failed, retried_by_code=failed, sent=3))
        metrics.publish(stats(submitted=6, failed=1, failed_by_code=failed, posters=(poster("serving"),)))
        metrics.close()
    for instrument in TABLE:
        record = in_ray(instrument)
        with pytest.raises(ValueError, match="Missing value for tag key"):
            record(1.0, {})


def test_names_and_meanings_are_what_prometheus_and_ray_take() -> None:
    for one in TABLE:
        assert one.name.startswith("failsoft_pool_")
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert one.meaning.isascii(), "Ray takes nothing else"
    assert len({one.name for one in TABLE}) == len(TABLE)


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert as_markdown() in page
    assert f"{MAX_CODES} a pool at most" in page
    for name in {word.strip("`{ ") for word in page.split() if word.startswith("`ray_failsoft")}:
        known = {f"ray_{one.name}" for one in TABLE}
        assert any(name.startswith(one) for one in known), name


def test_the_ledger_keeps_the_last_recoveries_only() -> None:
    ledger = Ledger()
    for number in range(RECOVERIES + 5):
        ledger.recoveries.append(Recovery(f"poster/{number}", "ACTOR.DIED", 1.0))
    assert [len(ledger.recoveries), ledger.recoveries[0].key] == [RECOVERIES, "poster/5"]
