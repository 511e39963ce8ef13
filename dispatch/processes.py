"""Processes by name: a pid together with its start time, never a pid alone, for pids are used again.

A process has ended when its last thread has. Linux calls it a zombie as soon as its first thread has ended,
and its sockets and files stay open until the others have: after a SIGKILL that can take as long as freeing
its memory does, and meanwhile its peers know nothing of its end (proc_pid_stat(5) tells of one thread).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import psutil

POLITE: Final = 1.0
"""Seconds that a process which was asked to end gets to do so by itself."""
CONFIRM: Final = 10.0
"""Seconds within which a killed process must be known to have ended."""


def same_process(pid: int, create_time: float) -> psutil.Process | None:
    """The process, if that very one still runs; a zombie without other threads does not. ``create_time`` is
    unix seconds, as psutil has it; a second of difference is allowed, for the clock that it rests on is
    adjusted."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) < 1 and (
            process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        )
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def is_alive(pid: int, create_time: float) -> bool:
    """Whether that very process still runs."""
    return same_process(pid, create_time) is not None


async def see_gone(pid: int, create_time: float) -> bool:
    """See that a process ends which was asked to: one that is stopped or wedged cannot do so by itself, and
    SIGKILL can. True when it is known to be gone, within `POLITE` and `CONFIRM` seconds."""
    if await until(lambda: not is_alive(pid, create_time), POLITE):
        return True
    process = same_process(pid, create_time)
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return await until(lambda: not is_alive(pid, create_time), CONFIRM)


async def until(true: Callable[[], bool], timeout: float) -> bool:
    """Poll ``true`` until it holds or ``timeout`` seconds have passed; the last answer."""
    end = asyncio.get_running_loop().time() + timeout
    while not true():
        if asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(0.01)
    return True
