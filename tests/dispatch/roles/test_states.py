"""The states of a training group, as a table."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from dispatch.roles.states import TABLE, Event, State, after
from protocol import CodedError

EVENTS: tuple[Event, ...] = get_args(Event)


def run(*events: Event) -> State:
    state = State.NEW
    for event in events:
        state = after(state, event)
    return state


def test_the_ways_through() -> None:
    assert run("start", "started") is State.READY
    assert run("start", "started", "failed", "failed") is State.FAILED
    assert run("start", "failed", "restart", "started") is State.READY
    assert run("start", "started", "restart", "restart", "failed") is State.FAILED
    assert run("start", "close", "failed", "closed", "close") is State.CLOSED
    assert run("close", "closed") is State.CLOSED


def test_nothing_leaves_failed_by_itself() -> None:
    leads = {event: after(State.FAILED, event) for event in EVENTS if (State.FAILED, event) in TABLE}
    assert leads == {"failed": State.FAILED, "restart": State.RESTARTING, "close": State.CLOSING}


def test_nothing_leads_back_from_closed() -> None:
    for state, event in itertools.product((State.CLOSING, State.CLOSED), EVENTS):
        if (state, event) in TABLE:
            assert TABLE[state, event] in (State.CLOSING, State.CLOSED)


@pytest.mark.parametrize("state", State)
def test_every_state_can_be_closed(state: State) -> None:
    assert after(state, "close") is (State.CLOSED if state is State.CLOSED else State.CLOSING)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, EVENTS)))
def test_what_has_no_place_says_so(state: State, event: Event) -> None:
    if (state, event) in TABLE:
        assert after(state, event) is TABLE[state, event]
        return
    with pytest.raises(CodedError) as raised:
        after(state, event)
    ended = state in (State.CLOSING, State.CLOSED)
    assert raised.value.code == ("POOL.CLOSED" if ended else "POOL.MISUSE")
    assert str(state) in raised.value.detail
