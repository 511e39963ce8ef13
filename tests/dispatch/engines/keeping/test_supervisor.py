"""The supervisor's stages, without Ray: each failure has its code, its stage and the last lines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import cast

import pytest

from dispatch.engines import EngineSpec, EngineSupervisor, embedded_spec
from dispatch.engines.child import ports
from dispatch.engines.child.process import EngineProcess
from dispatch.engines.health import probe
from dispatch.engines.spec import StopReport
from protocol import CodedError
from tests.dispatch.engines.processes import SLEEP, Tag, fail, spec_of
from tests.support.wait import until


@pytest.mark.parametrize("api", ["sglang", "openai"])
async def test_embedded_engine(tag: Tag, api: str, tmp_path: Path) -> None:
    spec = embedded_spec(token_rate=500, api=api, env=tag.env, log_dir=str(tmp_path))
    supervisor = EngineSupervisor(spec, "engine/4")
    status = await supervisor.start()
    assert (status.key, status.state, status.stage) == ("engine/4", "ready", "routable")
    assert status.pid in tag.alive()
    assert status.weight_version == ("default" if api == "sglang" else None)
    async with probe.new_client() as client:
        await probe.health(client, status.url, 5)
    assert await supervisor.start() is status, "started already"
    watching = asyncio.create_task(supervisor.watch())
    report = await supervisor.stop()
    assert report.stages["confirm"] < 2
    ended = await watching
    assert ended is not None
    assert ended.planned
    assert (await supervisor.status()).state == "dead"
    assert tag.alive() == []
    assert "listening" in (tmp_path / f"engine-4.{os.getpid()}.1.log").read_text()


async def test_restart_in_the_same_supervisor(tag: Tag) -> None:
    supervisor = EngineSupervisor(spec_of(tag))
    first = await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    await asyncio.sleep(0)
    os.kill(first.pid, signal.SIGKILL)
    report = await asyncio.wait_for(watching, 5)
    assert report is not None
    assert (report.signal, report.planned) == (9, False)
    assert (await supervisor.status()).state == "dead"
    second = await supervisor.start()
    assert second.pid != first.pid
    assert second.weight_version == "7"
    await supervisor.stop()


async def test_watch_without_end(tag: Tag) -> None:
    supervisor = EngineSupervisor(spec_of(tag))
    with pytest.raises(CodedError, match="never started"):
        await supervisor.watch()
    await supervisor.start()
    assert await supervisor.watch(0.01) is None
    await supervisor.stop()


@pytest.mark.parametrize(
    ("generate", "why"),
    [
        ("500", "answered 500"),
        ('{"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}', "abort"),
        ("hang", "did not answer within"),
    ],
)
async def test_healthy_without_generating(tag: Tag, generate: str, why: str) -> None:
    """P5: published only after a generation."""
    error = await fail(
        spec_of(tag, "--generate", generate, canary_timeout=0.7 if generate == "hang" else 10.0)
    )
    assert error.code == "ENGINE.CANARY_FAILED"
    assert error.data["stage"] == "canary"
    assert why in error.detail
    assert tag.alive() == []


async def test_first_generation_fails(tag: Tag) -> None:
    supervisor = EngineSupervisor(spec_of(tag, "--generate-fails", "2"))
    assert (await supervisor.start()).state == "ready"
    await supervisor.stop()


async def test_no_weight_version(tag: Tag) -> None:
    supervisor = EngineSupervisor(spec_of(tag, "--no-model-info"))
    assert (await supervisor.start()).weight_version is None
    await supervisor.stop()


@pytest.mark.parametrize("says", ["", "OSError: [Errno 98] Address already in use"])
async def test_port_taken(tag: Tag, tmp_path: Path, says: str) -> None:
    """P4: a port taken between choosing and binding is tried again with a fresh one."""
    counter = tmp_path / "starts"
    flags = ("--taken", "2", "--counter", str(counter), "--taken-says", says)
    supervisor = EngineSupervisor(spec_of(tag, *flags))
    assert (await supervisor.start()).state == "ready"
    assert counter.stat().st_size == 3
    await supervisor.stop()


async def test_port_taken_for_ever(tag: Tag, tmp_path: Path) -> None:
    counter = tmp_path / "starts"
    error = await fail(spec_of(tag, "--taken", "1000", "--counter", str(counter)))
    assert error.code == "ENGINE.PORT_TAKEN"
    assert counter.stat().st_size == 5


async def test_port_taken_by_a_real_server(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded engine's own word for it, and no answer of the other server's is believed."""
    first = EngineSupervisor(spec_of(tag))
    port = int((await first.start()).url.rpartition(":")[2])
    chosen = iter([port, port])
    real = ports.reserve

    def reserve(names: Collection[str], host: str, avoid: Collection[int]) -> ports.Reserved:
        taken = next(chosen, None)
        return real(names, host, avoid) if taken is None else ports.Reserved({"port": taken})

    monkeypatch.setattr(ports, "reserve", reserve)
    second = EngineSupervisor(embedded_spec(env=tag.env))
    status = await second.start()
    assert status.state == "ready"
    assert status.url != f"http://127.0.0.1:{port}"
    await asyncio.gather(first.stop(), second.stop())


async def test_stop_during_a_start(tag: Tag) -> None:
    supervisor = EngineSupervisor(spec_of(tag, "--never-bind"))
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: tag.alive(), 10)
    with pytest.raises(CodedError, match="being started already"):
        await supervisor.start()
    await supervisor.stop()
    with pytest.raises(CodedError) as caught:
        await starting
    assert caught.value.code == "CANCEL.CALLER"
    assert tag.alive() == []
    await supervisor.stop()


async def test_cancelled_start(tag: Tag) -> None:
    supervisor = EngineSupervisor(spec_of(tag, "--never-bind"))
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: tag.alive(), 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert tag.alive() == []


async def test_stop_before_a_start() -> None:
    supervisor = EngineSupervisor(EngineSpec(command=(*SLEEP, "{port}")))
    assert (await supervisor.stop()).exit is None


class Unkillable:
    """A process that waits in the kernel for a device or a disk, which no signal ends."""

    alive = True

    async def stop(self, term_timeout: float, kill_timeout: float) -> StopReport:
        raise CodedError("ENGINE.STOP_FAILED", "stage confirm: processes [7] are still there")


async def test_what_could_not_be_stopped_does_not_pass_for_a_started_engine() -> None:
    supervisor = EngineSupervisor(EngineSpec(command=(*SLEEP, "{port}")))
    supervisor._process = cast(EngineProcess, Unkillable())
    for ask in (supervisor.stop, supervisor.start):
        with pytest.raises(CodedError, match=r"ENGINE\.STOP_FAILED.* still there"):
            await ask()
