"""The types of faults' public names. Checked by the type checkers, never run."""

from typing import assert_type

from faults import (
    Action,
    Backoff,
    Blame,
    Decision,
    Fault,
    Kind,
    Outcome,
    classify,
    classify_status,
    classify_text,
    decide,
    name_of,
    retrying,
)
from protocol import Code, Trust, coded


def values(exc: BaseException) -> None:
    fault = classify(exc)
    assert_type(fault, Fault)
    assert_type(fault.kind, Kind)
    assert_type(fault.code, Code)
    assert_type(fault.blame, Blame)
    assert_type(fault.outcome, Outcome)
    assert_type(fault.trust, Trust)
    assert_type(fault.retry_after, float | None)
    assert_type(fault.status, int | None)
    assert_type(fault.evidence, str)
    assert_type(fault.forgivable, bool)
    fault.kind = Kind.DIED  # type: ignore[misc]
    assert_type(classify_text("x"), Fault)
    assert_type(classify_status(503, {"retry-after": "5"}), Fault | None)
    decision = decide(fault, idempotent=False, attempt=2, remaining=3.0, backoff=Backoff(1.0, 2.0))
    assert_type(decision, Decision)
    assert_type(decision.action, Action)
    assert_type(decision.delay, float)
    assert_type(decision.action.sends_again, bool)
    decide(exc)  # type: ignore[arg-type]


@coded(name=name_of)
def named() -> int:
    return 1


def hook(fault: Fault, decision: Decision, number: int, exc: Exception) -> None: ...


async def attempt(number: int) -> str:
    return str(number)


async def retried() -> None:
    assert_type(named(), int)
    assert_type(await retrying(attempt, on_failure=hook), str)
    await retrying(lambda: attempt(1))  # type: ignore[arg-type, misc]
