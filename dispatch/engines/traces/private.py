"""The private temporary directory of one engine: made, locked, read and removed.

What an engine puts into TMPDIR (the sockets of ZeroMQ, compiled kernels, its own locks) stays when it is
SIGKILLed. In a directory of its own it can be taken away as a whole. The lock (flock(2)) says that its
guard lives, also to somebody in another pid namespace who shares /tmp and cannot see the guard.

Standard library only: the guard loads this file, as well as the owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat

PREFIX = "failsoft-engine-"
"""Beginning of the directory's name; the engine's marker follows."""
ERROR_FILE = "error.json"
"""The error file's name in the directory."""
SEGMENTS = ".segments"
"""The name of the guard's note in the directory of the shared memory that the tree has: for the case that
the guard and its owner are both killed."""
MAX_SEGMENTS = 1 << 20
"""Most bytes of that note that are read."""


def make(path: str) -> int:
    """Make the directory for this user alone, and lock it; the descriptor that holds the lock."""
    os.mkdir(path, 0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks: the guard is still found by its name
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # nobody has it but, for a moment, who asks `is_locked`
    return descriptor


def is_locked(path: str) -> bool:
    """Whether the guard that made the directory still lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def note(path: str, names: dict[str, int], sysv: dict[int, int]) -> None:
    """Add to the note of shared memory, as `shm.Watch.look` returns it."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(os.path.join(path, SEGMENTS), flags, 0o600), "w", encoding="ascii") as file:
        file.write(json.dumps({"names": names, "sysv": sysv}) + "\n")


def noted(path: str) -> tuple[dict[str, int], dict[int, int]]:
    """All that was noted. What is not as the guard writes it is left out: the engine could write there too,
    and a name is a name in /dev/shm only."""
    names: dict[str, int] = {}
    sysv: dict[int, int] = {}
    for line in read(path, SEGMENTS, MAX_SEGMENTS).splitlines():
        try:
            one = json.loads(line)
            names |= {name: int(inode) for name, inode in one["names"].items() if "/" not in name}
            sysv |= {int(id): int(creator) for id, creator in one["sysv"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return names, sysv


def read(path: str, name: str, limit: int) -> bytes:
    """The file ``name`` in the directory ``path``; empty when there is none, it is no plain file, or it is
    longer than ``limit`` bytes."""
    try:
        # Whatever the engine has put there: a symbolic link is not followed, a FIFO not waited for.
        descriptor = os.open(
            os.path.join(path, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            return b""
        return file.read(limit)


def remove(path: str) -> None:
    """Remove the directory and everything in it; links in it are removed, not followed. Nothing to do
    when it is not there. Raises OSError when something stays."""
    import shutil  # here: the guard has no use for it until its very end, and it takes a while to load

    if os.path.islink(path):  # put into its place by the engine
        os.unlink(path)
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return
    _open_up(path)
    with contextlib.suppress(FileNotFoundError):  # somebody else was faster
        shutil.rmtree(path)


def _open_up(path: str) -> None:
    """Give back the rights without which a folder cannot be emptied."""
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):  # a folder comes after the one it is in
        for name in names:
            below = os.path.join(folder, name)
            if not os.path.islink(below):
                with contextlib.suppress(OSError):
                    os.chmod(below, 0o700)
