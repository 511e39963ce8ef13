"""Signal 9 names nobody: what says that it was the kernel's out-of-memory killer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from dispatch.engines.child import evidence, process
from dispatch.engines.child.evidence import Seen, look, oom_evidence
from dispatch.engines.child.process import EngineProcess
from tests.dispatch.engines.processes import SLEEP, TREE, Tag
from tests.support.cgroup import memory_cgroup_of
from tests.support.wait import until

GREEDY = """
import os, sys, time
open(os.path.join(sys.argv[1], "cgroup.procs"), "w").write(str(os.getpid()))
print("in", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
held = []
while True:
    held.append(bytearray(os.urandom(2**20)))
"""
KILLED = "Memory cgroup out of memory: Killed process {pid} (python) total-vm:78084kB, anon-rss:68220kB"
CHOSEN = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/x,task=python,pid={pid},uid=0"


@pytest.fixture
def kernel_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the device: its one read is the one record."""
    path = tmp_path / "kmsg"
    path.touch()
    monkeypatch.setattr(evidence, "KERNEL_LOG", path)
    monkeypatch.setattr(evidence, "_FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    return path


def record(text: str, seconds: float) -> str:
    return f"3,1072,{seconds * 1e6:.0f},-;{text}\n SUBSYSTEM=memory\n"


@pytest.mark.timeout(90)
async def test_a_child_that_the_kernel_kills_for_its_memory(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's worker: its parent ends of it with a status of its own."""
    monkeypatch.setattr(process, "_LOOK", 0.05)
    with memory_cgroup_of(64 * 2**20) as cgroup:
        greedy = (sys.executable, "-c", GREEDY, str(cgroup), str(tmp_path / "go"))
        engine = await EngineProcess.spawn(("sh", "-c", '"$@"; exit 0', "sh", *greedy), env=tag.env)
        await until(lambda: engine.last_lines, 20)
        (child,) = [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()]
        seen = await asyncio.to_thread(look, child)
        assert seen.cgroup == cgroup
        assert seen.kills == 0
        await until(lambda: child in engine._seen.pids)
        (tmp_path / "go").touch()
        report = await engine.wait(60)
        words = await asyncio.to_thread(oom_evidence, seen, child, engine.create_time)
        assert report.status == 0
        await engine.stop()
    assert f"1 process of memory cgroup {cgroup} killed since the start" in words
    assert "limit 64 MiB" in words
    assert "resident when last seen" in words
    if os.getuid() == 0 and os.readlink("/proc/self/ns/pid") == evidence._FIRST_NAMESPACE:
        assert f"Killed process {child} (python" in words
        assert f"Killed process {child} (python" in report.oom


@pytest.mark.timeout(90)
async def test_the_evidence_is_in_the_report(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK", 0.05)
    with memory_cgroup_of(64 * 2**20) as cgroup:
        engine = await EngineProcess.spawn(
            (sys.executable, "-c", GREEDY, str(cgroup), str(tmp_path / "go")), env=tag.env
        )
        await until(lambda: engine._seen.cgroup == cgroup)
        (tmp_path / "go").touch()
        report = await engine.wait(60)
        await engine.stop()
    assert report.signal == signal.SIGKILL
    assert report.how.startswith("signal 9 (SIGKILL); the kernel's out-of-memory killer: ")


async def test_a_kill_by_somebody_is_no_evidence(tag: Tag) -> None:
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    os.kill(engine.pid, signal.SIGKILL)
    report = await engine.wait(5)
    assert (report.oom, report.how) == ("", "signal 9 (SIGKILL)")
    await engine.stop()


async def test_a_look(tag: Tag) -> None:
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    # Its child and its grandchild are there once the shell has become the last of the three.
    await until(lambda: psutil.Process(engine.pid).name() == "sleep")
    first = look(engine.pid)
    assert engine.pid in first.pids
    assert len(first.pids) >= 2
    assert first.resident > 0
    second = look(engine.pid, Seen(first.cgroup, 5, (4_000_000,), 1))
    assert second.pids == (4_000_000, *first.pids), "one that is gone is remembered"
    assert second.kills == 5, "counted from the first look on"
    moved = look(engine.pid, Seen(Path("/another"), 5, first.pids, 1))
    assert (moved.cgroup, moved.kills, moved.pids) == (first.cgroup, first.kills, first.pids), "counted anew"
    await engine.stop()
    assert look(engine.pid, first) == first
    assert look(engine.pid) == Seen()


@pytest.mark.parametrize("text", [KILLED, CHOSEN])
@pytest.mark.parametrize(
    ("pid", "age", "found"), [(123, 5.0, True), (7, 5.0, True), (124, 5.0, False), (123, 5000.0, False)]
)
def test_the_kernels_log(
    kernel_log: Path, monkeypatch: pytest.MonkeyPatch, text: str, pid: int, age: float, found: bool
) -> None:
    """Of the engine or a process of its, and since it started. The engine runs for 100 s."""
    monkeypatch.setattr(evidence, "_DRIFT", 0.0)  # two months after a boot it is more than the age
    line = text.format(pid=pid)
    kernel_log.write_text(record(line, time.monotonic() - age))
    words = oom_evidence(Seen(pids=(123, 7)), 123, time.time() - 100)
    assert words == (f"the kernel's out-of-memory killer: {line}" if found else "")


def test_a_log_with_other_numbers(kernel_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_log.write_text(record(KILLED.format(pid=123), time.monotonic()))
    monkeypatch.setattr(evidence, "_FIRST_NAMESPACE", "pid:[0]")
    assert oom_evidence(Seen(), 123, time.time() - 100) == ""


@pytest.mark.parametrize("text", ["", "nonsense", "3,1;Killed process 123", "3,1,x,-;Killed process 123"])
def test_a_log_that_cannot_be_read(kernel_log: Path, text: str) -> None:
    kernel_log.write_text(text)
    assert oom_evidence(Seen(), 123, time.time()) == ""
    kernel_log.unlink()
    assert oom_evidence(Seen(), 123, time.time()) == ""


def test_what_a_process_calls_itself_is_no_failure_of_ours(kernel_log: Path) -> None:
    line = "Out of memory: Killed process 123 (FS1.ENGINE.EXITED.AAAAAAAA.BBBBBBBB)"
    kernel_log.write_text(record(line, time.monotonic()))
    assert "FS1:" in oom_evidence(Seen(), 123, time.time())


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"memory.events": "oom 9\noom_kill 3\n", "memory.max": "max\n"}, ""),
        (
            {"memory.events": "oom 9\noom_kill 5\n", "memory.max": "max\n", "memory.peak": "1073741824\n"},
            "2 processes of memory cgroup {} killed since the start, most used 1.0 GiB",
        ),
        (
            {"memory.oom_control": "under_oom 0\noom_kill 4\n", "memory.limit_in_bytes": "67108864\n"},
            "1 process of memory cgroup {} killed since the start, limit 64 MiB",
        ),
        (
            {"memory.oom_control": "oom_kill 4\n", "memory.limit_in_bytes": "9223372036854771712\n"},
            "1 process of memory cgroup {} killed since the start",
        ),
    ],
)
def test_the_count_of_the_cgroup(kernel_log: Path, tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    said = oom_evidence(Seen(tmp_path, 3), 123, time.time())
    assert said == (f"the kernel's out-of-memory killer: {words.format(tmp_path)}" if words else "")
    assert oom_evidence(Seen(tmp_path, None), 123, time.time()) == "", "no count to compare with"
    assert oom_evidence(Seen(tmp_path / "gone", 3), 123, time.time()) == ""


async def test_a_planned_stop_asks_nobody(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "oom_evidence", lambda *_: "evidence")
    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    report = (await engine.stop()).exit
    assert report is not None
    assert report.oom == ""
