"""Reading what a person has in hand: a file, a pipe, a FIFO; of any size, within a few MiB of memory.

What can't be read as text is refused in one line that says why and what to do (`Refused`). Of a long
log only the lines that may tell of a failure are handed on (`lines`): those that hold one of `MARKS`,
and every line for as long as the reader asks for each.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

CHUNK: Final = 1 << 20
"""Bytes that are read at a time; a longer line is looked at in pieces."""
FIFO_WAIT: Final = 5.0
"""Seconds to wait until somebody opens the other end of a FIFO that is named on the command line."""
MARKS: Final = (
    *(b"FS1.", b"fs1.", b'{"ts":', b'{\\"ts\\":', b"Traceback (", b"Error", b"Exception", b"Timeout"),
    *(b"Interrupt", b"Unhandled error", b"A worker died", b"Workers (tasks"),
)
"""Each line that tells of a failure holds one of these: tokens, events, tracebacks, exceptions, and what
Ray says in other words. Looking for each is faster than one pattern for all."""

_OVERLAP: Final = 128  # more than a token
_ZEROS: Final = bytes(CHUNK)
_HOLE: Final = 512  # fewer zero bytes than that are no hole of a sparse file
_COMPRESSED: Final = (
    (b"\x1f\x8b", "zcat"),
    (b"\x28\xb5\x2f\xfd", "zstdcat"),
    (b"BZh", "bzcat"),
    (b"\xfd7zXZ\0", "xzcat"),
)


class Refused(Exception):
    """The input can't be explained; the text says what it is and what to do, without its name."""


@contextlib.contextmanager
def opened(source: str) -> Iterator[tuple[BinaryIO, int]]:
    """The input that is named ``source`` (- for stdin), and how many bytes it has, 0 for what has no
    end that is known. Raises `Refused`, and OSError for what the system refuses."""
    if source == "-":
        if sys.stdin is None:
            raise Refused("is closed; pipe a text in, or name a file")
        yield sys.stdin.buffer, 0
        return
    # O_NONBLOCK, or a FIFO that nobody writes into would hold this up for ever.
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise Refused("is a directory; name a file in it")
        if stat.S_ISFIFO(status.st_mode) and not _written_to(fd):
            raise Refused(
                f"is a FIFO into which nobody wrote for {FIFO_WAIT:g} s; pipe the text in and write -"
            )
        os.set_blocking(fd, True)
        with os.fdopen(fd, "rb", closefd=False) as file:
            yield file, status.st_size if stat.S_ISREG(status.st_mode) else 0
    finally:
        os.close(fd)


def chunks(file: BinaryIO, source: str, size: int) -> Iterator[bytes]:
    """The input as UTF-8, in pieces; of a file that still grows, what it held when it was opened.
    Raises `Refused` when it is not text."""
    head = _full(file, 4096)
    for magic, tool in _COMPRESSED:
        if head.startswith(magic):
            what = f"{tool} FILE" if source == "-" else f"{tool} {source}"
            raise Refused(f"is compressed; use {what} | failsoft explain -")
    decode = None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decode = codecs.getincrementaldecoder("utf-16")("replace")
    elif _binary(head, size):
        raise Refused(
            "is binary; a traceback, a log or an events file is text (UTF-8, or UTF-16 with a mark)"
        )
    left = size - len(head) if size else -1
    chunk = head
    while chunk:
        if decode is not None:
            yield decode.decode(chunk).encode("utf-8", "replace")
        elif b"\0" not in chunk:
            yield chunk
        elif chunk != _ZEROS[: len(chunk)]:  # a hole: a log that was truncated while it was written to
            yield chunk.translate(None, b"\0")
        if not left:
            return
        chunk = file.read(CHUNK if left < 0 else min(CHUNK, left))
        left = left - len(chunk) if left > 0 else left


def lines(pieces: Iterator[bytes], every: Callable[[], bool]) -> Iterator[tuple[int, bytes]]:
    """Number and text of each line that holds a mark, and of every line while ``every()`` is true."""
    number = 1
    for chunk in _whole_lines(pieces):
        marks = iter(_marks(chunk))
        mark = next(marks, -1)
        at = 0
        while at < len(chunk):
            if not every():
                while 0 <= mark < at:
                    mark = next(marks, -1)
                if mark < 0:
                    number += chunk.count(b"\n", at)
                    break
                start = chunk.rfind(b"\n", at, mark) + 1 or at
                number += chunk.count(b"\n", at, start)
                at = start
            end = chunk.find(b"\n", at)
            yield number, chunk[at:] if end < 0 else chunk[at:end]
            if end < 0:
                break
            number, at = number + 1, end + 1


def _whole_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces that end with a line's end; a line that is longer than a piece is cut, with an underscore
    at each cut, so that no token begins or ends there, and an overlap, so that none is lost."""
    kept = b""
    for piece in pieces:
        kept += piece
        end = kept.rfind(b"\n") + 1
        if end:
            yield kept[:end]
            kept = kept[end:]
        elif len(kept) > CHUNK:
            yield kept + b"_"
            kept = b"_" + kept[-_OVERLAP:]
    if kept:
        yield kept


def _marks(chunk: bytes) -> list[int]:
    found: list[int] = []
    for mark in MARKS:
        at = chunk.find(mark)
        while at >= 0:
            found.append(at)
            at = chunk.find(mark, at + len(mark))
    return sorted(found)


def _written_to(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(FIFO_WAIT * 1000))


def _full(file: BinaryIO, count: int) -> bytes:
    """``count`` bytes, or all that there are: a pipe may hand them over one by one."""
    head = b""
    while len(head) < count and (more := file.read(count - len(head))):
        head += more
    return head


def _binary(head: bytes, size: int) -> bool:
    if b"\0" not in head:
        return False
    text = head.strip(b"\0")
    holes = (len(head) - len(head.lstrip(b"\0")), len(head) - len(head.rstrip(b"\0")))
    # Only a file on a disk has holes; zero bytes without end come from a device.
    return not size or b"\0" in text or any(0 < hole < _HOLE for hole in holes)
