"""Processes by name: a pid together with its start time, never a pid alone, for pids are used again."""

from __future__ import annotations

import psutil


def same_process(pid: int, create_time: float) -> psutil.Process | None:
    """The process, if that very one still runs; a zombie does not. ``create_time`` is unix seconds, as
    psutil has it; a second of difference is allowed, for the clock that it rests on is adjusted."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def is_alive(pid: int, create_time: float) -> bool:
    """Whether that very process still runs."""
    return same_process(pid, create_time) is not None
