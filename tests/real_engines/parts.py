"""The processes of a real engine and what they hold, seen in /proc by means of their own: by the environment
that they run from. vLLM and SGLang rename their processes, and may wipe their environment by that."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = "/dev/shm/"


class Parts:
    """What runs from ``folder`` (a virtual environment)."""

    def __init__(self, folder: Path) -> None:
        self._needle = f"{folder}/".encode()

    def pids(self) -> dict[int, str]:
        """Its processes, pid to name. A zombie maps nothing, and has no command line."""
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if self._needle in read(pid, "cmdline") + read(pid, "maps"):
                line = read(pid, "cmdline").strip(b"\0").split(b"\0")
                name = "resource tracker" if b"resource_tracker" in line[-1] else line[0].decode().strip()
                found[pid] = Path(name).name
        return found

    def named(self, name: str) -> int:
        """The one whose name begins with ``name``."""
        pids = self.pids()
        (pid,) = [pid for pid, own in pids.items() if own.startswith(name)] or self._none(name, pids)
        return pid

    def segments(self) -> set[str]:
        """The names in /dev/shm that its processes have mapped. By inode: a semaphore is mapped under
        another name than it has."""
        inodes = set()
        for pid in self.pids():
            for line in read(pid, "maps").splitlines():
                fields = line.split(maxsplit=5)  # proc(5): address, permissions, offset, device, inode, path
                if fields[5:] and fields[5].startswith(SHARED.encode()):
                    inodes.add(int(fields[4]))
        return {entry.name for entry in os.scandir(SHARED) if entry.inode() in inodes}

    def _none(self, name: str, pids: dict[int, str]) -> list[int]:
        raise AssertionError(f"no process {name} among {pids}")


def read(pid: int, name: str) -> bytes:
    """A file of a process; nothing when it is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
