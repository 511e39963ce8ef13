"""Evidence: whether it was the kernel's out-of-memory killer that ended an engine.

Signal 9 names nobody. A dead process is in no memory cgroup any more and its memory is gone, so what
will be asked is looked at while it lives (`look`), and compared when it has ended (`oom_evidence`).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Final

import msgspec
import psutil

from protocol import defuse
from protocol.carriers.exit_status import memory_cgroup, oom_kills

KERNEL_LOG: Final = Path("/dev/kmsg")
"""One record a read, ``priority,number,microseconds since boot,flags;text`` (kernel documentation,
ABI/testing/dev-kmsg). Readable for root, and for others where kernel.dmesg_restrict is 0."""
_FIRST_NAMESPACE: Final = "pid:[4026531836]"
"""The pid namespace of the machine, not of a container (linux/proc_ns.h, PROC_PID_INIT_INO)."""
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
_PEAKS: Final = ("memory.peak", "memory.max_usage_in_bytes")
_MOST_PIDS: Final = 1000
_MOST_RECORDS: Final = 20_000
_LONGEST_RECORD: Final = 8192
_LONGEST_LINE: Final = 200
_RECORD: Final = re.compile(r"\d+,\d+,(?P<time>\d+),[^;]*;(?P<text>.*)")
_KILLED: Final = re.compile(r"(?:Killed process |oom-kill:.*\bpid=)(?P<pid>\d+)\b")
_SLACK: Final = 60.0
"""Seconds that a record may seem older than the engine."""
_DRIFT: Final = 0.001
"""Of the time since boot, for the same reason: nobody sets the kernel log's clock right (dmesg(1))."""
_UNLIMITED: Final = 1 << 60
"""A limit above is none: cgroup v1 has 2**63, rounded to pages, for it."""


class Seen(msgspec.Struct, frozen=True):
    """An engine as it was when it was looked at: its memory cgroup, how many processes the kernel had
    killed there at the first look, the pids of its processes, and the bytes that they had resident."""

    cgroup: Path | None = None
    kills: int | None = None
    pids: tuple[int, ...] = ()
    resident: int = 0


def look(pid: int, before: Seen | None = None) -> Seen:
    """The engine ``pid`` now; ``before`` is the last look, and the answer when the engine is gone.
    Blocks for some milliseconds: call it in a thread, at the start and from time to time."""
    pids: list[int] = []
    resident = 0
    try:
        engine = psutil.Process(pid)
        for process in (engine, *engine.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                pids.append(process.pid)
                resident += process.memory_info().rss
    except psutil.Error:
        resident = 0
    if not resident:  # gone, or a zombie
        return before or Seen()
    cgroup = memory_cgroup(pid)
    if before is None or before.cgroup != cgroup:  # the first look, or it was moved into another
        return Seen(cgroup, oom_kills(cgroup) if cgroup is not None else None, tuple(pids), resident)
    # A child that was killed is gone at the next look, and may be what its parent ended of.
    earlier = [one for one in before.pids if one not in pids]
    return Seen(cgroup, before.kills, (*earlier, *pids)[-_MOST_PIDS:], resident)


def oom_evidence(before: Seen, pid: int, started: float) -> str:
    """In words, what says that the out-of-memory killer ended the engine ``pid``, begun at ``started``
    (unix seconds), or one of its processes; empty when nothing does. ``before`` is the last `look`.

    Two witnesses: the kernel's log, which names the process, where it can be read; and the count of its
    cgroup, which others in the same cgroup may have caused. Blocks for some milliseconds: call it in a
    thread, after the engine has been reaped."""
    found = _kernel_lines({pid, *before.pids}, started)[-1:]
    if before.cgroup is not None and before.kills is not None:
        more = (oom_kills(before.cgroup) or 0) - before.kills
        if more > 0:
            processes = "1 process" if more == 1 else f"{more} processes"
            found.append(f"{processes} of memory cgroup {before.cgroup} killed since the start")
    if not found:
        return ""
    if before.cgroup is not None:
        found += _memory(before.cgroup)
    if before.resident:
        found.append(f"the engine had {_size(before.resident)} resident when last seen")
    return "the kernel's out-of-memory killer: " + ", ".join(found)


def _kernel_lines(pids: set[int], started: float) -> list[str]:
    """The kernel log's records, oldest first, of one of ``pids`` being killed since ``started``."""
    found: list[str] = []
    try:
        if os.readlink("/proc/self/ns/pid") != _FIRST_NAMESPACE:
            return found  # the kernel logs other numbers than the ones that we know
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return found
    now = time.monotonic()
    since = now - (time.time() - started) - _SLACK - _DRIFT * now
    try:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(log, _LONGEST_RECORD)
            except BrokenPipeError:
                continue  # overwritten before it was read: the next read is of the oldest that is left
            if not record:
                break  # a file in place of the device
            parts = _RECORD.match(record.decode("utf-8", "replace"))
            victim = _KILLED.search(parts["text"]) if parts else None
            if parts and victim and int(victim["pid"]) in pids and int(parts["time"]) / 1e6 >= since:
                found.append(defuse(f"{parts['text']:.{_LONGEST_LINE}}"))
    except OSError:
        pass  # EAGAIN: read to its end. Anything else: what was read is the evidence
    finally:
        os.close(log)
    return found


def _memory(cgroup: Path) -> list[str]:
    """The lowest limit of ``cgroup`` and those above it, and the most that it has used, as far as it
    says so (cgroup v2: memory.max, memory.peak; v1: memory.limit_in_bytes, memory.max_usage_in_bytes)."""
    limits = [_number(group / name) for group in (cgroup, *cgroup.parents) for name in _LIMITS]
    limit = min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)
    peak = next((peak for name in _PEAKS if (peak := _number(cgroup / name)) is not None), None)
    words = [] if limit is None else [f"limit {_size(limit)}"]
    return words if peak is None else [*words, f"most used {_size(peak)}"]


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
