"""The traces of one engine, as its owner knows them: the GPUs, ports, shared memory and the private
directory, and how it is seen to that nothing of them is left once its processes are gone.

The guard removes what can be removed (`dispatch.engines.child.guard`); here it is waited for, and done by
the owner when the guard was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
import psutil

from dispatch.engines.traces import gpu, private, shm
from dispatch.engines.traces.aside import in_thread
from dispatch.engines.traces.leftovers import unix_time
from dispatch.files import temporary_folder
from protocol import CodedError
from protocol.carriers import error_file
from protocol.carriers.child import ERROR_FILE

GPU_TIMEOUT: Final = 10.0
"""Seconds that a stop waits for the GPUs to be free."""
PORTS_TIMEOUT: Final = 3.0
"""Seconds that a stop waits until nothing listens on the engine's ports."""
REMOVAL_TIMEOUT: Final = 4.0
"""Seconds that the shared memory, and then the private directory, gets to be removed by the guard, and as
many again to be removed from here when the guard did not."""
CLEAR_UP: Final = gpu.LOOK_TIMEOUT + GPU_TIMEOUT + gpu.LEAST + 2 * PORTS_TIMEOUT + 4 * REMOVAL_TIMEOUT
"""Seconds that a stop takes at most after the processes are gone: well under one on a healthy machine."""
_MOST: Final = 4096
"""How many pids, and how many files in shared memory, are remembered of one tree."""

_log = logging.getLogger("failsoft")

GuardDid = Callable[[str, float], Awaitable[list[str] | None]]
"""Wait for the guard to be done with a stage, so many seconds; what failed in it, None when the guard is
gone without having done it."""


class Traces:
    """What one start of an engine may leave."""

    def __init__(self, marker: str, env: Mapping[str, str], *, private_tmp: bool) -> None:
        self.tmp = ""
        """The private temporary directory; "" when there is none."""
        if private_tmp and "TMPDIR" not in env:
            self.tmp = os.path.join(temporary_folder(), private.PREFIX + marker)
        self.ports: set[int] = set()
        """Those that were reserved for it."""
        self.gpu: gpu.Check | None = None
        self.shm: dict[str, int] = {}
        """The tree's files in shared memory, as far as the guard has seen them: name → inode."""
        self._sysv: dict[int, int] = {}  # System V's segments: id → pid of the creator
        self._tree: deque[tuple[int, float]] = deque(maxlen=_MOST)  # pids and when they began

    @property
    def tree(self) -> tuple[tuple[int, float], ...]:
        """The engine's processes, as far as the guard has told of them: pids and when they began (unix
        seconds)."""
        return tuple(self._tree)

    def environment(self, inherited: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
        """What the engine's environment gets when there is a private directory; ``env``, which was given
        for it, comes first."""
        ours = {
            "TMPDIR": self.tmp,
            ERROR_FILE: os.path.join(self.tmp, private.ERROR_FILE),
            # Ray looks below TMPDIR for the cluster of this machine, which is where it was.
            "RAY_TMPDIR": inherited.get("RAY_TMPDIR", inherited.get("TMPDIR", "/tmp")),  # noqa: S108 - Ray's own
        }
        return {name: text for name, text in ours.items() if name not in env}

    def note(self, fact: Mapping[str, Any]) -> None:
        """Take in what the guard has seen of the tree: its ``engine``, ``tree`` and ``shm`` lines."""
        if fact["event"] == "engine":
            self._tree.append((fact["pid"], unix_time(fact["ticks"])))
        self._tree += [(pid, unix_time(ticks)) for pid, ticks in fact.get("pids", ())]
        self.shm |= fact.get("names", {})
        self._sysv |= {int(id): creator for id, creator in fact.get("sysv", {}).items()}
        while len(self.shm) > _MOST:  # the guard has all of it, and knows what is gone already
            del self.shm[next(iter(self.shm))]

    def failure(self, document: str) -> dict[str, Any] | None:
        """The failure in the file ``document``, as data: code, id, detail, data, origin, chain."""
        error = error_file.read(document) if self.tmp else None
        if error is None:
            return None
        whole = {"code": str(error.code), "id": error.id, "detail": error.detail, "data": error.data}
        return whole | {
            "origin": msgspec.to_builtins(error.origin),
            "chain": msgspec.to_builtins(error.chain),
        }

    async def clear_up(self, stages: dict[str, float], since: float, guard_did: GuardDid) -> str:
        """The stages of a stop after the processes are gone: ``gpu``, ``ports``, ``shm``, ``tmp``, as far
        as they apply; seconds go into ``stages``. What the GPU check saw, in words. ``since`` is when the
        engine began, in unix seconds.

        All of them run. Raises CodedError ENGINE.STOP_FAILED for the first that failed, with what failed
        in each as ``failures``."""
        failed: dict[str, CodedError] = {}
        words = "" if self.gpu is None else await self.gpu.absent()
        work: dict[str, Callable[[], Awaitable[str]]] = {}
        if self.gpu is not None and not words:
            check, tree = self.gpu, dict(self._tree)
            work["gpu"] = lambda: check.released(tree, GPU_TIMEOUT)
        if self.ports:
            work["ports"] = lambda: _ports_free(self.ports, since)
        if self.shm or self._sysv:
            work["shm"] = lambda: self._removed("shm", guard_did, self.remove_shm)
        if self.tmp:
            work["tmp"] = lambda: self._removed("tmp", guard_did, self.remove_tmp)
        for stage, do in work.items():
            began = time.monotonic()
            try:
                said = await do()
                words = said if stage == "gpu" else words
            except CodedError as exc:
                failed[stage] = exc
            finally:
                stages[stage] = time.monotonic() - began
        if failed:
            first = next(iter(failed.values()))
            first.data["failures"] = {stage: exc.detail for stage, exc in failed.items()}
            raise first
        return words

    async def _removed(self, stage: str, guard_did: GuardDid, remove: Callable[[], list[str]]) -> str:
        failed = await guard_did(stage, REMOVAL_TIMEOUT)
        if failed != []:  # not done, or not all of it
            try:
                failed = await in_thread(remove, REMOVAL_TIMEOUT)
            except TimeoutError:
                failed = [f"not removed within {REMOVAL_TIMEOUT:g} s"]
        if failed:
            raise CodedError("ENGINE.STOP_FAILED", f"stage {stage}: {'; '.join(failed)}", {"stage": stage})
        return ""

    def remove_shm(self) -> list[str]:
        """Remove the shared memory; what could not be. Blocks."""
        return shm.remove(self.shm, self._sysv)[1]

    def remove_tmp(self) -> list[str]:
        """Remove the private directory; what went wrong. Blocks."""
        try:
            if self.tmp:
                private.remove(self.tmp)
        except OSError as exc:
            return [str(exc)]
        return []

    async def remove_quietly(self) -> None:
        """Remove both where nobody may ask any more; what went wrong is logged."""
        for remove in (self.remove_shm, self.remove_tmp):
            try:
                for text in await in_thread(remove, REMOVAL_TIMEOUT):
                    _log.warning("what an engine has left cannot be removed: %s", text)
            except TimeoutError:
                _log.warning("what an engine has left was not removed within %g s", REMOVAL_TIMEOUT)


async def _ports_free(ports: set[int], since: float) -> str:
    """Wait until nothing listens on ``ports``. Raises CodedError ENGINE.STOP_FAILED, stage ``ports``."""
    deadline = time.monotonic() + PORTS_TIMEOUT
    while True:
        try:
            listening = await in_thread(lambda: _listeners(ports, since), PORTS_TIMEOUT)
        except TimeoutError:
            text = f"stage ports: who listens could not be found out within {PORTS_TIMEOUT:g} s"
            raise CodedError("ENGINE.STOP_FAILED", text, {"stage": "ports"}) from None
        if not listening:
            return ""
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    told = ", ".join(f"{port} (pid {pid or 'unknown'})" for port, pid in sorted(listening.items()))
    pids = [pid for pid in listening.values() if pid]
    raise CodedError(
        "ENGINE.STOP_FAILED",
        f"stage ports: somebody listens on {told} after the engine's end",
        {"stage": "ports", "ports": sorted(listening), "pids": pids},
    )


def _listeners(ports: set[int], since: float) -> dict[int, int | None]:
    """Which of ``ports`` somebody listens on, and who (None: another user's process, or of another
    container), except for processes that are older than ``since``: another program's, at another
    address. Blocks."""
    if not ports & _listened_on():
        return {}
    found = {}
    for one in psutil.net_connections("tcp"):
        address: Any = one.laddr  # never empty where somebody listens
        listens = one.status == psutil.CONN_LISTEN and address.port in ports
        if listens and (one.pid is None or _began(one.pid) > since):
            found[int(address.port)] = one.pid
    return found


def _listened_on() -> set[int]:
    """The TCP ports on which somebody listens, on any address (proc(5), net/tcp): cheap, while finding out
    who it is takes a look at every descriptor of every process."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as file:  # the second without IPv6
            rows = [line.split() for line in file.readlines()[1:]]
            found |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return found


def _began(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0  # gone by now, and its sockets with it
