"""What an engine leaves behind beside processes: its temporary directory, shared memory, its error file;
and the stages of a stop in which that is seen to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from dispatch.engines.child import guard, process
from dispatch.engines.child.ports import Reserved
from dispatch.engines.child.process import EngineProcess
from dispatch.engines.traces import owned, private, shm
from protocol import CodedError
from tests.dispatch.engines.processes import SEGMENT, SLEEP, TREE, Tag
from tests.support.wait import until


def directory_of(engine: EngineProcess) -> Path:
    return Path(tempfile.gettempdir()) / f"failsoft-engine-{engine.marker}"


def segment(name: str) -> bool:
    return os.path.lexists(f"/dev/shm/{name}")


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


# -- the private temporary directory ---------------------------------------------------------------


async def test_a_directory_of_its_own_gone_with_it(tag: Tag) -> None:
    litter = (
        "import os, socket, tempfile, time\n"
        "d = tempfile.mkdtemp(); print(d); os.symlink('/etc', d + '/etc'); os.mkfifo(d + '/fifo')\n"
        "socket.socket(socket.AF_UNIX).bind(d + '/socket'); os.mkdir(d + '/closed')\n"
        "open(d + '/closed/file', 'w').close(); os.chmod(d + '/closed', 0); print('littered', flush=True)\n"
        "time.sleep(1000)"
    )
    engine = await EngineProcess.spawn(python(litter), env=tag.env)
    path = directory_of(engine)
    await until(lambda: "littered" in engine.last_lines)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert engine.last_lines[0].startswith(str(path))
    assert len(str(path)) < 60, "what is put into it may be the path of a socket, 107 bytes at most"
    os.kill(engine.pid, signal.SIGKILL)
    await engine.wait(10)
    report = await engine.stop()
    assert list(report.stages) == ["confirm", "tmp"]
    assert not path.exists()
    assert os.listdir("/etc"), "links in it were not followed"


async def test_its_own_tmpdir_or_none_wanted(tag: Tag, tmp_path: Path) -> None:
    show = python("import os; print(os.environ.get('TMPDIR'), os.environ.get('FAILSOFT_ERROR_FILE'))")
    for fields in ({"env": {**tag.env, "TMPDIR": str(tmp_path)}}, {"env": tag.env, "private_tmp": False}):
        engine = await EngineProcess.spawn(show, **fields)
        report = await engine.wait(10)
        assert report.last_lines == (f"{fields['env'].get('TMPDIR', os.environ.get('TMPDIR'))} None",)
        assert list((await engine.stop()).stages) == ["confirm"]


async def test_ray_is_looked_for_where_it_was(tag: Tag) -> None:
    show = python("from ray._common.utils import get_default_ray_temp_dir; print(get_default_ray_temp_dir())")
    engine = await EngineProcess.spawn(show, env=tag.env)
    report = await engine.wait(30)
    assert report.last_lines == (os.path.join(os.environ.get("TMPDIR", "/tmp"), "ray"),)
    await engine.stop()


async def test_a_directory_that_cannot_be_made(
    tag: Tag, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owned, "temporary_folder", lambda: "/proc")
    engine = await EngineProcess.spawn(python("import os; print(os.environ.get('TMPDIR'))"), env=tag.env)
    report = await engine.wait(10)
    assert report.status == 0
    assert report.last_lines == (str(os.environ.get("TMPDIR")),)
    assert "private temporary directory: " in caplog.text
    await engine.stop()


async def test_a_directory_that_cannot_be_removed(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(16, "Device or resource busy", path)

    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    path = directory_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(private, "remove", refuse)  # before: with the guard lost, it is removed unasked
        os.kill(engine.guard_pid, signal.SIGKILL)
        await until(lambda: not engine.alive)
        with pytest.raises(CodedError, match=rf"stage tmp: .*busy.*{path}") as caught:
            await engine.stop()
        assert caught.value.code == "ENGINE.STOP_FAILED"
        assert caught.value.data["stage"] == "tmp"
        assert list(caught.value.data["stages"]) == ["confirm", "tmp"]
        assert path.exists()
    assert list((await engine.stop()).stages) == ["confirm", "tmp"], "tried again"
    assert not path.exists()


async def test_guard_killed_and_nobody_asks_for_a_stop(tag: Tag) -> None:
    engine = await EngineProcess.spawn(python(SEGMENT), env=tag.env)
    await until(lambda: engine.last_lines)
    name = engine.last_lines[0]
    await until(lambda: name in engine._traces.shm)
    os.kill(engine.guard_pid, signal.SIGKILL)
    assert (await engine.wait(5)).guard_lost
    await until(lambda: not directory_of(engine).exists() and not segment(name))
    await engine.stop()


async def test_a_start_that_fails_leaves_no_directory(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        EngineProcess,
        "_launch",
        lambda self, *_, of=EngineProcess._launch: (made.append(self._traces.tmp), of(self, *_)),
    )
    with pytest.raises(CodedError):
        await EngineProcess.spawn(("/no/such/engine",), env=tag.env)
    with pytest.raises(CodedError):
        await EngineProcess.spawn(SLEEP, env=tag.env, timeout=0.0)
    assert len(made) == 2
    await until(lambda: not any(map(os.path.lexists, made)), 5)


# -- shared memory ---------------------------------------------------------------------------------


async def test_segments_of_a_killed_engine(tag: Tag) -> None:
    engine = await EngineProcess.spawn(python(SEGMENT), env=tag.env)
    await until(lambda: engine.last_lines)
    (name,) = engine.last_lines
    await until(lambda: name in engine._traces.shm, what="seen while it lives")
    os.kill(engine.pid, signal.SIGKILL)
    await engine.wait(10)
    report = await engine.stop()
    assert list(report.stages) == ["confirm", "shm", "tmp"]
    assert not segment(name)


async def test_the_last_look_comes_before_the_kill(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies; a child of it, at which nobody has looked so far, is killed by the guard."""
    guard_with(monkeypatch, tmp_path, "guard.LOOK = 1000\nguard.shm.open_watch = lambda directory: -1")
    script = f"import os, signal, time\nif os.fork(): time.sleep(1000)\n{SEGMENT}"
    engine = await EngineProcess.spawn(python(script), env=tag.env)
    await until(lambda: engine.last_lines)
    os.kill(engine.pid, signal.SIGKILL)
    await engine.wait(10)
    await engine.stop()
    assert not segment(engine.last_lines[0])


async def test_a_segment_shared_with_somebody_who_lives_stays(tag: Tag) -> None:
    engine = await EngineProcess.spawn(python(SEGMENT), env=tag.env)
    await until(lambda: engine.last_lines)
    name = engine.last_lines[0]
    await until(lambda: name in engine._traces.shm)
    shared = os.open(f"/dev/shm/{name}", os.O_RDONLY)
    assert list((await engine.stop(0)).stages)[-3:] == ["confirm", "shm", "tmp"]
    assert segment(name)
    os.close(shared)
    os.unlink(f"/dev/shm/{name}")


async def test_segments_of_others_stay(tag: Tag) -> None:
    """Fresh ones, of a program that is gone already: nobody of the tree had them."""
    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    name = f"failsoft-test-{tag.text}"
    touch(name)
    await asyncio.sleep(0.2)
    await engine.stop()
    assert segment(name)
    os.unlink(f"/dev/shm/{name}")


def touch(name: str) -> None:
    os.close(os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_WRONLY))


async def test_without_inotify_the_slow_looks_do(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard_with(monkeypatch, tmp_path, "guard.shm.open_watch = lambda directory: -1")
    engine = await EngineProcess.spawn(python(SEGMENT), env=tag.env)
    await until(lambda: engine.last_lines and engine.last_lines[0] in engine._traces.shm, 15)
    await engine.stop()
    assert not segment(engine.last_lines[0])


async def test_a_look_that_fails_stops_nothing(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guard_with(monkeypatch, tmp_path, "guard.shm.Watch.look = lambda *_, **__: 1 / 0")
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    os.kill(engine.pid, signal.SIGKILL)
    await engine.wait(10)
    await until(lambda: not tag.alive(), 5)
    await engine.stop()
    assert "last look: ZeroDivisionError" in caplog.text


def guard_with(monkeypatch: pytest.MonkeyPatch, folder: Path, change: str) -> None:
    """Engines get a guard that is ours but for ``change``."""
    path = folder / "guard.py"
    beside = str(Path(guard.__file__).parent)
    path.write_text(
        f"import sys, time\nsys.path.insert(0, {beside!r})\nimport guard\n"
        f"{change}\nguard.main(sys.argv[1:])\n"
    )
    monkeypatch.setattr(process, "_GUARD", str(path))


async def test_system_v_segments(tag: Tag) -> None:
    script = (
        "import ctypes, time\nlibc = ctypes.CDLL(None)\nid = libc.shmget(0, 4096, 0o1600)\n"
        "libc.shmat.restype = ctypes.c_void_p\nlibc.shmat(id, None, 0)\n"
        "print(id, flush=True)\ntime.sleep(1000)"
    )
    engine = await EngineProcess.spawn(python(script), env=tag.env)
    await until(lambda: engine.last_lines)
    segment = int(engine.last_lines[0])
    assert shm.sysv_table()[segment] == (engine.pid, 1)
    await engine.stop()
    assert segment not in shm.sysv_table()


# -- the error file --------------------------------------------------------------------------------

RAISES = """
import os
from protocol import CodedError
from protocol.carriers.child import ERROR_FILE, install
install(os.environ[ERROR_FILE])
raise CodedError("WEIGHTS.STALE" if False else "TASK.FAILED", "the shard is not there", {"shard": 7})
"""


@pytest.mark.parametrize("guard_killed", [False, True])
async def test_the_failure_that_an_engine_leaves(tag: Tag, guard_killed: bool) -> None:
    engine = await EngineProcess.spawn(
        python(RAISES.replace("\nraise", "\nimport time; time.sleep(0.5)\nraise")), env=tag.env
    )
    if guard_killed:
        os.kill(engine.guard_pid, signal.SIGSTOP)
        await until(lambda: (directory_of(engine) / private.ERROR_FILE).exists())
        os.kill(engine.guard_pid, signal.SIGKILL)
    report = await engine.wait(20)
    assert report.failure is not None
    assert report.failure["code"] == "TASK.FAILED"
    assert report.failure["detail"] == "the shard is not there"
    assert report.failure["data"] == {"shard": 7}
    assert report.failure["origin"]["pid"] == engine.pid
    json.dumps(report.failure)
    await engine.stop()
    assert not directory_of(engine).exists()


async def test_the_runner_takes_the_path_from_the_environment(tag: Tag, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise MemoryError('no room')")
    engine = await EngineProcess.spawn(
        (sys.executable, "-m", "protocol.carriers.child", str(program)), env=tag.env
    )
    report = await engine.wait(20)
    assert report.failure is not None
    assert report.failure["code"] == "NODE.OUT_OF_MEMORY"
    await engine.stop()


@pytest.mark.parametrize(
    "body",
    [
        "open(path, 'w').write('{half')",
        "open(path, 'w').write('{}')",
        "open(path, 'w').write('x' * 300_000)",
        "os.mkfifo(path)",
        "os.symlink('/etc/passwd', path)",
        "os.mkdir(path)",
        "pass",
    ],
)
async def test_no_well_formed_error_file(tag: Tag, body: str) -> None:
    engine = await EngineProcess.spawn(
        python(f"import os, sys; path = os.environ['FAILSOFT_ERROR_FILE']; {body}; sys.exit(3)"), env=tag.env
    )
    report = await engine.wait(10)
    assert (report.status, report.failure) == (3, None)
    await engine.stop()
    assert not directory_of(engine).exists()


# -- stages ----------------------------------------------------------------------------------------


async def test_reserved_ports_are_the_guards_until_it_ends(tag: Tag) -> None:
    ours, theirs = socket.socketpair()
    with ours, Reserved({"port": 1}, [theirs]) as reserved:
        engine = await EngineProcess.spawn(
            ("sh", "-c", "ls /proc/self/fd | tr '\\n' ' '; exec sleep 1000"), env=tag.env, reserved=reserved
        )
        reserved.release()
        ours.setblocking(False)
        await until(lambda: engine.last_lines)
        assert engine.last_lines[0].split() == ["0", "1", "2", "3"], "3 is ls's own"
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        report = await engine.stop()
        assert list(report.stages) == ["term", "confirm", "ports", "tmp"]
        async with asyncio.timeout(5):
            assert await asyncio.get_running_loop().sock_recv(ours, 1) == b""


async def test_somebody_listens_on_its_port(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "PORTS_TIMEOUT", 2.0)
    listen = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(1000)"
    )
    before = await EngineProcess.spawn(python(listen), env=tag.env)
    await until(lambda: before.last_lines)
    older = int(before.last_lines[0])
    engine = await EngineProcess.spawn(SLEEP, env=tag.env, reserved=Reserved({"port": older}))
    engine.create_time += 2  # boot time is known to a second or so
    assert "ports" in (await engine.stop()).stages, "another program's, and older"
    engine = await EngineProcess.spawn(SLEEP, env=tag.env, reserved=Reserved({"port": older}))
    engine.create_time -= 100
    monkeypatch.setattr(process, "is_alive", lambda *_: False)
    with pytest.raises(CodedError, match=f"stage ports: somebody listens on {older}") as caught:
        await engine.stop()
    assert caught.value.data["pids"] == [before.pid]
    assert list(caught.value.data["stages"]) == ["term", "confirm", "ports", "tmp"], "the others have run"
    assert not directory_of(engine).exists()
    await before.stop()
    assert (await engine.stop()).stages.keys() == {"confirm", "ports", "tmp"}


async def test_a_process_that_cannot_be_killed(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stays(marker: str, timeout: float, known: object) -> list[int]:
        return [4711]

    engine = await EngineProcess.spawn(TREE, env=tag.env)
    with monkeypatch.context() as patch:
        patch.setattr(process, "sweep", stays)
        with pytest.raises(CodedError, match=r"stage confirm: .*4711") as caught:
            await engine.stop()
    assert caught.value.data["stage"] == "confirm"
    assert caught.value.data["pids"] == [4711]
    assert list((await engine.stop()).stages) == ["confirm", "tmp"]


async def test_a_guard_that_does_nothing(tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for one that hangs in the kernel: it starts the engine, and then neither kills nor removes."""
    guard_with(monkeypatch, tmp_path, "guard.Guard.serve = lambda self: time.sleep(1000)")
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    began = time.monotonic()
    report = await engine.stop(0.1, 2.0)
    assert list(report.stages) == ["term", "kill", "confirm", "tmp"]
    assert time.monotonic() - began < 15
    assert tag.alive() == []
    assert not directory_of(engine).exists()


async def test_a_guard_that_hangs_while_it_removes(
    tag: Tag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard_with(monkeypatch, tmp_path, "guard.private.remove = lambda path: time.sleep(1000)")
    monkeypatch.setattr(owned, "REMOVAL_TIMEOUT", 0.5)
    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    report = await engine.stop()
    assert 0.4 < report.stages["tmp"] < 5
    assert not directory_of(engine).exists()


async def test_zombies_that_their_parent_does_not_reap(tag: Tag) -> None:
    script = (
        "import os, time\nif os.fork() == 0:\n    os._exit(0)\nprint('made', flush=True)\ntime.sleep(1000)"
    )
    engine = await EngineProcess.spawn(python(script), env=tag.env)
    await until(lambda: engine.last_lines)
    assert list((await engine.stop(0)).stages)[-2:] == ["confirm", "tmp"]


async def test_a_quiet_guard_costs_nothing_and_a_busy_dev_shm_little(tag: Tag) -> None:
    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    one = psutil.Process(engine.guard_pid)
    await asyncio.sleep(1.0)  # the first look is over
    for _ in range(10):  # other tests may use /dev/shm at the same time, though not all the time
        before = sum(one.cpu_times()[:2])
        await asyncio.sleep(1.0)
        quiet = sum(one.cpu_times()[:2]) - before
        if quiet < 0.05:
            break
    began = time.monotonic()
    name = f"failsoft-test-{tag.text}"
    while time.monotonic() < began + 1.5:
        for _ in range(100):
            touch(name)
            os.unlink(f"/dev/shm/{name}")
        await asyncio.sleep(0)
    busy = sum(one.cpu_times()[:2]) - before - quiet
    assert quiet < 0.05
    assert busy < 0.2 * (time.monotonic() - began), "a twentieth of a core, a look, and ticks of 10 ms"
    await engine.stop()
