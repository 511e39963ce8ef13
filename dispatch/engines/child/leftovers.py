"""Leftovers: finding and ending an engine's processes when its guard cannot any more.

A process is named by pid and start time, never by its pid alone: pids are used again.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import psutil

MARKER: Final = "FAILSOFT_ENGINE"
"""Environment variable, with a random value for each start, by which an engine's descendants are
found in /proc when its guard is gone and their parent is no help any more."""


def unix_time(ticks: int) -> float:
    """A start time in clock ticks since boot (proc(5) stat, field 22) as unix seconds, as psutil has it."""
    return float(psutil.boot_time() + ticks / os.sysconf("SC_CLK_TCK"))


def find(marker: str) -> list[psutil.Process]:
    """The processes that have ``marker`` in the environment they were started with (proc(5)
    environ). One that was started with an emptied environment is not found."""
    needle = f"{MARKER}={marker}".encode()
    found = []
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if needle in environment.split(b"\0") and process.is_running():
                found.append(process)
        except (OSError, psutil.Error):
            continue  # gone, or another user's
    return found


async def sweep(marker: str, timeout: float) -> list[int]:
    """SIGKILL every process with ``marker`` until none is left or ``timeout`` seconds are over;
    the pids that are left. For the case that the guard cannot do it."""
    deadline = time.monotonic() + timeout
    while left := await asyncio.to_thread(find, marker):
        for process in left:
            try:
                process.kill()  # psutil compares the start time first
            except psutil.Error:
                continue  # gone, or not ours to kill: the deadline reports it
        if time.monotonic() > deadline:
            return [process.pid for process in left]
        await asyncio.sleep(0.01)
    return []
