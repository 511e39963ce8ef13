"""What makes a running engine sick, and what does not (L6)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dispatch.engines import EngineSpec
from dispatch.engines.health import probe
from dispatch.engines.health.checks import Checks
from dispatch.engines.health.load import Load, _parsed, read_load
from protocol import CodedError
from tests.dispatch.engines.standins import StandIn, standing_in
from tests.support.wait import until

QUICK: dict[str, Any] = {
    "health_timeout": 5.0,
    "canary_timeout": 1.0,
    "canary_interval": 0.0,
    "probe_interval": 0.05,
}


def spec(**fields: Any) -> EngineSpec:
    return EngineSpec(command=("x", "{port}"), **{**QUICK, **fields})


@asynccontextmanager
async def checking(
    engine: StandIn, one: EngineSpec
) -> AsyncIterator[tuple[Checks, list[tuple[int, CodedError | None]]]]:
    told: list[tuple[int, CodedError | None]] = []
    checks = Checks(one, engine.url, lambda failed, error: told.append((failed, error)))
    task = asyncio.create_task(checks.run())
    try:
        yield checks, told
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_each_failure_is_told_and_so_is_its_end() -> None:
    async with standing_in() as engine, checking(engine, spec()) as (_, told):
        await until(lambda: engine.asked.get("/health", 0) >= 3)
        assert told == []
        engine.healthy = False
        await until(lambda: len(told) >= 2)
        engine.healthy = True
        await until(lambda: told[-1] == (0, None))
        assert [failed for failed, _ in told[:2]] == [1, 2]
        error = told[1][1]
        assert error is not None
        assert error.code == "ENGINE.UNHEALTHY"
        assert "2 checks in a row failed" in error.detail
        assert "503" in error.detail


async def test_a_good_health_does_not_hide_missing_progress() -> None:
    """vllm#39863: /health is 200 while a stopped worker generates nothing."""
    async with standing_in() as engine, checking(engine, spec(canary_interval=0.1)) as (_, told):
        await until(lambda: engine.asked.get("/health_generate", 0) >= 2)
        assert told == []
        engine.generating = False
        await until(lambda: [failed for failed, _ in told] == [1, 2, 3])


async def test_a_moving_counter_is_progress_without_a_canary() -> None:
    async with standing_in() as engine:
        engine.steps, engine.stepping = 0.0, True
        async with checking(engine, spec(canary_interval=0.1)) as (_, told):
            await until(lambda: engine.asked.get("/metrics", 0) >= 4)
            assert "/health_generate" not in engine.asked
            engine.stepping = False
            await until(lambda: engine.asked.get("/health_generate", 0) >= 2)
            assert told == []


async def test_a_full_engine_is_not_a_frozen_one() -> None:
    """The canary waits in its queue for too long, but its counter moves meanwhile."""
    async with standing_in() as engine:
        engine.steps, engine.generating = 0.0, False
        async with checking(engine, spec()) as (checks, told):
            await asyncio.sleep(1.05)  # a complaint is followed at most once a second
            engine.stepping = True
            checks.complain()
            await until(lambda: engine.asked.get("/health_generate", 0) >= 1)
            seen = engine.asked["/health"]
            await until(lambda: engine.asked["/health"] >= seen + 3)
            assert told == []


async def test_a_complaint_wants_proof_from_now_on() -> None:
    """That a counter moved before the complaint says nothing of the time since."""
    async with standing_in() as engine:
        engine.steps, engine.stepping = 0.0, True
        async with checking(engine, spec()) as (checks, told):
            await until(lambda: engine.asked.get("/metrics", 0) >= 1)
            await asyncio.sleep(1.05)
            engine.steps, engine.stepping, engine.generating = engine.steps + 100, False, False
            checks.complain()
            await until(lambda: told)
            assert "/health_generate" in engine.asked


async def test_what_is_held_is_asked_nothing() -> None:
    """A paused SGLang does not answer /health: checks must not kill it in the middle of an update."""
    async with standing_in() as engine, checking(engine, spec()) as (checks, told):
        await until(lambda: engine.asked.get("/health", 0) >= 1)
        checks.hold(1000.0)
        engine.healthy = False
        await asyncio.sleep(0.5)  # a check that was under way may end
        asked = dict(engine.asked)
        await asyncio.sleep(0.5)  # nothing is to happen: there is no event to wait for
        assert (engine.asked, told, checks.held) == (asked, [], True)
        checks.release()
        await until(lambda: told)


async def test_a_forgotten_hold_ends() -> None:
    async with standing_in() as engine, checking(engine, spec()) as (checks, told):
        checks.hold(0.3)
        engine.healthy = False
        await until(lambda: told)
        assert not checks.held


async def test_our_own_lateness_is_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that was blocked makes every timeout expire. That is excused, but not for ever."""

    async def late(client: httpx.AsyncClient, url: str, timeout: float) -> None:
        time.sleep(2 * timeout)  # noqa: ASYNC251 - a blocked loop is what this is about
        raise CodedError("ENGINE.UNHEALTHY", "did not answer")

    async with standing_in() as engine:
        monkeypatch.setattr(probe, "health", late)
        calls: list[float] = []
        async with checking(engine, spec(health_timeout=0.05)) as (_, told):
            calls.append(0)
            await until(lambda: told)
            assert told[0][0] == 1


async def test_drained_when_it_says_twice_that_it_is_idle() -> None:
    async with standing_in() as engine:
        engine.under_way = 2
        checks = Checks(spec(), engine.url, lambda failed, error: None)
        draining = asyncio.create_task(checks.drained(20.0))
        await until(lambda: engine.asked.get("/metrics", 0) >= 3)
        assert not draining.done()
        engine.under_way = 0
        assert await draining


@pytest.mark.parametrize("under_way", [1, None])
async def test_not_drained_in_time(under_way: int | None) -> None:
    async with standing_in() as engine:
        engine.under_way = under_way
        checks = Checks(spec(), engine.url, lambda failed, error: None)
        assert not await checks.drained(0.3)


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1200.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 34.0
"""


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (VLLM, Load(1234.0, 6)),
        ("", Load()),
        ("llamacpp:n_decode_total 7\nllamacpp:requests_processing 1\n", Load(7.0, 1)),
        ("something_else 3\n", Load()),
    ],
)
def test_load(text: str, load: Load) -> None:
    assert _parsed(text) == load


@pytest.mark.parametrize("text", ["<html>", "vllm:generation_tokens_total", "a{b} c d e"])
async def test_nonsense_is_no_load(text: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    async with httpx.AsyncClient(transport=transport) as client:
        assert await read_load(client, spec(), "http://engine", 5.0) == Load()


async def test_endless_metrics_are_not_read() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="# x\n" * 2_000_000))
    async with httpx.AsyncClient(transport=transport) as client:
        assert await read_load(client, spec(), "http://engine", 20.0) == Load()


def test_no_metrics_by_choice() -> None:
    assert EngineSpec(command=("x", "{port}"), metrics_path="").metrics_path == ""


def test_moved() -> None:
    assert Load(2.0).moved_since(Load(1.0))
    assert not Load(1.0).moved_since(Load(1.0))
    assert not Load(1.0).moved_since(Load(2.0)), "another life of the same engine"
    assert not Load(1.0).moved_since(Load())
    assert not Load().moved_since(Load(1.0))
