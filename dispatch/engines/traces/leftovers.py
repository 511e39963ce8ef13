"""Leftovers: finding and ending what an engine left when its guard cannot do it any more.

An owner whose guard was killed sweeps by the marker (`sweep`). When both were SIGKILLed at once the engine
itself ends by its parent-death signal, but nothing of ours lives to end its descendants, and no signal
reaches them: they are found later, by whoever starts the next engine on the node or looks for what is wrong
with it (`orphans`, `end_orphans`).

A process is named by pid and start time, never by its pid alone: pids are used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec
import psutil

from dispatch.engines.traces import private, shm
from dispatch.files import temporary_folder
from dispatch.processes import is_alive, same_process

MARKER: Final = "FAILSOFT_ENGINE"
"""Environment variable, with a random value for each start, by which an engine's descendants are
found in /proc when its guard is gone and their parent is no help any more."""
_MARKER_LENGTH: Final = 16
"""Of hexadecimal digits: a folder with another name is somebody else's."""
GUARD_NAME: Final = "failsoft-guard"
"""A guard's name, as ps shows it (prctl(2), PR_SET_NAME)."""


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


async def sweep(marker: str, timeout: float, known: Collection[tuple[int, float]] = ()) -> list[int]:
    """SIGKILL every process with ``marker``, and those that are ``known`` by pid and create time, until none
    is left or ``timeout`` seconds are over; the pids that are left. For the case that the guard cannot do
    it."""
    deadline, late = time.monotonic() + timeout, False
    ours = set(known)  # also those that are ending: they have no environment, and their files still
    while True:
        for process in await asyncio.to_thread(find, marker):
            with contextlib.suppress(psutil.NoSuchProcess):
                ours.add((process.pid, process.create_time()))
        ours = await asyncio.to_thread(_living, ours)
        if late or not ours:
            return sorted(pid for pid, _ in ours)
        late = time.monotonic() > deadline  # what is killed now gets one more look
        for one in ours:
            _kill(*one)
        await asyncio.sleep(0.01)


def _kill(pid: int, create_time: float) -> None:
    process = same_process(pid, create_time)
    with contextlib.suppress(psutil.Error):  # gone, or not ours to kill: it is reported as left
        if process is not None:
            process.kill()  # psutil compares the start time first


def _living(processes: Collection[tuple[int, float]]) -> set[tuple[int, float]]:
    return {one for one in processes if is_alive(*one)}


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """A process of an engine whose guard is gone. ``create_time`` is unix seconds; ``command`` its
    command line, which may hold what nobody else should read."""

    pid: int
    create_time: float
    marker: str
    command: tuple[str, ...]


class Orphans(msgspec.Struct, frozen=True, kw_only=True):
    """What engines have left on this machine: processes, and private temporary directories."""

    processes: tuple[Orphan, ...] = ()
    directories: tuple[str, ...] = ()


def orphans(directory: str | None = None) -> Orphans:
    """This user's processes that carry a marker and whose guard lives no longer, and the directories
    ``failsoft-engine-*`` in ``directory`` (by default the temporary one) that neither a guard nor a
    process of their engine has any more. What has any guard above it is left alone: the guards of another
    release may say their marker elsewhere. Blocks for some milliseconds, longer with many processes: call it
    in a thread."""
    # First who is guarded, then the guards: the guard of what was seen lived before it.
    marked = _marked()
    folder = directory or temporary_folder()
    owned = _private_directories(folder)
    guarded = _guarded()
    found = [one for one in marked if one.marker not in guarded and _is_alone(one)]
    living = guarded | {one.marker for one in marked}
    left = [path for marker, path in owned.items() if marker not in living and not private.is_locked(path)]
    return Orphans(processes=tuple(found), directories=tuple(sorted(left)))


async def end_orphans(timeout: float, directory: str | None = None) -> Orphans:
    """SIGKILL the processes that `orphans` finds, and remove the directories with the shared memory that
    is noted in them; what is still there after ``timeout`` seconds, nothing if all went well."""
    deadline = time.monotonic() + timeout
    killed: dict[tuple[int, float], str] = {}  # pid and create time → marker
    while True:
        left = await asyncio.to_thread(orphans, directory)
        if left == Orphans() or time.monotonic() > deadline:
            return left
        for one in left.processes:
            killed[one.pid, one.create_time] = one.marker
            _kill(one.pid, one.create_time)
        # One that is ending has no environment, and its files still: shared memory that it holds would stay,
        # and the note of it be gone.
        ending = {marker for process, marker in killed.items() if is_alive(*process)}
        for path in left.directories:
            if path.rpartition(private.PREFIX)[2] in ending:
                continue
            with contextlib.suppress(OSError):  # likewise
                await asyncio.to_thread(remove, path)
        await asyncio.sleep(0.01)


def remove(path: str) -> None:
    """Remove an engine's directory and the shared memory noted in it; OSError when something stays."""
    _, failed = shm.remove(*private.noted(path))
    if failed:
        raise OSError("; ".join(failed))
    private.remove(path)


def _is_alone(one: Orphan) -> bool:
    """Whether it lives, with no guard above it. A guard is a subreaper (prctl(2)): what it started is below
    it, however it forks."""
    process = same_process(one.pid, one.create_time)
    try:
        return process is not None and all(above.name() != GUARD_NAME for above in process.parents())
    except psutil.NoSuchProcess:
        return False  # gone by now


def _marked() -> list[Orphan]:
    begins = f"{MARKER}=".encode()
    found = []
    for pid in psutil.pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            marker = next((text for text in environment.split(b"\0") if text.startswith(begins)), None)
            if marker is None:
                continue
            process = psutil.Process(pid)
            found.append(
                Orphan(
                    pid=pid,
                    create_time=process.create_time(),
                    marker=marker[len(begins) :].decode(errors="replace"),
                    command=tuple(process.cmdline()),
                )
            )
        except (OSError, psutil.Error):
            continue  # gone, or another user's
    return found


def _guarded() -> set[str]:
    """The markers of the guards that live: the last word of their command lines (`guard`)."""
    found = set()
    for pid in psutil.pids():
        try:
            if Path(f"/proc/{pid}/comm").read_text().rstrip() == GUARD_NAME:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found.add(words[-1].decode(errors="replace"))
        except OSError:
            continue  # gone
    return found


def _private_directories(folder: str) -> dict[str, str]:
    """This user's private directories in ``folder``, by their marker."""
    found = {}
    for path in Path(folder).glob(private.PREFIX + "[0-9a-f]" * _MARKER_LENGTH):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found[path.name.removeprefix(private.PREFIX)] = str(path)
    return found
