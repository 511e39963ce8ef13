"""The state machine: firing once, resolving, time, order and bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.alerts import AlertEngine, Change, default_rules
from faults.alerts import engine as engine_module
from tests.faults.alerts.helpers import POSTER, died, event, ready, rules

T = 1_700_000_000.0

FREQUENCY = """
[[rule]]
name = "failing"
type = "frequency"
match = { event = "sample.failed" }
group_by = ["key"]
resolve = { event = "sample.ok" }
count = 3
within = 10.0
resolve_after = 20.0
"""


def replay(text: str = POSTER) -> AlertEngine:
    return AlertEngine(rules(text).rules, clock=None)


def kinds(changes: list[Change]) -> list[tuple[str, str | None]]:
    return [(change.kind, change.alert.key) for change in changes]


def failed(ts: float, key: str = "g") -> dict[str, Any]:
    return event("sample.failed", ts, key=key)


def test_any_fires_once_a_group_and_resolves() -> None:
    engine = replay()
    assert kinds(engine.feed(died("poster/0"))) == [("fired", "poster/0")]
    assert engine.feed(died("poster/0", T + 1)) == []
    assert kinds(engine.feed(died("poster/1", T + 1))) == [("fired", "poster/1")]
    (resolved,) = engine.feed(ready("poster/0", T + 1.25))
    assert resolved.kind == "resolved"
    assert (resolved.alert.fired_at, resolved.alert.resolved_at, resolved.alert.count) == (T, T + 1.25, 2)
    assert [alert.key for alert in engine.firing] == ["poster/1"]
    assert kinds(engine.feed(died("poster/0", T + 5))) == [("fired", "poster/0")]


def test_an_alert_carries_the_event_that_fired_it() -> None:
    (change,) = replay().feed(died())
    alert = change.alert
    assert (alert.rule, alert.severity, alert.summary) == ("poster-died", "critical", "poster/0 died: killed")
    assert (alert.code, alert.key, alert.id, alert.run) == ("ACTOR.DIED", "poster/0", "ABCD2345", "r1")
    assert alert.group == {"key": "poster/0"}
    assert alert.resolved_at is None


def test_a_resolve_of_another_group_or_of_nothing_changes_nothing() -> None:
    engine = replay()
    assert engine.feed(ready("poster/1")) == []
    engine.feed(died("poster/0"))
    assert engine.feed(ready("poster/1")) == []


def test_the_order_of_the_lines_decides_even_when_clocks_differ() -> None:
    engine = replay()
    engine.feed(died(ts=T))
    (resolved,) = engine.feed(ready(ts=T - 30))
    assert resolved.alert.resolved_at == T, "an alert never ends before it began"


def test_frequency_fires_at_the_count_and_starts_anew_after_a_resolve() -> None:
    engine = replay(FREQUENCY)
    assert engine.feed(failed(T)) == []
    assert engine.feed(failed(T + 6)) == []
    assert engine.feed(failed(T + 11)) == [], "the first is 11 s back"
    (fired,) = engine.feed(failed(T + 12))
    assert (fired.kind, fired.alert.count) == ("fired", 3)
    assert engine.feed(failed(T + 13)) == []
    (resolved,) = engine.feed(event("sample.ok", T + 14, key="g"))
    assert resolved.alert.count == 4
    assert engine.feed(failed(T + 14)) == []
    assert engine.feed(failed(T + 14)) == []
    assert kinds(engine.feed(failed(T + 14))) == [("fired", "g")]


def test_frequency_counts_each_group_by_itself_and_takes_late_events() -> None:
    engine = replay(FREQUENCY)
    for ts, key in [(T + 5, "a"), (T + 5, "b"), (T + 9, "a")]:
        assert engine.feed(failed(ts, key)) == []
    assert kinds(engine.feed(failed(T + 1, "a"))) == [("fired", "a")], "late by 8 s"


def test_silence_resolves_and_is_dated_when_it_was_long_enough() -> None:
    engine = replay(FREQUENCY)
    for _ in range(3):
        engine.feed(failed(T))
    engine.feed(failed(T + 15))
    assert engine.tick(T + 34.9) == []
    (resolved,) = engine.tick(T + 500)
    assert (resolved.kind, resolved.alert.resolved_at) == ("resolved", T + 35)
    assert engine.tick(T + 600) == []


def test_in_a_replay_the_events_themselves_are_the_clock() -> None:
    engine = replay(FREQUENCY)
    for _ in range(3):
        engine.feed(failed(T))
    assert kinds(engine.feed(event("other", T + 21))) == [("resolved", "g")]


def test_silence_before_a_match_resolves_first() -> None:
    engine = replay(POSTER.replace("severity", "resolve_after = 5.0\nseverity"))
    engine.feed(died(ts=T))
    assert kinds(engine.feed(died(ts=T + 100))) == [("resolved", "poster/0"), ("fired", "poster/0")]


def test_resolve_after_defaults_to_within() -> None:
    engine = replay(FREQUENCY.replace("resolve_after = 20.0", ""))
    for _ in range(3):
        engine.feed(failed(T))
    assert kinds(engine.tick(T + 10)) == [("resolved", "g")]


def test_old_lines_read_live_do_not_flap() -> None:
    """A live engine that reads yesterday's lines judges silence by their time, not by the wall's."""
    engine = AlertEngine(rules(FREQUENCY).rules, clock=lambda: T + 86_400)
    changes = [change for step in range(10) for change in engine.feed(failed(T + step))]
    assert kinds(changes) == [("fired", "g")]
    assert kinds(engine.tick()) == [("resolved", "g")]


@pytest.mark.parametrize("ts", [None, "x", True, math.nan, math.inf, -1, T * 1000, [], 10**400])
@pytest.mark.parametrize("clock", [None, lambda: T + 1])
def test_an_unusable_ts_is_dated_like_the_line_before(ts: object, clock: Any) -> None:
    engine = AlertEngine(rules().rules, clock=clock)
    engine.feed(event("other", T))
    (change,) = engine.feed(died() | {"ts": ts})
    assert change.alert.fired_at == T


def test_a_live_ts_from_the_future_is_not_believed() -> None:
    engine = AlertEngine(rules().rules, clock=lambda: T)
    (change,) = engine.feed(died(ts=T + 3600))
    assert change.alert.fired_at == T


@pytest.mark.parametrize(
    "one", [{}, {"event": 3}, {"event": "poster.died"}, {"event": "poster.died", "key": {}}]
)
def test_events_of_any_shape(one: dict[str, Any]) -> None:
    assert len(replay().feed(one)) == (one.get("event") == "poster.died")


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_GROUPS", 3)
    engine = replay(FREQUENCY)
    for key in ("a", "b", "c", "a"):
        engine.feed(failed(T, key))
    engine.feed(failed(T, "d"))  # b has been idle for longest
    assert engine.dropped_groups == 1
    assert kinds(engine.feed(failed(T, "a"))) == [("fired", "a")], "a was not the one that was forgotten"

    engine = replay()
    for n in range(5):
        engine.feed(died(f"poster/{n}"))
    assert engine.refused_groups == 2
    assert len(engine.firing) == 3
    engine.feed(ready("poster/0"))
    assert kinds(engine.feed(died("poster/4"))) == [("fired", "poster/4")]


def test_long_values_are_cut() -> None:
    (change,) = replay().feed(died("k" * 100_000, detail="d" * 1_000_000))
    assert len(str(change)) < 5_000


def test_the_default_rules() -> None:
    engine = AlertEngine(default_rules().rules, clock=None)
    fired = [change.alert.rule for n in range(10) for change in engine.feed(event("sample.failed", T + n))]
    assert fired == ["samples-failing"]
    assert kinds(engine.feed(died())) == [("fired", "poster/0")]
    assert kinds(engine.feed(ready())) == [("resolved", "poster/0")]
    assert kinds(engine.feed(event("engine.died", T, key="engine/1"))) == [("fired", "engine/1")]
    assert engine.feed(event("pool.failed", T, level="warning", code="POOL.CLOSED")) == []
    (pool,) = engine.feed(event("pool.failed", T, level="error", code="POOL.NO_POSTER"))
    assert pool.alert.rule == "pool-error"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(-3, 5)), max_size=40))
def test_each_group_alternates_and_ends_as_its_last_line_says(steps: list[tuple[bool, int, int]]) -> None:
    engine, now = replay(), T
    seen: dict[str, list[str]] = {}
    last: dict[str, bool] = {}
    for down, number, step in steps:
        now += step
        key = f"poster/{number}"
        last[key] = down
        for change in engine.feed(died(key, now) if down else ready(key, now)):
            assert change.alert.key == key
            assert (change.alert.resolved_at or math.inf) >= change.alert.fired_at
            seen.setdefault(key, []).append(change.kind)
    for history in seen.values():
        assert history == ["fired", "resolved"] * (len(history) // 2) + ["fired"] * (len(history) % 2)
    assert {alert.key for alert in engine.firing} == {key for key, down in last.items() if down}
