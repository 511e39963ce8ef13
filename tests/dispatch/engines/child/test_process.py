"""One engine process: started, drained, waited for, stopped for certain (P3, P6)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from dispatch.engines.child.output import MAX_LINES
from dispatch.engines.child.process import EngineProcess
from dispatch.engines.traces.leftovers import unix_time
from dispatch.processes import is_alive
from protocol import CodedError
from tests.dispatch.engines.processes import SLEEP, STUBBORN, TREE, Tag, files_in
from tests.support.wait import until

HUNDRED_MB = "import sys\nfor n in range(1_000_000): sys.stdout.write('x' * 93 + f'{n:6}\\n')\nsys.exit(3)"


async def test_spawn_names_the_very_process(tag: Tag) -> None:
    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    await until(tag.alive)  # its environment is there a moment after its exec
    assert tag.alive() == [engine.pid]
    assert is_alive(engine.pid, engine.create_time)
    assert not is_alive(engine.pid, engine.create_time - 100), "the pid alone does not name it"
    assert engine.alive
    await engine.stop()
    assert not is_alive(engine.pid, engine.create_time)


def test_unix_time_is_psutils() -> None:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert is_alive(os.getpid(), unix_time(ticks))


async def test_term_is_enough_for_a_polite_one(tag: Tag) -> None:
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    report = await engine.stop(5, 5)
    assert list(report.stages) == ["term", "confirm", "tmp"]
    assert report.stages["term"] < 2
    assert report.exit is not None
    assert (report.exit.signal, report.exit.planned) == (15, True)
    assert tag.alive() == []


async def test_term_is_ignored(tag: Tag) -> None:
    engine = await EngineProcess.spawn(STUBBORN, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    report = await engine.stop(0.3, 5)
    assert list(report.stages) == ["term", "kill", "confirm", "tmp"]
    assert 0.25 < report.stages["term"] < 2
    assert report.stages["kill"] < 2
    assert report.exit is not None
    assert report.exit.signal == 9
    assert tag.alive() == []


async def test_stop_twice_at_once_and_after_death(tag: Tag) -> None:
    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    first, second = await asyncio.gather(engine.stop(), engine.stop())
    assert first is second
    assert await engine.stop() is first
    dead = await EngineProcess.spawn(("false",), env=tag.env)
    report = await dead.wait(5)
    assert (report.status, report.planned) == (1, False)
    assert list((await dead.stop()).stages) == ["confirm", "tmp"]


async def test_stopped_by_a_signal(tag: Tag) -> None:
    """CONT follows TERM, so a frozen engine needs no KILL."""
    engine = await EngineProcess.spawn(TREE, env=tag.env)
    os.kill(engine.pid, signal.SIGSTOP)
    assert (await engine.stop(5, 5)).stages["term"] < 2
    assert tag.alive() == []


async def test_cancelled_stop_leaves_nothing(tag: Tag) -> None:
    engine = await EngineProcess.spawn(STUBBORN, env=tag.env)
    await until(lambda: len(tag.alive()) == 3)
    stopping = asyncio.create_task(engine.stop(60, 5))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await until(lambda: tag.alive() == [], 5)


@pytest.mark.parametrize("after", [0.0, 0.002, 0.01, 0.02, 0.03])
async def test_cancelled_spawn_leaves_nothing(tag: Tag, after: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after):
            engine = await EngineProcess.spawn(TREE, env=tag.env)
            await engine.stop()
    await until(lambda: tag.alive() == [], 5)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("/no/such/engine",), "/no/such/engine: No such file or directory"),
        (("no-such-engine",), "no-such-engine: No such file or directory"),
        (("/etc/passwd",), "/etc/passwd: Permission denied"),
        (("/",), "/: Permission denied"),
    ],
)
async def test_a_command_that_cannot_be_run(argv: tuple[str, ...], why: str) -> None:
    with pytest.raises(CodedError) as caught:
        await EngineProcess.spawn(argv)
    assert caught.value.code == "ENGINE.SPAWN_FAILED"
    assert why in caught.value.detail
    assert caught.value.data["errno"] > 0
    assert not caught.value.data["transient"]


async def test_a_program_that_is_being_written(tmp_path: Path) -> None:
    """ETXTBSY (execve(2)): a moment later it can be run, as with a lack of memory, processes or room."""
    program = tmp_path / "sleep"
    shutil.copy("/bin/sleep", program)
    with program.open("ab"), pytest.raises(CodedError, match="Text file busy") as caught:
        await EngineProcess.spawn((str(program), "1000"))
    assert (caught.value.code, caught.value.data["transient"]) == ("ENGINE.SPAWN_FAILED", True)


async def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(CodedError, match="/no/such/folder") as caught:
        await EngineProcess.spawn(SLEEP, cwd="/no/such/folder")
    assert caught.value.code == "ENGINE.SPAWN_FAILED"


async def test_a_log_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CodedError, match="File exists") as caught:
        await EngineProcess.spawn(SLEEP, log_path=tmp_path / "file" / "log")
    assert caught.value.code == "ENGINE.SPAWN_FAILED"


async def test_a_guard_that_does_not_start_in_time(monkeypatch: pytest.MonkeyPatch, tag: Tag) -> None:
    monkeypatch.setattr(
        sys, "executable", "/bin/cat"
    )  # reads /dev/null and the arguments: ends, says nothing
    with pytest.raises(CodedError, match="guard ended before") as caught:
        await EngineProcess.spawn(SLEEP, env=tag.env)
    assert (caught.value.code, caught.value.data["transient"]) == ("ENGINE.SPAWN_FAILED", True)
    monkeypatch.undo()
    with pytest.raises(CodedError, match="did not start it within") as caught:
        await EngineProcess.spawn(SLEEP, env=tag.env, timeout=0.0)
    assert caught.value.data["transient"], "a machine that is too busy now is not so for ever"
    await until(lambda: tag.alive() == [], 5)


async def test_hundred_megabytes_nobody_asked_for(tag: Tag, tmp_path: Path) -> None:
    engine = await EngineProcess.spawn(
        (sys.executable, "-c", HUNDRED_MB), env=tag.env, log_path=tmp_path / "log"
    )
    beats = 0

    async def heartbeat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    beat = asyncio.create_task(heartbeat())
    report = await engine.wait(40)
    beat.cancel()
    assert report.status == 3
    assert len(report.last_lines) == MAX_LINES
    assert report.last_lines[-1] == "x" * 93 + "999999"
    assert [one.name for one in files_in(tmp_path)] == ["log", "log.1"]
    assert sum(one.stat().st_size for one in files_in(tmp_path)) == 100_000_000
    assert beats > 20, "the loop goes on meanwhile: between the hundred reads at least"
    await engine.stop()


async def test_last_lines(tag: Tag) -> None:
    script = (
        "import sys; print('FS1.ENGINE.EXITED.AAAAAAAA.BBBBBBBB'); "
        "print('y' * 5000); sys.stderr.write('no end')"
    )
    engine = await EngineProcess.spawn((sys.executable, "-c", script), env=tag.env)
    token, long, end = (await engine.wait(10)).last_lines
    assert token.startswith("FS1:"), "what an engine prints is no failure of ours"
    assert "4000 characters cut" in long
    assert end == "no end"
    await engine.stop()


async def test_no_key_of_ours_goes_along(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILSOFT_KEY", "secret")
    monkeypatch.setenv("FAILSOFT_RUN", "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    engine = await EngineProcess.spawn(("env",), env=tag.env)
    lines = (await engine.wait(5)).last_lines
    ours = {line.partition("=")[0] for line in lines if "FAILSOFT" in line}
    assert ours == {"FAILSOFT_ENGINE", "FAILSOFT_ERROR_FILE"}
    assert f"FAILSOFT_ENGINE={engine.marker}" in lines
    assert "CUDA_VISIBLE_DEVICES=3" in lines
    await engine.stop()


async def test_odd_arguments_arrive_unchanged(tag: Tag) -> None:
    odd = ("a b", "{x}", '"', "ü", "\udcff", "")
    script = "import sys; print([a.encode('utf-8', 'surrogateescape') for a in sys.argv[1:]])"
    engine = await EngineProcess.spawn((sys.executable, "-c", script, *odd), env=tag.env)
    report = await engine.wait(10)
    assert report.last_lines == (str([text.encode("utf-8", "surrogateescape") for text in odd]),)
    await engine.stop()


async def test_nothing_is_left_open(tag: Tag) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once() -> None:
        engine = await EngineProcess.spawn(("true",), env=tag.env)
        await engine.wait(5)
        await engine.stop()
        with pytest.raises(CodedError):
            await EngineProcess.spawn(("/no/such/engine",), env=tag.env)

    await once()
    before = descriptors()
    for _ in range(3):
        await once()
    await until(lambda: descriptors() <= before, what="threads that look at processes have ended")
