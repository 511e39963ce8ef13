"""Processes that rename themselves, as those of vLLM and SGLang do."""

from __future__ import annotations

import sys

import psutil

from dispatch.engines.child.process import EngineProcess
from dispatch.engines.traces import leftovers
from tests.dispatch.engines.processes import Tag
from tests.real_engines.places import with_servers
from tests.support.wait import until

RENAMED = """
import setproctitle, time
setproctitle.setproctitle("VLLM::EngineCore")
time.sleep(1000)
"""


async def test_a_renamed_process_is_found_by_its_marker(tag: Tag) -> None:
    """setproctitle writes over what /proc shows as the environment, unless it is told not to."""
    process = await EngineProcess.spawn((sys.executable, "-c", RENAMED), env={**with_servers(), **tag.env})
    await until(lambda: psutil.Process(process.pid).name() == "VLLM::EngineCore", 20)
    assert process.pid in [found.pid for found in leftovers.find(process.marker)]
    assert process.pid in tag.alive()
    await process.stop()
    assert tag.alive() == []
