"""What the tests of the table share: what the caller gets, and what is said of it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from faults import Fault, classify, classify_text

WAIT = 30.0
"""Longest wait for what must come (seconds)."""
SOON = 2.0
"""How long a call that must not settle is watched (seconds)."""


def caught(ref: Any, timeout: float = WAIT) -> Exception:
    """What the caller gets from a call that fails."""
    with pytest.raises(Exception) as info:  # noqa: PT011 - which one it is, is what the tests are about
        ray.get(ref, timeout=timeout)
    return info.value


def said_of_text(exc: Exception) -> Fault:
    """What `classify_text` says of the traceback that a person would paste."""
    return classify_text("".join(traceback.format_exception(exc)))


def both(exc: Exception) -> Fault:
    """What `classify` says, when the pasted traceback says the same."""
    fault, text = classify(exc), said_of_text(exc)
    assert text.code == fault.code
    assert text.kind == fault.kind
    return fault


@contextlib.contextmanager
def actor(cls: Any, *args: Any, **options: Any) -> Iterator[Any]:
    """An actor for the time of a test."""
    made = cls.options(**options).remote(*args)
    try:
        yield made
    finally:
        ray.kill(made)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def until(condition: Callable[[], bool], timeout: float = WAIT) -> None:
    """Wait until ``condition`` holds, asked through Ray's own waiting so that nothing spins."""
    import time

    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def touch(path: Path) -> None:
    path.write_text("")
