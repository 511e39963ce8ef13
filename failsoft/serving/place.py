"""Where a running fleet is reached: a socket in a directory that is this user's alone.

The directory is ``$XDG_RUNTIME_DIR/failsoft`` where that variable names a directory of ours (XDG Base
Directory Specification), else ``failsoft-UID`` in the directory for temporary files. Whoever can open the
socket may stop the engines; so the directory's mode is 0700, and since anybody can make that name in
/tmp first, its owner is looked at before anything in it is believed (sticky directories, CWE-377).

Beside ``NAME.sock`` stands ``NAME.lock``, which the fleet's process holds with flock(2) as long as it
lives, and the kernel lets go of when it ends, however that was. It stays when the fleet ends: a lock
file that is removed can be locked twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dispatch.files import temporary_folder
from protocol import CodedError

_LONGEST: Final = 107
"""Most bytes of a socket's path: ``sun_path`` holds 108 with its zero (unix(7))."""
_CONNECT: Final = 20.0
"""Seconds for a connection."""


def socket_of(name: str) -> Path | None:
    """The socket of the fleet ``name``, or None when there is none. One that is there may be stale, its fleet
    was killed; so one where somebody listens comes first. Raises CodedError CONFIG.INVALID for a directory
    that is not ours alone."""
    paths = (folder / f"{name}.sock" for folder in _folders())
    found = [path for path in paths if os.path.exists(path)]
    return next(filter(answers, found), found[0] if found else None)


def sockets() -> dict[str, Path]:
    """All sockets by their fleets' names. Raises as `socket_of`."""
    names = sorted({path.stem for folder in _folders() for path in folder.glob("*.sock")})
    return {name: path for name in names if (path := socket_of(name)) is not None}


def answers(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(_CONNECT)
        try:
            one.connect(str(path))
        except OSError:
            return False
        return True


@contextmanager
def claimed(name: str) -> Iterator[Path]:
    """Hold the name of a fleet; the path for its socket, where nothing is now.

    Raises CodedError CONFIG.INVALID when another process holds it, the directory is not ours alone or
    cannot be written, or the path is too long for a socket."""
    folder = _candidates()[0]
    with _written(folder), contextlib.suppress(FileExistsError):  # what is there is looked at below
        folder.mkdir(mode=0o700)
    _check(folder)
    path, held = folder / f"{name}.sock", folder / f"{name}.lock"
    if len(os.fsencode(path)) > _LONGEST:
        raise CodedError(
            "CONFIG.INVALID",
            f"{path}: longer than the {_LONGEST} bytes of a socket's path; set a shorter TMPDIR or name",
        )
    with _written(held):
        lock = os.open(held, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with _written(held):
            _hold(lock, name)
        with _written(path):
            path.unlink(missing_ok=True)  # of a fleet that was killed: who holds the lock lives, and we do
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _hold(lock: int, name: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.read(lock, 32).decode("ascii", "replace").strip()
        raise CodedError(
            "CONFIG.INVALID",
            f"fleet {name!r} runs already, as pid {holder}: stop it with `failsoft engines down {name}`, "
            f"or give this one another name in its file's [fleet] table",
        ) from exc
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """What the file system refuses to do with ``path``, as one line: a full disk, a read-only one."""
    try:
        yield
    except OSError as exc:
        raise CodedError(
            "CONFIG.INVALID", f"{path}: {exc.strerror}; set XDG_RUNTIME_DIR to another directory of your own"
        ) from exc


def _candidates() -> list[Path]:
    """The directories that may be, the preferred one first. A shell and a service of the same user
    differ in XDG_RUNTIME_DIR, so who asks looks into both."""
    places = [Path(temporary_folder()) / f"failsoft-{os.geteuid()}"]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        places.insert(0, Path(runtime) / "failsoft")
    return places


def _folders() -> list[Path]:
    preferred, *others = _candidates()
    # One that somebody else has made in /tmp keeps nobody from what is in a directory of our own: nothing of
    # ours is in it (`claimed`).
    found = [folder for folder in others if os.path.lexists(folder) and not _wrong(folder)]
    if os.path.lexists(preferred):
        _check(preferred)
        found.insert(0, preferred)
    return found


def _check(folder: Path) -> None:
    wrong = _wrong(folder)
    if wrong:
        raise CodedError(
            "CONFIG.INVALID",
            f"{folder}: {wrong}, and whoever can write there can stop engines; remove it, or set "
            f"XDG_RUNTIME_DIR to a directory of your own",
        )


def _wrong(folder: Path) -> str:
    """Why it is not ours alone; "" when it is."""
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        return "is no directory" + (" but a symbolic link" if stat.S_ISLNK(facts.st_mode) else "")
    if facts.st_uid != os.geteuid():
        return f"belongs to user {facts.st_uid}"
    if facts.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""
