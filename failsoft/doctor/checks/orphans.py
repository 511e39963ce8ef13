"""Engine processes whose guard is gone, and the private directories of engines that are gone.

A guard ends everything below it, and a supervisor whose guard was killed sweeps by the marker. When both
are SIGKILLed at once the engine ends by its parent-death signal, but its descendants get none (prctl(2),
PR_SET_PDEATHSIG) and go on: they hold ports, memory and GPUs of the next start.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Final

import psutil

from dispatch.engines.traces import leftovers, private
from dispatch.engines.traces.leftovers import Orphan, Orphans
from dispatch.processes import is_alive, same_process
from failsoft.doctor.finding import Examined, Finding

NAME: Final = "orphans"
_AGAIN: Final = 1.0
"""Seconds between two looks: what is just being ended, or made, is not there in both."""
_END: Final = 5.0
"""Seconds for orphans to end once they are killed."""


def check(examined: Examined, look: Callable[[], Orphans] | None = None) -> list[Finding]:
    """What is left on this machine of engines, of this user's (all users', for root)."""
    look = look or leftovers.orphans
    first = look()
    if first == Orphans():
        return []
    time.sleep(_AGAIN)
    second = look()
    # A process is compared by more than its pid; what it is called may change.
    seen = {(one.pid, one.create_time) for one in first.processes}
    found = Orphans(
        processes=tuple(one for one in second.processes if (one.pid, one.create_time) in seen),
        directories=tuple(path for path in second.directories if path in first.directories),
    )
    if not examined.mend:
        return _told(found)
    stuck = _kill(found.processes)
    ended = set(found.processes) - set(stuck)
    # A directory is left as soon as nobody of its engine lives: only now, for those that were ended.
    markers = {one.marker for one in ended}
    more = look().directories if ended else ()
    paths = {*found.directories, *(path for path in more if _marker(path) in markers)}
    kept = [path for path in sorted(paths) if not _remove(path)]
    notes = [
        Finding(check=NAME, severity="note", what="ended what an engine left", where=_who(processes))
        for processes in _by_engine(ended)
    ] + [
        Finding(check=NAME, severity="note", what="removed what an engine left", where=path)
        for path in sorted(paths - set(kept))
    ]
    return notes + _told(Orphans(processes=tuple(stuck), directories=tuple(kept)), tried=True)


def _kill(processes: Iterable[Orphan]) -> list[Orphan]:
    """SIGKILL them; those that are there after `_END` seconds all the same."""
    deadline = time.monotonic() + _END
    left = list(processes)
    while left and time.monotonic() < deadline:
        for one in left:
            process = same_process(one.pid, one.create_time)
            with contextlib.suppress(psutil.Error):  # gone, or not ours to kill: then it is told as left
                if process is not None:
                    process.kill()
        time.sleep(0.02)
        left = [one for one in left if is_alive(one.pid, one.create_time)]
    return left


def _remove(path: str) -> bool:
    """Remove a directory and the shared memory that is noted in it; whether all of it is gone."""
    with contextlib.suppress(OSError):  # told as left
        leftovers.remove(path)
    return not os.path.lexists(path)


def _marker(path: str) -> str:
    return path.rpartition(private.PREFIX)[2]


def _told(found: Orphans, *, tried: bool = False) -> list[Finding]:
    end, remove = "`failsoft doctor --fix` ends them", "`failsoft doctor --fix` removes it"
    if tried:
        end = "SIGKILL did not end them: `grep State /proc/PID/status`, or they are another user's"
        remove = "it could not be removed: `ls -la` tells whose it is"
    told = []
    for processes in _by_engine(found.processes):
        what = f"{len(processes)} processes of an engine whose guard is gone"
        where = _who(processes)
        told.append(Finding(check=NAME, severity="error", what=what, where=where, fix=end))
    for path in found.directories:
        what = "the private directory of an engine that is gone"
        told.append(Finding(check=NAME, severity="warning", what=what, where=path, fix=remove))
    return told


def _by_engine(processes: Iterable[Orphan]) -> list[list[Orphan]]:
    """Together what one start left."""
    engines: dict[str, list[Orphan]] = {}
    for one in sorted(processes, key=lambda one: (one.create_time, one.pid)):
        engines.setdefault(one.marker, []).append(one)
    return list(engines.values())


def _who(processes: Iterable[Orphan]) -> str:
    # The programs alone: arguments may hold what nobody else should read.
    return ", ".join(f"pid {one.pid} ({one.command[0] if one.command else '?':.100})" for one in processes)
