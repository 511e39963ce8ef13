"""llama.cpp's server, a real engine that starts in a quarter of a second, supervised and in a fleet."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from dispatch.engines import EngineFleet, EngineSpec, EngineStatus, EngineSupervisor
from dispatch.engines.health import probe
from dispatch.engines.routers import StaticRouter
from protocol import Events
from tests.dispatch.engines.processes import Tag
from tests.real_engines.places import llama_spec
from tests.support.events import EventFile
from tests.support.wait import until

LONG = {"prompt": "One, two, three,", "max_tokens": 1900, "ignore_eos": True, "temperature": 0.0}


class Telling(StaticRouter):
    """A list that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._told = asyncio.Event()

    async def add(self, url: str) -> None:
        await super().add(url)
        self._told.set()

    async def knows(self, url: str) -> None:
        """Wait until the list is ``url`` alone."""
        while await self.urls() != (url,):
            self._told.clear()
            await asyncio.wait_for(self._told.wait(), 10)


@asynccontextmanager
async def supervised(spec: EngineSpec) -> AsyncIterator[tuple[EngineSupervisor, EngineStatus]]:
    supervisor = EngineSupervisor(spec)
    try:
        yield supervisor, await supervisor.start()
    finally:
        await supervisor.stop()


async def generates(spec: EngineSpec, status: EngineStatus) -> str:
    async with probe.new_client() as client:
        return await probe.canary(client, spec, status.url, 10)


@asynccontextmanager
async def long_request(status: EngineStatus) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A generation that is under way for the time of the block."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        request = asyncio.create_task(client.post(f"{status.url}/v1/completions", json=LONG))
        while "llamacpp:requests_processing 1" not in (await client.get(f"{status.url}/metrics")).text:
            assert not request.done(), request.result().text
        try:
            yield request
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


async def test_started_proven_stopped(tag: Tag, quick_model: Path, tmp_path: Path) -> None:
    spec = llama_spec(quick_model, tag.env, log_dir=str(tmp_path), term_timeout=10.0)
    async with supervised(spec) as (supervisor, status):
        assert (status.state, status.stage) == ("ready", "routable")
        assert status.weight_version is None
        assert status.pid in tag.alive()
        assert await generates(spec, status) == await generates(spec, status), "greedily"
        report = await supervisor.stop()
        assert "kill" not in report.stages, "with nothing to do it ends on TERM"
        assert report.exit is not None
        assert (report.exit.status, report.exit.planned) == (0, True)
        assert "stopped" in "".join(report.exit.last_lines), "its lines mix with those of its own thread"
    assert tag.alive() == []


async def test_term_hangs_while_it_generates(tag: Tag, slow_model: Path) -> None:
    """TERM closes the port and waits for the work in flight, however long; KILL after ``term_timeout``."""
    spec = llama_spec(slow_model, tag.env, term_timeout=1.0)
    async with supervised(spec) as (supervisor, status), long_request(status) as request:
        report = await supervisor.stop()
        assert 0.9 < report.stages["term"] < 5
        assert report.stages["kill"] < 5
        assert report.exit is not None
        assert (report.exit.signal, report.exit.planned) == (signal.SIGKILL, True)
        assert "stopping" in report.exit.last_lines
        with pytest.raises(httpx.HTTPError):
            await request
    assert tag.alive() == []


async def test_killed_while_it_generates(tag: Tag, slow_model: Path) -> None:
    """The client sees a broken connection; the next start serves, on another port."""
    spec = llama_spec(slow_model, tag.env)
    async with supervised(spec) as (supervisor, status):
        async with long_request(status) as request:
            os.kill(status.pid, signal.SIGKILL)
            report = await supervisor.watch(5)
            assert report is not None
            assert (report.signal, report.planned) == (signal.SIGKILL, False)
            with pytest.raises(httpx.HTTPError):
                await request
        assert tag.alive() == []
        again = await supervisor.start()
        assert again.url != status.url
        assert again.pid in tag.alive()
        await generates(spec, again)
    assert tag.alive() == []


async def test_in_a_fleet(ray_local: None, tag: Tag, events: EventFile, quick_model: Path) -> None:
    """SIGSTOP is found by the checks, SIGKILL by the supervisor: both times a new one serves, and the router
    knows it."""
    spec = llama_spec(quick_model, tag.env)
    router = Telling()
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        async with EngineFleet([spec], events=sink, router=router) as fleet:
            status = (await fleet.wait_ready(50))[0]
            for count, (number, code) in enumerate(
                [(signal.SIGSTOP, "ENGINE.UNHEALTHY"), (signal.SIGKILL, "ENGINE.EXITED")], 1
            ):
                os.kill(status.pid, number)
                await until(lambda count=count: len(fleet.recoveries) == count, 30)
                assert fleet.recoveries[-1].code == code
                assert status.pid not in tag.alive()
                after = (await fleet.wait_ready(30))[0]
                assert after.url != status.url
                await generates(spec, after)
                await router.knows(after.url)
                status = after
    assert tag.alive() == []
    assert await router.urls() == ()
