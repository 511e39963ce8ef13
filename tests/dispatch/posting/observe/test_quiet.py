"""The rate limit on repeated events: what passes, what is counted, and that nothing is lost count of."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.posting.observe.quiet import MAX_KINDS, REPEATED, Quiet
from protocol import CodedError, Events
from protocol.events import KEYS
from tests.support.events import EventFile
from tests.support.witness import ROOT


class Told(Events):
    """Events that are kept as they were told."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.closed = 0

    def emit(self, event: str, **what: Any) -> None:  # type: ignore[override]
        self.all.append({"event": event, **what})

    def close(self) -> None:
        self.closed += 1

    def dropped(self) -> int:
        return sum(one.get("dropped", 0) for one in self.all)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_may_be_written_once_a_post_is_limited() -> None:
    written = (ROOT / "dispatch/posting/attempts.py").read_text()
    assert set(re.findall(r'"(post\.\w+)"', written)) == REPEATED


def test_a_burst_passes_and_the_rest_is_counted(told: Told, clock: Clock) -> None:
    quiet = Quiet(told, per=10.0, burst=3, clock=clock)
    for number in range(8):
        quiet.emit("post.failed", level="warning", code="UPSTREAM.ABORTED", key=str(number))
    assert [one["key"] for one in told.all] == ["0", "1", "2"]
    assert told.dropped() == 0
    clock.now += 9.99
    quiet.emit("post.failed", code="UPSTREAM.ABORTED")
    assert len(told.all) == 3
    clock.now += 0.01
    quiet.emit("post.failed", code="UPSTREAM.ABORTED", key="next", url="u")
    assert told.all[-1]["key"] == "next"
    assert told.all[-1]["dropped"] == 6
    assert told.all[-1]["url"] == "u"
    quiet.emit("post.failed", code="UPSTREAM.ABORTED")
    assert "dropped" not in told.all[-1]


def test_the_window_slides(told: Told, clock: Clock) -> None:
    quiet = Quiet(told, per=10.0, burst=2, clock=clock)
    for moment in (0, 6, 9, 10, 12, 16, 17):
        clock.now = moment
        quiet.emit("post.failed", key=str(moment))
    assert [one["key"] for one in told.all] == ["0", "6", "10", "16"]


def test_each_event_and_each_code_has_its_own_limit(told: Told, clock: Clock) -> None:
    quiet = Quiet(told, burst=1, clock=clock)
    for _ in range(5):
        for event in REPEATED:
            quiet.emit(event, code="UPSTREAM.ABORTED")
            quiet.emit(event, error=CodedError("TIMEOUT.DEADLINE"))
            quiet.emit(event, error=ValueError("no code"))
            quiet.emit(event)
    # What has no code is one kind, whatever it is.
    assert len(told.all) == 3 * len(REPEATED)


def test_a_code_given_counts_before_the_errors(told: Told, clock: Clock) -> None:
    quiet = Quiet(told, burst=1, clock=clock)
    quiet.emit("post.failed", code="UPSTREAM.ABORTED", error=CodedError("TIMEOUT.DEADLINE"))
    quiet.emit("post.failed", error=CodedError("TIMEOUT.DEADLINE"))
    assert len(told.all) == 2


@pytest.mark.parametrize(
    "event", ["poster.died", "poster.ready", "pool.local", "pool.closed", "poster.abandoned"]
)
def test_what_tells_of_a_change_always_passes(told: Told, clock: Clock, event: str) -> None:
    quiet = Quiet(told, burst=1, clock=clock)
    for _ in range(100):
        quiet.emit(event, level="error", code="ACTOR.DIED", key="poster/0")
    assert len(told.all) == 100
    assert told.dropped() == 0


def test_other_names_may_be_limited(told: Told, clock: Clock) -> None:
    quiet = Quiet(told, burst=1, names={"x"}, clock=clock)
    for _ in range(3):
        quiet.emit("x")
        quiet.emit("post.failed")
    assert Counter(one["event"] for one in told.all) == {"x": 1, "post.failed": 3}


def test_a_flush_tells_each_number_once(told: Told, clock: Clock) -> None:
    quiet = Quiet(told, burst=1, clock=clock)
    for _ in range(4):
        quiet.emit("post.failed", code="UPSTREAM.ABORTED")
        quiet.emit("post.retried", code="TIMEOUT.DEADLINE")
    quiet.flush()
    flushed = [one for one in told.all if one["event"] == "events.dropped"]
    assert sorted((one["dropped_event"], one["dropped_code"], one["dropped"]) for one in flushed) == [
        ("post.failed", "UPSTREAM.ABORTED", 3),
        ("post.retried", "TIMEOUT.DEADLINE", 3),
    ]
    assert not any(one.get("code") for one in flushed), "an alert on the code would count it"
    quiet.flush()
    assert told.dropped() == 6
    clock.now += 100
    quiet.emit("post.failed", code="UPSTREAM.ABORTED")
    assert "dropped" not in told.all[-1]


def test_closing_flushes_and_closes_what_is_behind(told: Told, clock: Clock) -> None:
    with Quiet(told, burst=1, clock=clock) as quiet:
        quiet.emit("post.failed")
        quiet.emit("post.failed")
    assert told.dropped() == 1
    assert told.closed == 1


def test_kinds_are_bounded_and_none_is_lost(told: Told, clock: Clock) -> None:
    quiet = Quiet(told, burst=1, clock=clock)
    for number in range(4 * MAX_KINDS):
        for _ in range(2):
            quiet.emit("post.failed", code=f"UPSTREAM.X{number}")
    assert len(told.all) == MAX_KINDS + 1
    written = len(told.all)
    quiet.flush()
    assert written + told.dropped() == 2 * 4 * MAX_KINDS


@given(
    st.lists(st.tuples(st.floats(0, 5), st.sampled_from(["A.A", "B.B"]), st.booleans()), max_size=80),
    st.integers(1, 4),
)
def test_at_most_a_burst_in_any_window_and_every_event_accounted_for(
    steps: list[tuple[float, str, bool]], burst: int
) -> None:
    told, clock = Told(), Clock()
    quiet = Quiet(told, per=10.0, burst=burst, clock=clock)
    times: dict[str, list[float]] = {"A.A": [], "B.B": []}
    for pause, code, flush in steps:
        clock.now += pause
        before = len(told.all)
        quiet.emit("post.failed", code=code)
        if len(told.all) > before:
            times[code].append(clock.now)
        if flush:
            quiet.flush()
    for written in times.values():
        for number in range(len(written) - burst):
            assert written[number + burst] - written[number] >= 10.0
    quiet.flush()
    assert sum(map(len, times.values())) + told.dropped() == len(steps)


@pytest.mark.parametrize("limits", [{"per": 0.0}, {"per": -1.0}, {"per": float("nan")}, {"burst": 0}])
def test_a_limit_that_is_none_is_refused(told: Told, limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are no limit"):
        Quiet(told, **limits)


def test_the_written_lines_are_events_like_all_others(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Quiet(Events.to_file(path, run="r", role="pool"), burst=1) as quiet:
        for _ in range(3):
            quiet.emit(
                "post.failed",
                level="warning",
                error=CodedError("UPSTREAM.ABORTED", "why"),
                key="k",
                attempt=2,
            )
    first, last = EventFile(path).all()
    assert tuple(first) == tuple(last) == KEYS
    assert (first["event"], first["code"], first["detail"], first["run"]) == (
        *("post.failed", "UPSTREAM.ABORTED", "why", "r"),
    )
    assert first["data"] == {"attempt": 2}
    assert (last["event"], last["code"], last["data"]["dropped"]) == ("events.dropped", None, 2)
