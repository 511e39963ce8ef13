"""The job's beginning and end, without Ray in between: what a whole run seldom meets there."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from failsoft.job.run import Job
from failsoft.job.settings import Settings
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
