"""The error file: a failure that a dying process leaves behind for its parent.

The parent names a path that does not exist yet, in a directory that only its own user may write to; the
child writes its failure there (`protocol.carriers.child` does that for whatever goes unhandled); the
parent, once the child has ended, asks `failure_of`. The file is JSON: the whole CodedError as data, and
its token, so that a text search finds the failure as well.

The first failure wins. The file is linked into place whole, so that a reader sees all of it or nothing,
and of several processes and threads that write at once exactly one succeeds. A file that is there is
never replaced: a path serves one run of one child.

A reader believes what it reads, codes and all: the file is as trustworthy as the directory it lies in.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from protocol.boundary import Namer, mended
from protocol.boundary import named as name_it
from protocol.carriers.exit_status import SIGNAL, read_status
from protocol.codes import Code, Family
from protocol.errors import CARRIED, CODE_TRUST, CodedError, Link, Origin, notes_of
from protocol.reading import FOREIGN, trust_facts
from protocol.safe import MAX_TEXT, clean, json_safe
from protocol.token import MAX_TOKEN, is_id, new_id

FORMAT: Final = 1
"""The format's number, in the member ``failsoft``; a release with another one writes a higher number."""
MAX_FILE: Final = 256 * 1024
"""Largest error file, in bytes. Of a failure that is larger the data, then the causes, are left out."""
PROCESS_END: Final = "process_end"
"""In the data of a failure from a file: how the process ended after it (`failure_of`)."""

FOREIGN_CODE: Final = "foreign_code"
"""In the data of a failure from a later release: its code as it stood in the file."""

_TOKEN = re.compile(r"FS[0-9]{1,3}\.[A-Z]+\.[A-Z0-9_]+\.([0-9A-Z]{8})\.[0-9A-Z]{8}\Z")
_KEPT: Final = (CODE_TRUST, CARRIED)  # left out, they would make the code more than it is
_PREFIX: Final = ".failsoft-"

_log = logging.getLogger("failsoft")
_encode = msgspec.json.Encoder().encode


class _File(msgspec.Struct, frozen=True, omit_defaults=True):
    failsoft: int
    code: str
    id: str
    token: str
    detail: str
    data: dict[str, Any]
    origin: Origin
    chain: tuple[Link, ...]
    notes: tuple[str, ...] = ()


class _Later(msgspec.Struct, frozen=True):
    """What any later release is expected to write as well, whatever becomes of the rest."""

    failsoft: int
    code: str = ""
    token: str = ""
    detail: str = ""


def write(path: str | os.PathLike[str], exc: BaseException, *, name: Namer | None = None) -> bool:
    """Leave ``exc`` as the file ``path``, readable by its owner alone; True when this call did.

    False when there is a file already (an earlier failure's), and when the operating system refuses: a
    full disk, no such directory, a file system without hard links. The reason is then logged, and nothing
    is left behind: a process that dies of one failure must not die of reporting it instead. ``name`` names
    an exception that carries no code (see `named`), and what it raises is raised."""
    path = os.path.abspath(path)
    if os.path.lexists(path):
        return False
    body = _body(mended(named(exc, name)))
    try:
        return _put(path, body)
    except OSError as refused:
        _log.warning(
            "error file %s could not be written: %s; give a path in an existing directory with free space, "
            "on a file system with hard links",
            path,
            refused,
        )
        return False


def _put(path: str, body: bytes) -> bool:
    fd, temporary = tempfile.mkstemp(prefix=_PREFIX, dir=os.path.dirname(path))  # mode 0600
    try:
        try:
            # With os alone: when the interpreter ends, there is no open() any more.
            left = memoryview(body)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)  # some file systems find out only here that they are full
        finally:
            os.close(fd)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):  # it must not hide what went wrong above; it is only litter
            os.unlink(temporary)
    return True


def named(exc: BaseException, name: Namer | None = None) -> CodedError:
    """``exc`` as a CodedError: `protocol.boundary.named`, where nothing else names them, MemoryError is
    NODE.OUT_OF_MEMORY, KeyboardInterrupt TASK.PROCESS_KILLED (by SIGINT) and SystemExit TASK.PROCESS_EXITED
    (its text the detail)."""
    kind = type(exc)  # not isinstance, which asks a foreign __class__
    if issubclass(kind, KeyboardInterrupt):
        return name_it(exc, code="TASK.PROCESS_KILLED", name=name, data={SIGNAL: "SIGINT"})
    if issubclass(kind, SystemExit):
        return name_it(exc, code="TASK.PROCESS_EXITED", name=name, detail=clean(exc))
    fallback = "NODE.OUT_OF_MEMORY" if issubclass(kind, MemoryError) else "TASK.FAILED"
    return name_it(exc, code=fallback, name=name)


def _body(error: CodedError) -> bytes:
    whole = _File(
        FORMAT,
        str(error.code),
        error.id if is_id(error.id) else new_id(),
        error.token,
        error.detail,
        error.data,
        error.origin,
        error.chain,
        notes_of(error),
    )
    try:
        body = _encode(whole)
    except (TypeError, ValueError, OverflowError, RecursionError):
        # Attributes replaced by what JSON lacks, or a class whose name is no valid UTF-8.
        whole = _cleaned(whole)
        body = _encode(whole)
    if len(body) > MAX_FILE:
        kept = {key: clean(whole.data[key], MAX_TEXT) for key in _KEPT if key in whole.data}
        whole = replace(whole, data={**kept, "…": "the data, too large for an error file, was left out"})
        body = _encode(whole)
    if len(body) > MAX_FILE:
        body = _encode(replace(_cleaned(whole), chain=()))
    return body


def _cleaned(whole: _File) -> _File:
    at = whole.origin
    return replace(
        whole,
        token=clean(whole.token, 80),
        detail=clean(whole.detail),
        data=json_safe(whole.data),
        origin=Origin(
            clean(at.host, 256), at.pid, clean(at.actor, 256), clean(at.type, 256), clean(at.text, MAX_TEXT)
        ),
        chain=tuple(
            Link(clean(link.type, 256), clean(link.text, MAX_TEXT), clean(link.code, 80), link.notes)
            for link in whole.chain
        ),
    )


def read(path: str | os.PathLike[str]) -> CodedError | None:
    """The failure in the file ``path``, equal to the one that was written; None when there is no file, or
    it is not whole, not ours, or larger than `MAX_FILE`. Never raises for what it finds; a file that is
    there but may not be read is logged.

    A failure of a later release is carried on: one whose code this release cannot hold is UNKNOWN.FOREIGN,
    with the code as it stood in the data (``foreign_code``) and its token (`CodedError.token`)."""
    try:
        body = _contents(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as refused:
        _log.warning("error file %s could not be read: %s", path, refused)
        return None
    try:
        whole = msgspec.json.decode(body, type=_File)
    except (msgspec.ValidationError, RecursionError):
        return _error_of_a_later_release(body)
    except (msgspec.DecodeError, ValueError):
        return None  # half a file, or no JSON at all
    if whole.failsoft < FORMAT:
        return None
    code = _code(whole.code)
    if code is None or not is_id(whole.id):
        return _foreign(whole) if code is None or whole.failsoft > FORMAT else None
    data = whole.data if code == whole.code else {**whole.data, FOREIGN_CODE: whole.code}
    error = CodedError(code, id=whole.id, origin=whole.origin)
    # Not through the constructor: what was cleaned once is carried on as it stands.
    error.detail, error.data, error._chain = whole.detail, data, whole.chain
    error.args = (code, whole.detail)
    for note in whole.notes:
        error.add_note(note)
    return error


def _code(text: str) -> Code | None:
    try:
        return Code(text)
    except ValueError:
        family = text.partition(".")[0]
        return Code(f"{family}.UNKNOWN") if family in Family.__members__ else None


def _error_of_a_later_release(body: bytes) -> CodedError | None:
    try:
        later = msgspec.json.decode(body, type=_Later)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return _foreign(later) if later.failsoft > FORMAT else None


def _foreign(file: _File | _Later) -> CodedError:
    data = {FOREIGN_CODE: file.code}
    id = None
    if len(file.token) <= MAX_TOKEN and (shape := _TOKEN.match(file.token)):
        data[CARRIED] = file.token
        id = shape[1] if is_id(shape[1]) else None
    return CodedError(FOREIGN, file.detail, data, id=id)


def _contents(path: str | os.PathLike[str]) -> bytes:
    # Not blocking: the path may be somebody's FIFO, which opens only when somebody writes.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE:
            return b""
        return file.read(MAX_FILE + 1)[:MAX_FILE]


def failure_of(
    returncode: int, path: str | os.PathLike[str] | None, *, oom: bool = False
) -> CodedError | None:
    """Why the child that ended with ``returncode`` (as ``subprocess`` has it) failed; None for 0.

    The failure is the one in the error file ``path``, and ``process_end`` in its data says how the process
    ended after it: the ``exit_status``, or the ``signal`` that came later with the code that it would have
    had. Without a file it is what the exit status says (`read_status`; ``oom`` as there), believed no
    further than that.

    A child that ended with 0 succeeded, whatever the file says: a thread or a task of it failed and it went
    on. `read` still tells. For the same reason the failure of a child that went on and was killed much later
    is the one in the file: the first wins, and ``process_end`` has the other."""
    if returncode == 0:
        return None
    end = read_status(returncode, oom=oom)
    assert end.code is not None
    error = read(path) if path is not None else None
    if error is None:
        return CodedError(end.code, end.detail, {**end.data, **trust_facts(end)})
    error.data[PROCESS_END] = {**end.data, "code": str(end.code)} if SIGNAL in end.data else end.data
    return error
