"""What there is of an engine, seen with the kernel's eyes: /proc, /dev/shm, the temp directory.

Nothing here is shared with the code under test. An engine's processes carry a tag in their environment, its
ports are told from other people's by their sockets' inodes, and a process is pid and start time.
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

MODULE = b"dispatch.engines.embedded"


class Process(NamedTuple):
    """One process for ever: the start time, in clock ticks since boot, tells it from a later one."""

    pid: int
    ticks: int
    name: str

    @property
    def runs(self) -> bool:
        """Whether it is there, and no zombie."""
        stat = _stat(self.pid)
        return stat is not None and stat[0] != "Z" and int(stat[19]) == self.ticks

    def send(self, how: signal.Signals) -> None:
        """The signal, unless it is gone."""
        if self.runs:
            with suppress(ProcessLookupError):
                os.kill(self.pid, how)


def process(pid: int, name: str) -> Process:
    """The process that has this pid now. Raises ProcessLookupError."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(f"no process {pid} ({name})")
    return Process(pid, int(stat[19]), name)


def tagged(tag: str) -> list[int]:
    """The pids that carry the tag and run; zombies have no environment any more."""
    needle, found = f"TEST_TAG={tag}\0".encode(), []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and needle in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
    return found


class Traces:
    """All that belongs to one life of an engine. Made while it lives."""

    def __init__(self, engine: Process, url: str, litter: dict[str, Any], tag: str) -> None:
        self.engine = engine
        self.url = url
        self.child = process(litter["child"]["pid"], "child")
        self.grandchild = process(litter["grandchild"]["pid"], "grandchild")
        known = {engine, self.child, self.grandchild}
        pids = {one.pid for one in known}
        others = {process(pid, "other process") for pid in tagged(tag) if pid not in pids}
        self.processes = known | others | _guard_of(engine)
        # The segment, the file and the socket, and the directory if it is the engine's own.
        self.paths = {Path(litter[name]) for name in ("shm", "file", "socket")}
        folder = Path(litter["file"]).parent
        if folder != Path(tempfile.gettempdir()):
            self.paths.add(folder)
        ports = {int(url.rpartition(":")[2]), int(litter["port"])}
        self.sockets = {one for one in _listening() if one[0] in ports}

    def left(self) -> list[str]:
        """What is there of it still, in words."""
        return [
            *sorted(f"{one.name} {one.pid}" for one in self.processes if one.runs),
            *sorted(str(path) for path in self.paths if path.exists()),
            *sorted(f"port {port}" for port, inode in self.sockets & _listening()),
        ]

    def remove(self) -> None:
        """Take away what is left, so that a wrong cell spoils nothing for others."""
        for one in self.processes:
            one.send(signal.SIGKILL)
        for path in sorted(self.paths, reverse=True):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def look(tag: str) -> Traces | None:
    """The engine with this tag that runs now; None while there is none or it does not tell its litter yet."""
    for pid in tagged(tag):
        with suppress(OSError, httpx.HTTPError):  # it may end at any moment
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if MODULE in command:
                url = f"http://127.0.0.1:{int(command[command.index(b'--port') + 1])}"
                litter = httpx.get(f"{url}/litter", timeout=1.0, trust_env=False).json()
                return Traces(process(pid, "engine"), url, litter, tag)
    return None


def remove_litter(pids: set[int]) -> None:
    """Whatever engines with these pids have left, also those that no round has looked at."""
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for pid in pids:
            for path in folder.glob(f"failsoft-litter-{pid}-*"):
                path.unlink(missing_ok=True)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on (the name before may hold anything)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _guard_of(engine: Process) -> set[Process]:
    """The process that waits for the engine, if it is one of its own."""
    stat = _stat(engine.pid)
    if stat is None:
        raise ProcessLookupError(f"no process {engine.pid}")
    above = int(stat[1])
    name = Path(f"/proc/{above}/comm").read_text().strip()
    return {process(above, "guard")} if "guard" in name else set()


def _listening() -> set[tuple[int, str]]:
    """Ports with a listener on this machine, and the listeners' inodes (proc(5), net/tcp; 0A is LISTEN)."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add((int(fields[1].rpartition(":")[2], 16), fields[9]))
    return found
