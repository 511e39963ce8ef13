"""Calls of a supervisor: awaited on the loop with a deadline, their failures by their names."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from protocol import CodedError


async def call(ref: Any, deadline: float, code: str, late: str) -> Any:
    """Await ``ref`` for at most ``deadline`` seconds. When nobody waits any more the call is
    cancelled as well: Ray would go on with it.

    Raises CodedError: the supervisor's own, or ENGINE.SUPERVISOR_LOST, or ``code`` with the text
    ``late`` when the deadline passed."""
    limit = asyncio.timeout(deadline)
    try:
        async with limit:
            return await ref
    except asyncio.CancelledError:
        _cancel(ref)
        raise
    except TimeoutError as exc:
        if not limit.expired():  # Ray's GetTimeoutError is a TimeoutError too
            raise
        _cancel(ref)
        raise CodedError(code, f"{late} within {deadline:g} s", {"stage": "actor"}) from exc
    except RayError as exc:
        raise named(exc) from exc


def named(exc: RayError) -> CodedError:
    """A failed call of a supervisor as what it is: the supervisor's own CodedError, or its loss.

    An actor that is only out of reach (ActorUnavailableError) counts as lost here: calls are made while
    its engine serves nobody, so replacing both costs nothing but time."""
    if isinstance(exc, RayTaskError):
        cause = exc.cause
        return cause if isinstance(cause, CodedError) else CodedError.from_exception(exc, "INTERNAL.BUG")
    if isinstance(exc, RayActorError):
        return CodedError.from_exception(exc, "ENGINE.SUPERVISOR_LOST")
    return CodedError.from_exception(exc, "INTERNAL.RAY")


def _cancel(ref: Any) -> None:
    if ray.is_initialized():
        ray.cancel(ref)
