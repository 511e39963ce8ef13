"""Engines for this folder's tests: a shared one for quick ones, fresh ones where counts or signals matter."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.dispatch.embedded.engine_under_test import EngineUnderTest

StartEngine = Callable[..., EngineUnderTest]


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[EngineUnderTest]:
    with EngineUnderTest.start("--faults", "--token-rate", "5000") as engine:
        yield engine
        assert engine.stderr() == ""  # no test, however rude its requests, may make the engine complain


@pytest.fixture
def engine(shared_engine: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """The shared engine, quick, with fault hooks; left idle, unpaused and without armed faults."""
    yield shared_engine
    shared_engine.clear_faults()
    shared_engine.post("/continue_generation")
    shared_engine.post("/abort_request", {"abort_all": True})
    shared_engine.wait_counts(in_flight=0)


@pytest.fixture
def start_engine(pool: ThreadPoolExecutor) -> Iterator[StartEngine]:
    """Start engines of the test's own; all are gone when the test is."""
    started: list[EngineUnderTest] = []

    def start(*flags: str, port: int = 0, wait: bool = True) -> EngineUnderTest:
        started.append(EngineUnderTest.start(*flags, port=port, wait=wait))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that are meant to be in flight; torn down after the engines they wait for."""
    with ThreadPoolExecutor(40) as threads:
        yield threads
