"""Whoever dies, and however: nothing of the engine is left (P1, P2)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dispatch.engines.child import guard
from dispatch.engines.child.process import EngineProcess
from dispatch.engines.traces import leftovers, private
from dispatch.engines.traces.leftovers import Orphans, end_orphans, orphans, sweep
from dispatch.engines.traces.owned import Traces
from dispatch.processes import is_alive
from tests.dispatch.engines.processes import SEGMENT, SLEEP, TREE, Tag
from tests.support.full_disk import file_size_limit
from tests.support.wait import until, until_sync

OWNER = """
import asyncio, sys
from dispatch.engines.child.process import EngineProcess
async def main():
    engine = await EngineProcess.spawn(sys.argv[2:], env={"TEST_TAG": sys.argv[1]})
    print(engine.pid, engine.guard_pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


HELD = "held = bytearray(400 << 20)"
"""Memory that takes a while to be freed: meanwhile a killed process has no marker, and its files still."""


@contextmanager
def owner(tag: Tag, *argv: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Another process that owns an engine; it, the engine's pid, the guard's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, tag.text, *argv], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        engine, guarded_by = process.stdout.readline().split()
        yield process, int(engine), int(guarded_by)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_owner_killed(tag: Tag) -> None:
    with owner(tag, *TREE) as (process, _, guard_pid):
        until_sync(lambda: len(tag.alive()) == 3, what="engine, child, grandchild")
        began = time.monotonic()
        process.kill()
        process.wait()
        until_sync(lambda: not tag.alive(), 5)
        assert time.monotonic() - began < 5
        until_sync(lambda: not psutil.pid_exists(guard_pid) or is_zombie(guard_pid), 5, "the guard ends too")


def test_owner_killed_and_what_its_engine_left(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with owner(tag, sys.executable, "-c", SEGMENT) as (process, _, _):
        (path,) = tmp_path.iterdir()
        until_sync(lambda: private.noted(str(path))[0], what="the segment is seen")
        (name,) = private.noted(str(path))[0]
        assert Path("/dev/shm", name).exists()
        process.kill()
        process.wait()
        until_sync(lambda: not Path("/dev/shm", name).exists() and not path.exists(), 5)
        assert tag.alive() == []


@pytest.fixture
def only_ours(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orphans of this test alone: other tests may be running on this machine."""
    every = leftovers._marked
    monkeypatch.setattr(leftovers, "_marked", lambda: [one for one in every() if one.pid in tag.alive()])


@pytest.mark.usefixtures("only_ours")
def test_owner_and_guard_killed(tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with owner(tag, *SLEEP) as (process, _, guard_pid):
        kill_both(process, guard_pid)
        until_sync(lambda: not tag.alive(), 5, "the parent-death signal ends the engine")
    assert len(orphans(str(tmp_path)).directories) == 1
    assert asyncio.run(end_orphans(5, str(tmp_path))) == Orphans()
    assert list(tmp_path.iterdir()) == []


def kill_both(process: subprocess.Popen[str], guard_pid: int) -> None:
    os.kill(guard_pid, signal.SIGSTOP)  # so that it cannot act on the owner's death
    process.kill()
    process.wait()
    os.kill(guard_pid, signal.SIGKILL)


@pytest.mark.usefixtures("only_ours")
def test_descendants_of_an_owner_and_guard_killed_at_once(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal reaches them; they are found by their marker, and so is what they left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = f"setsid {sys.executable} -c '{HELD}{SEGMENT}' & exec sleep 1000"
    with owner(tag, "sh", "-c", script) as (process, _, guard_pid):
        until_sync(lambda: len(tag.alive()) == 2)
        (path,) = tmp_path.iterdir()
        until_sync(lambda: private.noted(str(path))[0], what="the segment is noted")
        assert orphans(str(tmp_path)) == Orphans(), "they have a guard"
        (name,) = private.noted(str(path))[0]
        kill_both(process, guard_pid)
        until_sync(lambda: len(tag.alive()) == 1, 5, "the engine itself is gone")
        found = orphans(str(tmp_path))
        (one,) = found.processes
        assert [one.pid] == tag.alive()
        assert one.command[0] == sys.executable
        assert is_alive(one.pid, one.create_time)
        assert path.name == f"failsoft-engine-{one.marker}"
        assert found.directories == (), "as long as there are processes that may use it"
        assert Path("/dev/shm", name).exists()
        assert asyncio.run(end_orphans(5, str(tmp_path))) == Orphans()
        assert tag.alive() == []
        assert not Path("/dev/shm", name).exists()
        assert not path.exists()


def test_directories_without_anybody(tmp_path: Path) -> None:
    folder = str(tmp_path)
    left, locked = tmp_path / ("failsoft-engine-" + "a" * 16), tmp_path / ("failsoft-engine-" + "b" * 16)
    left.mkdir()
    lock = private.make(str(locked))  # as of a guard that this pid namespace does not show
    (tmp_path / ("failsoft-engine-" + "c" * 16)).symlink_to("/etc")
    (tmp_path / ("failsoft-engine-" + "d" * 16)).touch()
    (tmp_path / "other").mkdir()
    assert orphans(folder).directories == (str(left),)
    asyncio.run(end_orphans(5, folder))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["b", "c", "d", "r"]
    os.close(lock)
    assert orphans(folder).directories == (str(locked),)


def test_a_full_disk_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps no engine from its start. EFBIG stands for ENOSPC."""
    left = tmp_path / ("failsoft-engine-" + "a" * 16)
    left.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # as in a process that has not asked yet
    with file_size_limit(0):
        assert orphans().directories == (str(left),)
        assert Path(Traces("b" * 16, {}, private_tmp=True).tmp).parent == tmp_path


def test_what_cannot_be_removed_is_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(16, "busy", path)

    monkeypatch.setattr(private, "remove", refuse)
    (tmp_path / ("failsoft-engine-" + "a" * 16)).mkdir()
    assert asyncio.run(end_orphans(0.05, str(tmp_path))).directories == (
        str(tmp_path / ("failsoft-engine-" + "a" * 16)),
    )


def test_a_note_that_the_engine_has_spoilt(tmp_path: Path) -> None:
    directory = str(tmp_path)
    private.note(directory, {"a": 1}, {5: 6})
    with (tmp_path / private.SEGMENTS).open("a") as file:
        file.write('{half\n[]\n{"names": {"../x": 1, "b": 2}, "sysv": {"7": "8"}}\n')
        file.write('{"names": {"c": null}, "sysv": {}}\n')
    assert private.noted(directory) == ({"a": 1, "b": 2}, {5: 6, 7: 8})
    (tmp_path / private.SEGMENTS).unlink()
    os.mkfifo(tmp_path / private.SEGMENTS)
    assert private.noted(directory) == ({}, {})
    with pytest.raises(OSError, match="No such device"):
        private.note(directory, {"a": 1}, {})


async def test_engine_killed(tag: Tag) -> None:
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    os.kill(engine.pid, signal.SIGKILL)
    report = await engine.wait(5)
    assert (report.signal, report.status, report.planned) == (9, None, False)
    await until(lambda: not tag.alive(), 5, "grandchildren in their own session included")


async def test_guard_killed(tag: Tag) -> None:
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    os.kill(engine.guard_pid, signal.SIGKILL)
    report = await engine.wait(5)
    assert report.guard_lost
    assert report.status is None
    assert report.signal is None
    assert not engine.alive
    await until(lambda: not tag.alive(), 5, "swept by the marker")
    await engine.stop()


BARE = ("sh", "-c", "env -i setsid sleep 1004 & exec sleep 1005")
"""An engine with a child in a session of its own and without an environment."""


async def test_guard_killed_and_a_process_without_the_marker(tag: Tag) -> None:
    """No signal reaches it and its environment is empty; the guard has told of it before."""
    engine = await EngineProcess.spawn(BARE, env=tag.env)
    child = await _child_that_is_known(engine)
    assert child.pid not in tag.alive()
    os.kill(engine.guard_pid, signal.SIGKILL)
    assert (await engine.wait(5)).guard_lost
    await engine.stop()
    assert not is_alive(child.pid, child.create_time())


async def test_guard_frozen_and_a_process_without_the_marker(tag: Tag) -> None:
    engine = await EngineProcess.spawn(BARE, env=tag.env)
    child = await _child_that_is_known(engine)
    os.kill(engine.guard_pid, signal.SIGSTOP)
    await engine.stop(0.1, 2.0)
    assert not is_alive(child.pid, child.create_time())


async def _child_that_is_known(engine: EngineProcess) -> psutil.Process:
    """The engine's child, once it runs what it is to run and the guard has told its owner of it."""
    found: list[psutil.Process] = []

    def known() -> bool:
        found[:] = psutil.Process(engine.pid).children()
        return any(one.name() == "sleep" and one.pid in dict(engine._traces.tree) for one in found)

    await until(known)
    return found[0]


async def test_guard_told_to_end(tag: Tag) -> None:
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    os.kill(engine.guard_pid, signal.SIGTERM)
    assert (await engine.wait(5)).signal == 9
    await until(lambda: not tag.alive(), 5)


async def test_guard_frozen(tag: Tag) -> None:
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    os.kill(engine.guard_pid, signal.SIGSTOP)
    report = await engine.stop(0.1, 2.0)
    assert list(report.stages) == ["term", "kill", "confirm", "tmp"]
    assert tag.alive() == []
    await until(lambda: is_zombie(engine.guard_pid) or not psutil.pid_exists(engine.guard_pid), 5)


async def test_guard_frozen_and_the_engine_takes_a_while_to_end(tag: Tag) -> None:
    script = f"import time; {HELD}; print('held', flush=True); time.sleep(1000)"
    engine = await EngineProcess.spawn((sys.executable, "-c", script), env=tag.env)
    await until(lambda: engine.last_lines)
    os.kill(engine.guard_pid, signal.SIGSTOP)
    report = await engine.stop(0.1, 2.0)
    assert list(report.stages) == ["term", "kill", "confirm", "tmp"]
    assert not is_alive(engine.pid, engine.create_time)


async def test_sweep_leaves_other_engines_alone(tag: Tag) -> None:
    one = await EngineProcess.spawn(SLEEP, env=tag.env)
    other = await EngineProcess.spawn(SLEEP, env=tag.env)
    assert await sweep(one.marker, 5) == []
    assert (await one.wait(5)).signal == 9
    assert other.alive
    assert tag.alive() == [other.pid]
    await asyncio.gather(one.stop(), other.stop())


LIBC = 1 << 31 | 1 << 32
"""Signals 32 and 33 in proc(5)'s masks: the C library's own, which no program can set."""


@pytest.mark.parametrize("ignored_here", [signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP])
async def test_what_the_engine_inherits(tag: Tag, ignored_here: signal.Signals) -> None:
    before = signal.signal(ignored_here, signal.SIG_IGN)
    try:
        await _inherits(tag)
    finally:
        signal.signal(ignored_here, before)


async def _inherits(tag: Tag) -> None:
    script = (
        "ls /proc/self/fd | tr '\\n' ' '; echo; "
        "grep -E 'SigBlk|SigIgn' /proc/self/status; ps -o pid=,pgid=,sid= $$"
    )
    engine = await EngineProcess.spawn(("sh", "-c", script), env=tag.env)
    report = await engine.wait(5)
    descriptors, blocked, ignored, ids = report.last_lines
    assert descriptors.split() == ["0", "1", "2", "3"], "3 is ls's own; no pipe of the guard's"
    assert int(blocked.split()[1], 16) == 0
    assert int(ignored.split()[1], 16) & ~LIBC == 0, "what Python or the owner ignores, its child must not"
    assert set(ids.split()) == {str(engine.pid)}, "a process group and a session of its own"
    await engine.stop()


async def test_signals_blocked_by_the_owner_are_not_blocked_in_the_engine(tag: Tag) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    report = await engine.stop(5, 5)
    assert report.exit is not None
    assert report.exit.signal == 15


def test_linux_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert guard.main(["0", "0", "0"]) == 78
    assert capsys.readouterr().err.count("\n") == 1


def is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
