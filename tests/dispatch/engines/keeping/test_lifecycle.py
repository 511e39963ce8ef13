"""The state machine of an engine, tried without waiting: its clock is a number."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import strategies as st

from dispatch.engines.keeping.lifecycle import (
    Begun,
    Checked,
    Close,
    Drain,
    Drained,
    Event,
    Life,
    Lost,
    Policy,
    Proven,
    Proving,
    Quarantine,
    Restart,
    StartFailed,
    Step,
    StopFailed,
    Stopped,
    step,
    table,
)  # fmt: skip
from dispatch.engines.spec import State
from protocol import CodedError
from tests.properties.examples import prop

POLICY = Policy(backoff=(1.0, 5.0), budget=3, healthy_run=60.0, patience=3)
EXITED = CodedError("ENGINE.EXITED", "signal 9")
SICK = CodedError("ENGINE.UNHEALTHY", "no answer")
LEFT = CodedError("ENGINE.STOP_FAILED", "pid 7 is left")
FOREVER = CodedError("ENGINE.SPAWN_FAILED", "no such program")
PASSING = CodedError("ENGINE.SPAWN_FAILED", "no process is to be had", {"transient": True})


def play(*events: Event | float, life: Life | None = None) -> tuple[Life, list[str]]:
    """Feed events; a number moves the clock on by so many seconds. The last life, and all actions."""
    life, now, done = life or Life(), 0.0, []
    for event in events:
        if isinstance(event, float):
            now += event
            continue
        life, actions = step(life, event, now, POLICY)
        done += actions
    return life, done


SERVING: tuple[Event, ...] = (Begun(), Proving(), Proven())


def test_a_good_life_and_its_planned_end() -> None:
    life, done = play(*SERVING, Drain(), Drained(), Stopped())
    assert (life.state, life.wanted, life.verdict) == ("dead", False, None)
    assert done == ["start", "show", "hide", "drain", "stop", "release"]
    assert step(life, Begun(), 0.0, POLICY) == (life, ()), "drained stays down"


def test_killed_comes_back() -> None:
    life, done = play(*SERVING, 100.0, Lost(EXITED), Stopped(), Begun(), Proving(), Proven())
    assert (life.state, life.starts, life.short) == ("ready", 2, ())
    assert done == ["start", "show", "hide", "stop", "rest", "start", "show"]


def test_suspect_is_hidden_and_comes_back() -> None:
    life, done = play(*SERVING, Checked(1, SICK), Checked(2, SICK), Checked(0))
    assert life.state == "ready"
    assert done == ["start", "show", "hide", "show"]


def test_sick_is_replaced() -> None:
    life, done = play(*SERVING, Checked(1, SICK), Checked(2, SICK), Checked(3, SICK))
    assert (life.state, life.cause) == ("stopping", SICK)
    assert done == ["start", "show", "hide", "stop"]


def test_sick_at_the_first_check_where_that_is_the_patience() -> None:
    life, actions = step(play(*SERVING)[0], Checked(1, SICK), 0.0, Policy(patience=1))
    assert (life.state, actions) == ("stopping", ("hide", "stop"))


@pytest.mark.parametrize("first", [(), (Proving(),)])
def test_rests_grow_and_end_in_a_crash_loop(first: tuple[Event, ...]) -> None:
    events: list[Event | float] = []
    life, rests = Life(), []
    for _ in range(POLICY.budget):
        events = [Begun(), *first, StartFailed(EXITED), Stopped()]
        life, done = play(*events, life=life)
        rests.append(life.rest)
    assert rests[:2] == [1.0, 2.0]
    assert done[-1] == "release"
    assert life.verdict is not None
    assert life.verdict.code == "ENGINE.CRASH_LOOP"
    assert life.verdict.data["first_code"] == "ENGINE.EXITED"
    assert not life.wanted


def test_ready_for_a_moment_each_time_is_a_crash_loop_too() -> None:
    one: tuple[Event | float, ...] = (*SERVING, 1.0, Lost(EXITED), Stopped())
    life, done = play(*one, *one, *one)
    assert done[-1] == "release"
    assert life.verdict is not None
    assert life.verdict.code == "ENGINE.CRASH_LOOP"


def test_a_long_life_clears_the_count() -> None:
    one: tuple[Event | float, ...] = (*SERVING, 1.0, Lost(EXITED), Stopped())
    life, done = play(*one, *one, *SERVING, 60.0, Lost(EXITED), Stopped())
    assert (done[-1], life.rest, life.short) == ("rest", 1.0, ())


def test_what_will_not_change_is_given_up_at_once() -> None:
    life, done = play(Begun(), StartFailed(FOREVER), Stopped())
    assert (life.verdict, done) == (FOREVER, ["start", "stop", "release"])


def test_what_may_pass_is_tried_again_within_the_budget() -> None:
    one: tuple[Event | float, ...] = (Begun(), StartFailed(PASSING), Stopped())
    life, done = play(*one)
    assert (life.verdict, done[-1]) == (None, "rest")
    life, done = play(*one, *one, life=life)
    assert life.verdict is not None
    assert (life.verdict.code, done[-1]) == ("ENGINE.CRASH_LOOP", "release")


def test_what_is_left_is_never_started_upon() -> None:
    life, done = play(*SERVING, Lost(EXITED), StopFailed(LEFT), Begun())
    assert (life.state, life.verdict) == ("dead", LEFT)
    assert done == ["start", "show", "hide", "stop"], "what it holds may still be in use"


@pytest.mark.parametrize(
    "end",
    [
        (Drain(), Drained(), Stopped()),
        (Begun(), StartFailed(FOREVER), Stopped()),
        (Lost(EXITED), StopFailed(LEFT)),
    ],
)
def test_asked_for_again(end: tuple[Event, ...]) -> None:
    """A person who has seen to it starts what was drained or given up."""
    begun = () if isinstance(end[0], Begun) else SERVING
    life, done = play(*begun, *end, Restart())
    assert (life.state, life.wanted, life.verdict, life.short) == ("starting", True, None, ())
    assert done[-1] == "start"


def test_quarantined_serves_nobody_and_waits_for_a_word() -> None:
    life, done = play(*SERVING, Quarantine(SICK), Checked(0), Checked(3, SICK))
    assert (life.state, life.cause) == ("quarantined", SICK)
    assert done[-1] == "hide"
    life, done = play(Restart(), Drained(), Stopped(), life=life)
    assert done == ["drain", "stop", "rest"]


@pytest.mark.parametrize("before", [(Begun(),), (Begun(), Proving())])
def test_a_start_is_not_drained_but_stopped(before: tuple[Event, ...]) -> None:
    life, done = play(*before, Drain(), Stopped())
    assert (life.state, done) == ("dead", ["start", "stop", "release"])


def test_the_last_word_counts() -> None:
    life, _ = play(*SERVING, Drain(), Restart(), Drained())
    assert life.wanted
    life, done = play(Drain(), Stopped(), life=life)
    assert (life.wanted, done) == (False, ["release"])


def test_drained_while_it_rests() -> None:
    """What it held would otherwise be kept until the fleet's end."""
    life, done = play(*SERVING, Lost(EXITED), Stopped(), Drain())
    assert (life.state, life.wanted, done[-2:]) == ("dead", False, ["rest", "release"])
    again, done = play(Drain(), Begun(), life=life)
    assert (again, done) == (life, [])


@pytest.mark.parametrize(
    "asked",
    [(StartFailed(EXITED), Restart(), Stopped()), (Proven(), Restart(), Lost(EXITED), Stopped())],
)
def test_asked_for_in_what_would_be_the_last_life(asked: tuple[Event, ...]) -> None:
    one: tuple[Event, ...] = (Begun(), StartFailed(EXITED), Stopped())
    life, _ = play(*one * (POLICY.budget - 1), Begun())
    life, done = play(*asked, life=life)
    assert (life.wanted, life.verdict, done[-1]) == (True, None, "rest")


@pytest.mark.parametrize("state", get_args(State))
def test_close_ends_whatever_there_is(state: State) -> None:
    ways: dict[str, tuple[Event, ...]] = {
        "dead": (),
        "starting": (Begun(),),
        "canary": (Begun(), Proving()),
        "ready": SERVING,
        "suspect": (*SERVING, Checked(1, SICK)),
        "quarantined": (*SERVING, Quarantine(SICK)),
        "draining": (*SERVING, Drain(again=True)),
        "stopping": (*SERVING, Lost(EXITED)),
    }
    life, before = play(*ways[state])
    assert life.state == state
    life, done = play(Close(), Stopped(), Begun(), life=life)
    assert (life.state, life.wanted) == ("dead", False)
    assert (before + done).count("stop") == (before + done).count("start")


def test_every_state_can_be_closed_and_every_life_lost() -> None:
    assert {state for state, kind in table() if kind is Close} == set(get_args(State))
    living = {"starting", "canary", "ready", "suspect", "quarantined", "draining"}
    assert {state for state, kind in table() if kind is Lost} == living


EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([
        Begun(), Proving(), Proven(), StartFailed(EXITED), StartFailed(FOREVER), StartFailed(PASSING),
        Lost(EXITED), Drain(),
        Drain(again=True), Drained(), Quarantine(SICK), Restart(), Stopped(), StopFailed(LEFT), Close(),
        Checked(0), Checked(1, SICK), Checked(2, SICK), Checked(3, SICK),
    ]),
    st.floats(0.0, 100.0),
)  # fmt: skip


@prop(st.lists(EVENTS, max_size=60))
def test_in_every_history(events: list[Event | float]) -> None:
    life, now, shown, running = Life(), 0.0, False, False
    for event in events:
        if isinstance(event, float):
            now += event
            continue
        before = life
        made: Step = step(life, event, now, POLICY)
        life, actions = made
        if isinstance(event, Stopped | StopFailed) and before.state == "stopping":
            running = False
        for action in actions:
            if action == "show":
                assert not shown
                assert life.state == "ready"
                shown = True
            elif action == "hide":
                assert shown
                assert actions[0] == "hide"
                shown = False
            elif action == "start":
                assert not running, "two at once"
                running = True
            elif action == "stop":
                assert running
                assert not shown
            elif action == "rest":
                assert POLICY.backoff[0] <= life.rest <= POLICY.backoff[1]
            elif action == "release":
                assert not running
                assert not life.wanted
        assert shown == (life.state == "ready")
        assert running == (life.state != "dead")
        assert life.verdict is None or not life.wanted
        assert len(life.short) <= POLICY.budget
        assert life.since <= now
