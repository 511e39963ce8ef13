"""retrying: run an attempt again as often as `decide` says so. tenacity runs the waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from faults.classify import classify
from faults.decide import Backoff, decide
from faults.fault import Decision, Fault

T = TypeVar("T")
Hook = Callable[[Fault, Decision, int, Exception], None]


async def retrying(
    attempt: Callable[[int], Awaitable[T]],
    *,
    idempotent: bool = True,
    max_attempts: int | Callable[[], int] = 4,
    remaining: Callable[[], float | None] = lambda: None,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen, so sharing the default is safe
    on_failure: Hook | None = None,
    final: Callable[[Exception, Fault], bool] = lambda exc, fault: False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    first: Exception | None = None,
) -> T:
    """Await ``attempt(n)`` (n from 1) until it succeeds or `decide` says to stop; its last exception
    is raised as it is. ``first`` is what the first attempt ended with, where its caller has made that
    already. ``max_attempts`` may be worked out anew after each failure. ``remaining`` tells what is left
    of the deadline (seconds), ``on_failure`` hears of every failure and what was decided, ``final`` may
    take away the permission to retry, ``sleep`` waits (seconds)."""
    verdict: dict[str, Decision] = {}

    def again(state: tenacity.RetryCallState) -> bool:
        exc = state.outcome.exception() if state.outcome is not None else None
        if not isinstance(exc, Exception):
            return False  # a result, or a cancellation, which is never ours to retry
        fault = classify(exc)
        most = max_attempts if isinstance(max_attempts, int) else max_attempts()
        decision = decide(
            fault,
            idempotent=idempotent,
            attempt=state.attempt_number,
            max_attempts=1 if final(exc, fault) else most,
            remaining=remaining(),
            backoff=backoff,
            jitter=random.uniform(0.5, 1.0),  # noqa: S311 - spreads retries out; nothing secret
        )
        verdict["last"] = decision
        if on_failure is not None:
            on_failure(fault, decision, state.attempt_number, exc)
        return decision.action.sends_again

    async for one in tenacity.AsyncRetrying(
        retry=again,
        wait=lambda state: verdict["last"].delay,
        stop=tenacity.stop_never,  # decide stops; it alone counts attempts
        sleep=sleep,
        reraise=True,
    ):
        with one:
            if one.retry_state.attempt_number == 1 and first is not None:
                raise first
            return await attempt(one.retry_state.attempt_number)
    raise AssertionError("tenacity ended without a result")
