"""The job's beginning and end, without Ray in between: what a whole run seldom meets there."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from chaos import Injury
from failsoft.job import run as running
from failsoft.job.breakage import break_things
from failsoft.job.run import Job
from failsoft.job.settings import Settings
from failsoft.job.view import standard_output
from protocol import CodedError, Events
from tests.failsoft.command import prompts_file


def test_ctrl_c_while_the_last_alerts_are_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is done then: the summary is written, and the status is the run's."""
    told = io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes an alert, and never answers
        settings = Settings(
            prompts=prompts_file(tmp_path / "prompts.jsonl", 1),
            out=tmp_path / "out",
            webhooks=(f"http://127.0.0.1:{silent.getsockname()[1]}/",),
        )
        job = Job(settings, Console(file=told, width=200))

        async def work(*arguments: Any) -> int:
            arguments[-1].emit("poster.died", level="warning", code="ACTOR.DIED", key="poster/0")
            asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGINT)
            return 0

        monkeypatch.setattr(job, "_work", work)
        assert asyncio.run(job.go()) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["exit"] == 0
    assert summary["alerts"] == ["alert poster-died fired for poster/0 (ACTOR.DIED), still firing"]
    assert "SIGINT: stopping" in told.getvalue()
    assert "result" in told.getvalue()


@pytest.mark.parametrize("gone", ["its reader", "the disk's space"])
def test_a_run_goes_on_when_nobody_can_see_it(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``failsoft rollout … | head -1``, and where standard output is on a disk that fills up."""
    if gone == "its reader":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    settings = Settings(prompts=prompts_file(tmp_path / "prompts.jsonl", 1), out=tmp_path / "out")
    with open(writing, "w") as output:  # closing it fails, were anything left in its buffer
        monkeypatch.setattr(sys, "stdout", output)
        job = Job(settings, standard_output())

        async def work(*arguments: Any) -> int:
            job.console.print("starting")
            return 0

        monkeypatch.setattr(job, "_work", work)
        assert asyncio.run(job.go()) == 0
        monkeypatch.undo()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["exit"] == 0


def test_resuming_with_other_prompts_under_the_same_ids_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ids of their own, prompts are known by their lines: one more at the top moves them all."""

    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    out.mkdir()
    held = '{"prompt_id":"line-000001","index":0,"prompt":"one"}\n'
    (out / "samples.jsonl").write_text(held)

    async def resumed(*prompts: str) -> int:
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        job = Job(Settings(prompts=file, out=out, mode="resume"), Console(file=io.StringIO()))

        async def work(*arguments: Any) -> int:
            return 0

        monkeypatch.setattr(job, "_work", work)
        return await job.go()

    with pytest.raises(CodedError, match=r"'line-000001' is another prompt .*; resume with") as caught:
        asyncio.run(resumed("zero", "one"))
    assert caught.value.code == "CONFIG.INVALID"
    assert (out / "samples.jsonl").read_text() == held
    assert asyncio.run(resumed("one", "two")) == 0  # more of them below move nobody


def test_an_events_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """Linked to another disk, for instance, whose folder is gone."""
    settings = Settings(prompts=prompts_file(tmp_path / "prompts.jsonl", 1), out=tmp_path / "out")
    settings.out.mkdir()
    (settings.out / "events.jsonl").symlink_to(tmp_path / "gone" / "events.jsonl")
    with pytest.raises(CodedError, match=r"out/events\.jsonl cannot be opened \(No such file") as caught:
        asyncio.run(Job(settings, Console(file=io.StringIO())).go())
    assert caught.value.code == "NODE.IO"


async def test_chaos_waits_for_somebody_to_hit() -> None:
    """That nobody is there to be killed, since all are suspects just then, is no failure of the run."""
    child = await asyncio.create_subprocess_exec("sleep", "60")
    started = psutil.Process(child.pid).create_time()
    poster = SimpleNamespace(key="poster/0", state="quarantined", pid=child.pid, create_time=started)
    pool: Any = SimpleNamespace(stats=lambda: SimpleNamespace(posters=[poster]))
    progressed, injuries = asyncio.Condition(), list[Injury]()
    breaking = asyncio.create_task(break_things(pool, None, lambda: 1.0, progressed, Events(), injuries))
    try:
        await asyncio.sleep(0)  # it looks, and begins to wait
        assert not injuries
        poster.state = "serving"
        async with progressed:
            progressed.notify_all()
        await asyncio.wait_for(breaking, 10.0)
        assert [(one.key, one.pid) for one in injuries] == [("poster/0", child.pid)]
        assert await asyncio.wait_for(child.wait(), 10.0) == -signal.SIGKILL
    finally:
        breaking.cancel()
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize(("which", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_signal_that_ends_it_at_once_gives_the_status(
    which: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    told = io.StringIO()
    settings = Settings(prompts=tmp_path / "prompts.jsonl", out=tmp_path / "out")
    job = Job(settings, Console(file=told, force_terminal=True))
    job._stop(signal.SIGINT)
    assert exits == []
    job._stop(which)
    assert exits[:1] == [status]
    assert "\x1b[?25h" in told.getvalue(), "the terminal has its cursor again"


def test_a_sigterm_while_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.init holds up the loop for seconds, and has a handler of its own by then (Ray 2.60's worker.py)."""

    @contextmanager
    def ray_at(address: str | None) -> Iterator[None]:
        signal.signal(signal.SIGTERM, lambda which, _: sys.exit(which))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # never over: the handler raises in here
        yield

    monkeypatch.setattr(running, "ray_at", ray_at)
    told = io.StringIO()
    settings = Settings(prompts=prompts_file(tmp_path / "prompts.jsonl", 1), out=tmp_path / "out")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert asyncio.run(Job(settings, Console(file=told)).go()) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    summary = json.loads((settings.out / "summary.json").read_text())
    assert (summary["exit"], summary["lost"]) == (143, 0)
    assert summary["stopped_by"].startswith("SIGTERM")
    assert told.getvalue().count("SIGTERM: stopping") == 1
