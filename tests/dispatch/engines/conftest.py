from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dispatch.engines.processes import Tag
from tests.support.events import EventFile


@pytest.fixture
def tag() -> Iterator[Tag]:
    """Marks the processes of one test and ends those that a failed test has left behind."""
    one = Tag()
    yield one
    left = one.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "the test ended with processes of its engines alive"


@pytest.fixture
def events(tmp_path: Path) -> EventFile:
    return EventFile(tmp_path / "events.jsonl")
