"""Programs that behave badly, and a way to see what is left of them that shares nothing with the
code under test: each test's processes carry a tag of their own in their environment."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

from dispatch.engines import EngineSpec, EngineSupervisor
from protocol import CodedError

FAKE = str(Path(__file__).with_name("fake_engine.py"))
SLEEP = ("sleep", "1000")
TREE = ("sh", "-c", "setsid -f sleep 1001; sleep 1002 & exec sleep 1003")
"""Three processes: the engine, a child, and a grandchild that has forked twice into its own session."""
SEGMENT = """
import time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None
s = shared_memory.SharedMemory(create=True, size=4096)
print(s.name, flush=True)
time.sleep(1000)
"""
"""A Python program that has shared memory, prints its name, and has no tracker that would remove it."""
STUBBORN = ("sh", "-c", "trap '' TERM; setsid -f sleep 1001; while :; do sleep 1; done")


def files_in(folder: Path) -> list[Path]:
    """The files of ``folder`` by name."""
    return sorted(folder.iterdir())


class Tag:
    """A mark for one test's processes."""

    def __init__(self) -> None:
        self.text = secrets.token_hex(8)
        self.env = {"TEST_TAG": self.text}

    def alive(self) -> list[int]:
        """The pids that carry the tag and run; zombies have no environment any more."""
        found = []
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and self.text.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
        return found


def fake_engine(*flags: str) -> tuple[str, ...]:
    """The command of `fake_engine`, with the port still open."""
    return (sys.executable, FAKE, "--port", "{port}", *flags)


def spec_of(tag: Tag, *flags: str, **fields: Any) -> EngineSpec:
    """A fake engine that carries ``tag``. What is waited out in tests is short, what an answer may take on a
    busy machine is not."""
    defaults: dict[str, Any] = {
        "start_timeout": 30.0,
        "canary_timeout": 10.0,
        "term_timeout": 1.0,
        "health_timeout": 5.0,
        "probe_interval": 0.1,
    }
    return EngineSpec(command=fake_engine(*flags), env=tag.env, **{**defaults, **fields})


async def fail(spec: EngineSpec) -> CodedError:
    """A start that fails: with what, as its status says as well."""
    supervisor = EngineSupervisor(spec)
    with pytest.raises(CodedError) as caught:
        await supervisor.start()
    status = await supervisor.status()
    assert status.state == "dead"
    assert status.code == str(caught.value.code)
    assert status.detail == caught.value.detail
    return caught.value
