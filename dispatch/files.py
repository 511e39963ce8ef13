"""Files written whole or not at all, and what is said when that fails."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import Final

from protocol import CodedError

_FULL: Final = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
}
_MISPLACED: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: readers meet the old content or the new, never a part, and
    no temporary file stays. Raises CodedError: NODE.DISK_FULL, NODE.IO."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # an interrupt must leave no temporary file either
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise failed_write(error, path, "could not be written", "try again") from error
        raise
    sync_folder(path.parent)


def shown(path: Path) -> str:
    """A path as it may stand in a one-line message: a name can hold line breaks and bytes of any kind."""
    name = str(path)
    return name if name.isprintable() else ascii(name)


def temporary_folder() -> str:
    """Where temporary files go, chosen as tempfile.gettempdir does, but without a file that is written on
    trial: with a full disk that one is another folder, or none at all, and whoever looks for what is there,
    or wants to end what fills the disk, has to find it."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for folder in (*filter(None, named), "/tmp", "/var/tmp"):  # noqa: S108 - as tempfile, see above
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return os.path.abspath(folder)
    return "/tmp"  # noqa: S108 - nothing can be written anywhere: what comes next says so


def sync_folder(folder: Path) -> None:
    """Make what was renamed or made in ``folder`` last, as far as its file system can (fsync(2))."""
    with contextlib.suppress(OSError):  # not every file system can; the content is synced by itself
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def failed_write(error: OSError, path: Path, what: str, remedy: str, *, opening: bool = False) -> CodedError:
    """A file operation that failed, by its name: NODE.DISK_FULL, NODE.IO, or CONFIG.INVALID when ``opening``
    a path that cannot be. ``what`` and ``remedy`` are the ends of a line that begins with the path."""
    number = error.errno or 0
    code, advice = "NODE.IO", f"check the disk, then {remedy}"
    if number in _FULL:
        code, advice = "NODE.DISK_FULL", f"{_FULL[number]}, then {remedy}"
    elif opening and number in _MISPLACED:
        code, advice = "CONFIG.INVALID", "name another folder"
    text = f"{shown(path)} {what} ({error.strerror or type(error).__name__}); {advice}"
    return CodedError.from_exception(error, code, text, {"file": str(path), "errno": number})
