"""Engines and a pool for this folder's tests.

The tests that need Ray share one pool, and so one event loop: mark their module with
``pytest.mark.asyncio(loop_scope="session")``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from dispatch.posting import Health, PosterPool
from tests.dispatch.embedded.engine_under_test import EngineUnderTest
from tests.support.fixtures import KEEP_TRYING, quiet_loop
from tests.support.wait import until

__all__ = ["quiet_loop"]

Engines = Callable[..., EngineUnderTest]
CONCURRENCY = 8
UNHURRIED = Health(timeout=20.0, wedge_after=60.0)
"""No poster dies here, and none is to be taken for dead: what arrived at the engines is counted."""


@pytest.fixture(scope="session")
def started_engines() -> Iterator[dict[tuple[int, tuple[str, ...]], EngineUnderTest]]:
    """The engines that `engines` handed out, until the session ends."""
    started: dict[tuple[int, tuple[str, ...]], EngineUnderTest] = {}
    yield started
    for engine in started.values():
        engine.close()


@pytest.fixture
def engines(started_engines: dict[tuple[int, tuple[str, ...]], EngineUnderTest]) -> Iterator[Engines]:
    """``engines(0)`` and ``engines(1)`` are two engines with fault hooks, kept for the session; each
    test meets them idle, unpaused and without faults. Further arguments are flags of the engine."""
    used: list[EngineUnderTest] = []

    def get(number: int = 0, *flags: str) -> EngineUnderTest:
        key = number, flags or ("--token-rate", "2000")
        if key not in started_engines:
            started_engines[key] = EngineUnderTest.start("--faults", *key[1])
        used.append(started_engines[key])
        return started_engines[key]

    yield get
    for engine in used:
        engine.clear_faults()
        engine.post("/continue_generation")
        engine.post("/abort_request", {"abort_all": True})
        engine.wait_counts(in_flight=0)


@pytest.fixture
def shared(engines: Engines) -> EngineUnderTest:
    return engines()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_pool(ray_local: None) -> AsyncIterator[PosterPool]:
    async with PosterPool(CONCURRENCY, 1, 30.0, health=UNHURRIED, recreation=KEEP_TRYING) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="session")
async def pool(session_pool: PosterPool) -> AsyncIterator[PosterPool]:
    """A pool with nothing under way, and with nothing under way afterwards."""
    yield session_pool
    await until(lambda: session_pool.stats().occupied == 0, what="the pool is empty")
    assert session_pool.stats().balanced
    assert session_pool.stats().in_flight == 0
