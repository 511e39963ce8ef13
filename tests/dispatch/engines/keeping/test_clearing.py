from __future__ import annotations

import subprocess

import psutil
import pytest

from dispatch.engines.keeping import clearing
from tests.dispatch.engines.processes import SLEEP


async def test_a_process_that_ends_just_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = subprocess.Popen(SLEEP)  # noqa: ASYNC220 - it has to be waited for by blocking, below
    process = psutil.Process(engine.pid)

    def found(pid: int, create_time: float) -> psutil.Process:
        engine.kill()
        engine.wait()
        return process

    monkeypatch.setattr(clearing, "same_process", found)
    assert await clearing._end([(0, 0.0), (engine.pid, process.create_time())], 0.2) == []
