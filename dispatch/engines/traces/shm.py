"""Shared memory of one engine's tree: noticed while its processes live, removed when they are gone.

A segment outlives every process that used it, and a SIGKILLed process removes nothing: torch, NCCL,
vLLM and Python's multiprocessing leave files in /dev/shm (shm_overview(7)), and some leave System V
segments (svipc(7)). Whose a file was can only be seen while somebody maps it or holds it open
(proc(5), maps and fd), so a look is taken whenever something new is there. Files are compared by
inode, never by name: a semaphore is mapped under another name than it has, and a name is used again.

Standard library only: the guard loads this file, as well as the owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Collection, Iterable

DIRECTORY = "/dev/shm"  # noqa: S108 - where shm_open(3) keeps its segments, not a place of ours for files
SYSV = "/proc/sysvipc/shm"
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IPC_RMID = 0
LOOKS = 3
"""How many looks a new file gets that none of the tree has, until it counts as somebody else's. The
last look of all asks for those as well."""


def open_watch(directory: str) -> int:
    """An inotify descriptor that becomes readable when a file appears in ``directory``; -1 when the
    user has too many of them already (inotify(7), max_user_instances), or there is no directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if (
        descriptor >= 0
        and libc.inotify_add_watch(descriptor, directory.encode(), IN_CREATE | IN_MOVED_TO) < 0
    ):
        os.close(descriptor)
        return -1
    return descriptor


def listing(directory: str) -> dict[str, int]:
    """The names in ``directory`` with their inodes; none when it is not there."""
    try:
        with os.scandir(directory) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except OSError:
        return {}


def sysv_table() -> dict[int, tuple[int, int]]:
    """System V segments: id → (pid of the creator, how many are attached)."""
    try:
        with open(SYSV, "rb") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return {}
    return {int(row[1]): (int(row[4]), int(row[6])) for row in rows}


def inodes_of(pid: int, device: int, directory: str) -> set[int]:
    """The inodes of the files below ``directory``, on ``device``, that a process maps or holds open;
    none when it is gone or another user's."""
    found = set()
    column = f" {os.major(device):02x}:{os.minor(device):02x} ".encode()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        found = {int(line.split(maxsplit=5)[4]) for line in file if column in line[:80]}
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                # The link's text first: a stat of a file on a server that is away would block.
                if os.readlink(entry.path).startswith(directory + "/"):
                    found.add(os.stat(entry.path).st_ino)
    return found


class Watch:
    """What has appeared since this watch was made, and which of it the tree has."""

    def __init__(self, directory: str = DIRECTORY) -> None:
        self.directory = directory
        self.descriptor = open_watch(directory)
        self.before = listing(directory)
        self.sysv_before = set(sysv_table())
        self.held: dict[str, int] = {}
        """The tree's files: name → inode."""
        self.sysv: dict[int, int] = {}
        """The tree's System V segments: id → pid of the creator."""
        self._looks: dict[tuple[str, int], int] = {}
        self._pids: set[int] = set()

    def drain(self) -> None:
        """Take in what inotify has to say. Only that it speaks matters: a look lists the directory."""
        if self.descriptor < 0:
            return
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):  # its queue is bounded, but somebody may be filling it all the time
                os.read(self.descriptor, 65536)

    def look(self, pids: Collection[int], *, last: bool = False) -> tuple[dict[str, int], dict[int, int]]:
        """Look which of what is new the processes ``pids`` have; what was not known yet, as in `held`
        and `sysv`."""
        there = listing(self.directory)
        self.held = {name: inode for name, inode in self.held.items() if there.get(name) == inode}
        fresh = {
            (name, inode)
            for name, inode in there.items()
            if self.before.get(name) != inode and self.held.get(name) != inode
        }
        self._looks = {one: count for one, count in self._looks.items() if one in fresh}
        asked = {one for one in fresh if last or self._looks.get(one, 0) < LOOKS}
        found: dict[str, int] = {}
        if asked:
            device = os.stat(self.directory).st_dev
            theirs = set[int]().union(*(inodes_of(pid, device, self.directory) for pid in pids))
            for name, inode in asked:
                self._looks[name, inode] = self._looks.get((name, inode), 0) + 1
                if inode in theirs and is_ours(os.path.join(self.directory, name), inode):
                    found[name] = inode
        self.held |= found
        # The creator of a System V segment may have ended since the last look; its pid is known from then.
        seen = self._pids | set(pids)
        self._pids = set(pids)
        segments = {
            id: creator
            for id, (creator, _) in sysv_table().items()
            if creator in seen and id not in self.sysv_before and id not in self.sysv
        }
        self.sysv |= segments
        return found, segments


def is_ours(path: str, inode: int) -> bool:
    """Whether ``path`` is still that very file, a plain one, and this user's."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_ino == inode and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def remove(
    held: dict[str, int], sysv: dict[int, int], directory: str = DIRECTORY
) -> tuple[list[str], list[str]]:
    """Remove segments of a tree that is gone; what was removed, and what could not be, with the reason.

    One that a living process maps, holds open or has attached stays: it is shared with somebody. A
    process that may not be looked into (another user's) does not count; what it has mapped, it keeps."""
    removed, failed = [], []
    left = {name: inode for name, inode in held.items() if is_ours(os.path.join(directory, name), inode)}
    if left:
        device = os.stat(directory).st_dev
        shared = set[int]().union(*(inodes_of(pid, device, directory) for pid in all_pids()))
        for name, inode in left.items():
            path = os.path.join(directory, name)
            try:
                if inode not in shared and is_ours(path, inode):
                    os.unlink(path)
                    removed.append(name)
            except FileNotFoundError:
                pass
            except OSError as exc:
                failed.append(f"{path}: {exc.strerror}")
    table = sysv_table() if sysv else {}
    for id, creator in sysv.items():
        if table.get(id) == (creator, 0):
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.shmctl(id, IPC_RMID, None) == 0:
                removed.append(f"System V segment {id}")
            else:
                failed.append(f"System V segment {id}: {os.strerror(ctypes.get_errno())}")
    return removed, failed


def all_pids() -> Iterable[int]:
    """Every process there is."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
