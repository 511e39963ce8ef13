"""Fixtures that the tests of posting and of chaos share; their conftests import them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatch.posting import Health, PosterPool
from dispatch.posting.posters.keeper import Recreation
from protocol import Events
from tests.support.events import EventFile
from tests.support.wait import until_sync
from tests.support.witness import Witness

MakePool = Callable[..., PosterPool]

QUICK = Health(interval=0.2, timeout=2.0, strikes=2, wedge_after=4.0, unavailable=10.0, start_timeout=40.0)
"""Health for tests that wait for a verdict: the defaults' logic in less time. A probe has as long as by
default, for nearly all tests want a poster that nobody hurt to serve all the while."""
KEEP_TRYING = Recreation(budget=1000)


@pytest.fixture(scope="session")
def shared_witness() -> Iterator[Witness]:
    with Witness() as one:
        yield one


@pytest.fixture
def witness(shared_witness: Witness) -> Witness:
    """A witness with nothing in flight and all counts at zero."""
    until_sync(lambda: shared_witness.counts()["in_flight"] == 0, what="the last test's requests ended")
    shared_witness.reset()
    return shared_witness


@pytest.fixture
def events(tmp_path: Path) -> EventFile:
    return EventFile(tmp_path / "events.jsonl")


@pytest.fixture
def make_pool(ray_local: None, events: EventFile) -> Iterator[MakePool]:
    """Make a pool that writes to ``events``; enter it with ``async with``."""
    sinks: list[Events] = []

    def make(
        concurrency: int = 8, posters_per_node: int = 1, deadline: float = 30.0, **more: Any
    ) -> PosterPool:
        sinks.append(Events.to_file(events.path, run="test", role="pool"))
        return PosterPool(
            concurrency,
            posters_per_node,
            deadline,
            **{"health": QUICK, "recreation": KEEP_TRYING, "events": sinks[-1], **more},
        )

    yield make
    for sink in sinks:
        sink.close()


@pytest.fixture(autouse=True)
def quiet_loop(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test may leave an exception that nobody looked at: asyncio logs those as errors."""
    yield
    said = [
        record.getMessage()
        for phase in ("setup", "call")
        for record in caplog.get_records(phase)  # type: ignore[arg-type]
        if record.name == "asyncio" and record.levelno >= logging.ERROR
    ]
    assert said == []
