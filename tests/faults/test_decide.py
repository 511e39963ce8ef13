"""decide: one table, and rules that only take permission away."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from faults import Action, Backoff, Blame, Fault, Kind, Outcome, classify_status, decide
from faults.decide import rank
from faults.meanings import meaning
from protocol import Code, Family, Trust, catalogue
from protocol.catalogue import Catalogue

CODES = [entry.code for entry in catalogue]


def fault(code: str, **changes: Any) -> Fault:
    kind, blame, outcome = meaning(Code(code))
    return replace(Fault(kind, Code(code), blame, outcome, Trust.STRUCTURED), **changes)


@pytest.mark.parametrize("code", CODES)
def test_the_first_attempt_follows_the_catalogue(code: Code) -> None:
    made = fault(code)
    expected = Action(catalogue.entry(code).advice)
    decision = decide(made)
    assert decision.action is expected
    assert str(code) in decision.why
    assert decision.action.sends_again or decision.delay == 0


YES, NO = True, False
CASES = [
    # code, what the fault says besides, what the caller says, action, delay
    ("TRANSPORT.DISCONNECTED", {}, {}, "retry_elsewhere", 0.1),
    ("TRANSPORT.DISCONNECTED", {}, {"idempotent": NO}, "give_up", 0.0),
    ("TRANSPORT.CONNECT", {}, {"idempotent": NO}, "retry_elsewhere", 0.1),  # refused: it did not run
    ("TRANSPORT.CONNECT", {"outcome": Outcome.UNKNOWN}, {"idempotent": NO}, "give_up", 0.0),
    ("TRANSPORT.CONNECT", {"outcome": Outcome.RAN}, {"idempotent": NO}, "give_up", 0.0),
    ("TRANSPORT.CONNECT", {"trust": Trust.HEURISTIC}, {"idempotent": NO}, "give_up", 0.0),
    ("TRANSPORT.CONNECT", {"trust": Trust.CHECKSUMMED}, {"idempotent": NO}, "give_up", 0.0),
    ("TRANSPORT.CONNECT", {"trust": Trust.SIGNED}, {"idempotent": NO}, "retry_elsewhere", 0.1),
    ("TRANSPORT.CONNECT", {"trust": Trust.HEURISTIC}, {"idempotent": YES}, "retry_elsewhere", 0.1),
    ("UPSTREAM.SERVER_ERROR", {}, {"attempt": 1}, "retry_elsewhere", 0.1),
    ("UPSTREAM.SERVER_ERROR", {}, {"attempt": 2}, "retry_elsewhere", 0.2),
    ("UPSTREAM.SERVER_ERROR", {}, {"attempt": 3}, "retry_elsewhere", 0.4),
    ("UPSTREAM.SERVER_ERROR", {}, {"attempt": 4}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"attempt": 9, "max_attempts": 10}, "retry_elsewhere", 5.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"max_attempts": 1}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"max_attempts": 0}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"remaining": 0.05}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"remaining": 0.1}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"remaining": 0.11}, "retry_elsewhere", 0.1),
    ("UPSTREAM.SERVER_ERROR", {}, {"remaining": 0.0}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"remaining": -1.0}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"remaining": 0.0, "jitter": 0.0}, "give_up", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"jitter": 0.5}, "retry_elsewhere", 0.05),
    ("UPSTREAM.SERVER_ERROR", {}, {"jitter": -1.0}, "retry_elsewhere", 0.0),
    ("UPSTREAM.SERVER_ERROR", {}, {"jitter": 7.0}, "retry_elsewhere", 0.1),
    ("UPSTREAM.SERVER_ERROR", {}, {"backoff": Backoff(2.0, 3.0), "attempt": 2}, "retry_elsewhere", 3.0),
    ("BACKPRESSURE.RATE_LIMITED", {"retry_after": 7.0}, {}, "wait", 7.0),
    ("BACKPRESSURE.RATE_LIMITED", {"retry_after": 7.0}, {"jitter": 0.1}, "wait", 7.0),
    ("BACKPRESSURE.RATE_LIMITED", {"retry_after": 0.0}, {}, "wait", 0.1),
    ("BACKPRESSURE.RATE_LIMITED", {"retry_after": 7.0}, {"remaining": 6.9}, "give_up", 0.0),
    ("BACKPRESSURE.RATE_LIMITED", {"retry_after": 7.0}, {"remaining": 7.1}, "wait", 7.0),
    ("BACKPRESSURE.OVERLOADED", {}, {"idempotent": NO}, "wait", 0.1),
    ("ACTOR.DIED", {}, {}, "recreate", 0.0),  # load was not its cause: another one may have it at once
    ("ACTOR.DIED", {}, {"attempt": 2}, "recreate", 0.2),
    ("ACTOR.DIED", {"retry_after": 3.0}, {}, "recreate", 3.0),
    ("ACTOR.DIED", {}, {"idempotent": NO}, "give_up", 0.0),
    ("ACTOR.DIED", {"blame": Blame.NESTED}, {}, "retry_elsewhere", 0.1),  # our callee is alive
    ("ACTOR.NESTED_DIED", {}, {}, "retry_elsewhere", 0.1),
    ("ACTOR.UNAVAILABLE", {}, {}, "wait", 0.1),  # it may be alive: never recreated (L2)
    ("TIMEOUT.RAY_GET", {}, {}, "cancel", 0.0),
    ("TIMEOUT.NESTED", {}, {}, "give_up", 0.0),
    ("CANCEL.CALLER", {}, {}, "cancel", 0.0),
    ("TASK.FAILED", {}, {}, "give_up", 0.0),
    ("REQUEST.REJECTED", {"status": 400}, {}, "give_up", 0.0),
    ("UNKNOWN.EXCEPTION", {}, {}, "give_up", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("code", "says", "asked", "action", "delay"), CASES)
def test_the_table(code: str, says: dict[str, Any], asked: dict[str, Any], action: str, delay: float) -> None:
    decision = decide(fault(code, **says), **asked)
    assert decision.action == action
    assert decision.delay == pytest.approx(delay)


def test_backoff_doubles_up_to_its_most() -> None:
    backoff = Backoff(0.1, 5.0)
    delays = [backoff.delay(n) for n in range(1, 12)]
    assert delays == sorted(delays)
    assert delays[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert delays[-1] == backoff.delay(10_000) == 5.0


def test_whatever_advice_is_registered_a_request_and_an_unknown_are_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = Catalogue()
    for family in (Family.REQUEST, Family.UNKNOWN, Family.ENGINE):
        mine.register("TRY_AGAIN", family=family, meaning="m", advice="retry_same", outcome="not_run")
    # The module, by its name: `faults.decide` is the function.
    monkeypatch.setattr(sys.modules["faults.decide"], "catalogue", mine)
    assert decide(fault("REQUEST.TRY_AGAIN")).action is Action.GIVE_UP
    assert decide(fault("UNKNOWN.TRY_AGAIN")).action is Action.GIVE_UP
    assert decide(fault("ENGINE.TRY_AGAIN")).action is Action.RETRY_SAME


def test_rank_orders_from_what_allows_the_most() -> None:
    ranks = [
        rank(fault(c))
        for c in ("UPSTREAM.SERVER_ERROR", "ACTOR.DIED", "ACTOR.UNAVAILABLE", "CANCEL.CALLER", "TASK.FAILED")
    ]
    assert ranks == sorted(set(ranks))


faults = st.builds(
    Fault,
    kind=st.sampled_from(list(Kind)),
    code=st.sampled_from(CODES) | st.sampled_from(list(Family)).map(lambda f: Code(f"{f}.NEVER_SEEN")),
    blame=st.sampled_from(list(Blame)),
    outcome=st.sampled_from(list(Outcome)),
    trust=st.sampled_from(list(Trust)),
    retry_after=st.none() | st.floats(0, 400),
    status=st.none() | st.integers(100, 599),
)
asked = st.fixed_dictionaries(
    {
        "idempotent": st.booleans(),
        "attempt": st.integers(1, 100),
        "max_attempts": st.integers(0, 100),
        "remaining": st.none() | st.floats(-10, 1000),
        "jitter": st.floats(0, 1),
        "backoff": st.builds(Backoff, st.floats(0, 10), st.floats(0, 100)),
    }
)


@given(faults, asked)
def test_what_always_holds(made: Fault, call: dict[str, Any]) -> None:
    decision = decide(made, **call)
    assert decision == decide(made, **call), "a pure function"
    assert math.isfinite(decision.delay)
    assert decision.delay >= 0
    assert decision.why
    if not decision.action.sends_again:
        assert decision.delay == 0
        return
    assert call["idempotent"] or (made.outcome is Outcome.NOT_RUN and made.trust >= Trust.SIGNED)
    assert call["attempt"] < call["max_attempts"]
    assert call["remaining"] is None or decision.delay < call["remaining"]
    assert made.code.family not in (Family.UNKNOWN, Family.REQUEST)
    assert made.retry_after is None or decision.delay >= made.retry_after
    assert Action(catalogue.entry(made.code).advice).sends_again
    assert not (decision.action is Action.RECREATE and made.blame is Blame.NESTED)


@given(st.integers(400, 499), asked)
def test_a_status_that_describes_the_request_is_never_sent_again(status: int, call: dict[str, Any]) -> None:
    made = classify_status(status)
    assert made is not None
    if status not in (408, 425, 429):
        assert decide(made, **call).action is Action.GIVE_UP
