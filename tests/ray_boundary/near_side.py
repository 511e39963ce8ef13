"""What the caller holds, and what it reads of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from faults import Fault, classify
from protocol import Trust, code_of, read
from tests.ray_boundary.far_side import LONG
from tests.ray_boundary.shapes import Means


async def failure_of(awaitable: Awaitable[Any], timeout: float = LONG) -> BaseException:
    """The exception that it ends with, within ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout) as deadline:
            got = await awaitable
    except Exception as exc:
        if deadline.expired():
            raise
        return exc
    raise AssertionError(f"it answered {got!r}")


def meaning_of(exc: BaseException) -> Means:
    fault: Fault = classify(exc)
    return Means(str(fault.code), str(fault.blame), str(fault.outcome), fault.trust)


def name_read(exc: BaseException) -> tuple[str, Trust] | None:
    """The code and how far it may be believed."""
    found = read(exc)
    assert code_of(exc) == found.code
    return None if found.code is None else (str(found.code), found.trust)
