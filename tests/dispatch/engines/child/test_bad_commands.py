"""Commands that cannot work, or misbehave: each fails with its code, its stage and its last lines, or is
put up with, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from dispatch.engines import EngineSpec, EngineSupervisor
from dispatch.engines.child import ports
from protocol import CodedError
from tests.dispatch.engines.processes import Tag, fail, files_in, spec_of
from tests.support.full_disk import file_size_limit
from tests.support.wait import until

HUNDRED_MB = str(100_000_000)


async def serves(spec: EngineSpec) -> tuple[EngineSupervisor, int]:
    supervisor = EngineSupervisor(spec)
    status = await supervisor.start()
    assert status.state == "ready"
    return supervisor, status.pid


def of(error: CodedError) -> tuple[str, str]:
    return str(error.code), error.data["stage"]


# -- it does not start


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("/no/such/engine", "/no/such/engine: No such file or directory"),
        ("no-such-engine", "no-such-engine: No such file or directory"),
        ("/etc/passwd", "/etc/passwd: Permission denied"),
        ("/", "/: Permission denied"),
    ],
)
async def test_what_cannot_be_run(tag: Tag, command: str, why: str) -> None:
    error = await fail(EngineSpec(command=(command, "{port}"), env=tag.env))
    assert error.code == "ENGINE.SPAWN_FAILED"
    assert why in error.detail
    assert error.data["argv"][0] == command
    assert tag.alive() == []


async def test_neither_a_program_nor_a_script(tag: Tag, tmp_path: Path) -> None:
    text = tmp_path / "engine"
    text.write_text("serve!\n")
    text.chmod(0o755)
    error = await fail(EngineSpec(command=(str(text), "{port}"), env=tag.env))
    assert error.code == "ENGINE.SPAWN_FAILED"
    assert "Exec format error" in error.detail


@pytest.mark.parametrize("status", [0, 3])
async def test_ends_at_once(tag: Tag, status: int) -> None:
    error = await fail(spec_of(tag, "--exit", str(status)))
    assert of(error) == ("ENGINE.EXITED", "port")
    assert error.data["status"] == status
    assert error.data["last_lines"] == [f"ending with {status}"]
    assert f"exit status {status}" in error.detail
    assert error.detail.endswith(f"last line: ending with {status}")
    assert ("must stay in the foreground" in error.detail) is (status == 0)
    assert tag.alive() == []


async def test_ends_at_once_every_time(tag: Tag, tmp_path: Path) -> None:
    supervisor = EngineSupervisor(
        spec_of(tag, "--exit", "3", log_dir=str(tmp_path), log_starts=2), "engine/0"
    )
    for _ in range(4):
        with pytest.raises(CodedError, match="exit status 3"):
            await supervisor.start()
    assert [one.name for one in files_in(tmp_path)] == [f"engine-0.{os.getpid()}.{n}.log" for n in (3, 4)]


async def test_daemonises(tag: Tag) -> None:
    error = await fail(spec_of(tag, "--daemonise"))
    assert error.code == "ENGINE.EXITED", "in which stage is open: its daemon may be quicker"
    assert "must stay in the foreground" in error.detail
    assert tag.alive() == [], "its daemon is gone as well"


async def test_never_binds(tag: Tag) -> None:
    error = await fail(spec_of(tag, "--never-bind", start_timeout=4.0))
    assert of(error) == ("ENGINE.START_TIMEOUT", "port")
    assert error.data["last_lines"] == ["loading for ever"]
    assert "listens" not in error.detail
    assert tag.alive() == []


async def test_binds_another_port(tag: Tag) -> None:
    with ports.reserve(()) as other:
        wrong = other.numbers["port"]
        error = await fail(spec_of(tag, "--bind-other", str(wrong), start_timeout=4.0))
    assert of(error) == ("ENGINE.START_TIMEOUT", "port")
    assert re.search(rf"not ready within 4 s; it listens on {wrong}, not on \d+; last line", error.detail)
    assert error.data["last_lines"] == [f"serving on {wrong}"]
    assert tag.alive() == []


@pytest.mark.timeout(90)
async def test_prints_without_end_and_dies(tag: Tag) -> None:
    error = await fail(spec_of(tag, "--print-bytes", HUNDRED_MB, "--exit", "5", start_timeout=60))
    assert of(error) == ("ENGINE.EXITED", "port")
    *printed, last = error.data["last_lines"]
    assert [line.strip() for line in printed] == [str(n) for n in range(999_981, 1_000_000)]
    assert last == "ending with 5"
    assert tag.alive() == []


# -- it starts, and is put up with


@pytest.mark.timeout(90)
async def test_prints_without_end_and_serves(tag: Tag) -> None:
    supervisor, _ = await serves(spec_of(tag, "--print-bytes", HUNDRED_MB, start_timeout=60))
    await supervisor.stop()
    assert tag.alive() == []


async def test_fills_the_disk_with_logs(tag: Tag, tmp_path: Path) -> None:
    flags = ("--print-bytes", "10000000")
    spec = spec_of(tag, *flags, log_dir=str(tmp_path), log_bytes=65536, log_files=3)
    supervisor, _ = await serves(spec)
    await supervisor.stop()
    name = f"engine-0.{os.getpid()}.1.log"
    files = files_in(tmp_path)
    assert [one.name for one in files] == [name, f"{name}.1", f"{name}.2"]
    assert sum(one.stat().st_size for one in files) <= 3 * 65536
    assert "serving on" in (tmp_path / name).read_text(), "the one without a number is the newest"


async def test_a_disk_that_is_full(tag: Tag, tmp_path: Path) -> None:
    """EFBIG stands for ENOSPC: no file may become larger than 256 KiB meanwhile."""
    spec = spec_of(tag, "--print-bytes", "2000000", log_dir=str(tmp_path))
    with file_size_limit(1 << 18):
        supervisor, _ = await serves(spec)
        await supervisor.stop()
    assert [one.stat().st_size for one in files_in(tmp_path)] == [1 << 18]
    assert tag.alive() == []


async def test_ignores_term(tag: Tag) -> None:
    supervisor, _ = await serves(spec_of(tag, "--ignore-term", term_timeout=0.3))
    report = await supervisor.stop()
    assert list(report.stages)[:3] == ["term", "kill", "confirm"]
    assert report.exit is not None
    assert report.exit.signal == signal.SIGKILL
    assert tag.alive() == []


async def test_a_child_that_nobody_reaps(tag: Tag) -> None:
    supervisor, pid = await serves(spec_of(tag, "--zombie-child"))
    (child,) = psutil.Process(pid).children()
    await until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    await supervisor.stop()
    assert not psutil.pid_exists(child.pid)
    assert tag.alive() == []


async def test_a_dead_engine_does_not_stay_a_zombie(tag: Tag) -> None:
    supervisor, pid = await serves(spec_of(tag))
    watching = asyncio.create_task(supervisor.watch())
    os.kill(pid, signal.SIGKILL)
    report = await asyncio.wait_for(watching, 5)
    assert report is not None
    assert report.signal == signal.SIGKILL
    assert not psutil.pid_exists(pid), "its guard has reaped it"
    assert (await supervisor.stop()).exit == report


@pytest.mark.parametrize("ignores", [(), ("--ignore-term",)])
async def test_a_zombie_that_serves(tag: Tag, ignores: tuple[str, ...]) -> None:
    """A process whose first thread has ended counts as a zombie while its other threads go on."""
    supervisor, pid = await serves(
        spec_of(tag, "--zombie", *ignores, term_timeout=0.5 if ignores else 10.0, kill_timeout=20.0)
    )
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    report = await supervisor.stop()
    assert not psutil.pid_exists(pid)
    assert report.exit is not None
    assert report.exit.signal == (signal.SIGKILL if ignores else signal.SIGTERM)
    assert report.stages.get("kill", 0.0) < 10, "the guard's own kill, not the end of its time"
