"""An engine's output: always read, its end kept, the whole of it in rotated files if wanted.

A pipe that nobody reads fills up after 64 KiB and blocks the engine in the middle of a print. And
the last lines are usually the only witness of why an engine ended, so they go into every report.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import time
from pathlib import Path
from typing import Final

from dispatch.engines.spec import LOG_BYTES, LOG_FILES
from protocol import defuse

MAX_LINES: Final = 200
"""Most last lines kept."""
MAX_BYTES: Final = 64 * 1024
"""Most bytes of output kept."""
MAX_LINE: Final = 1000
"""Longest line given out, in characters; the middle of a longer one is cut."""
RETRY: Final = 10.0
"""Seconds between two tries to write to a log file that could not be written."""
_CHUNK: Final = 1 << 20
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and the cursor's moves (ECMA-48, CSI)
    r"|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?"  # titles and links (OSC)
    r"|\x1b[ -/]*[0-~]"
)
_UNREADABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Output:
    """Drains one pipe on the loop, a read of at most 1 MiB at a time, so that other tasks get their
    turn while an engine prints without end."""

    def __init__(
        self,
        log_path: str | os.PathLike[str] | None,
        log_bytes: int = LOG_BYTES,
        log_files: int = LOG_FILES,
    ) -> None:
        self.ended = asyncio.Event()
        self._log = LogFiles(log_path, log_bytes, log_files) if log_path is not None else None
        self._pipe = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tail = bytearray()
        self._headless = False  # the beginning of the first line kept is lost

    def attach(self, loop: asyncio.AbstractEventLoop) -> int:
        """Open pipe and log file and begin to drain; the write end, for the caller to pass on and
        close. Raises OSError when the log file cannot be opened."""
        if self._log is not None:
            self._log.open()
        self._pipe, write_end = os.pipe()
        with contextlib.suppress(OSError):  # above the user's limit of pipe memory; only fewer reads
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _CHUNK)
        os.set_blocking(self._pipe, False)
        self._loop = loop
        loop.add_reader(self._pipe, self._read)
        return write_end

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, _CHUNK)
        except BlockingIOError:
            return
        if not data:  # no process holds the write end any more
            self.close()
            return
        self._keep(data)
        if self._log is not None and (trouble := self._log.write(data)):
            self._keep(f"\n[failsoft: {trouble}]\n".encode())

    def _keep(self, data: bytes) -> None:
        if b"\r" in data:  # a progress bar must not push out the lines before it, state by state
            unended = self._tail.rfind(b"\n") + 1
            data = _last_states(bytes(self._tail[unended:]) + data)
            del self._tail[unended:]
        self._tail += data[-MAX_BYTES:]
        self._headless = self._headless or len(data) > MAX_BYTES or len(self._tail) > MAX_BYTES
        del self._tail[:-MAX_BYTES]

    def last_lines(self) -> tuple[str, ...]:
        """The last lines, oldest first, as text that can be read: without colours, of a progress bar
        the last state. And without tokens: what an engine prints may come from a model, and must not
        pass for a failure of ours."""
        lines = _last_states(bytes(self._tail)).decode("utf-8", "replace").split("\n")
        if self._headless and len(lines) > 1:
            del lines[0]
        if lines[-1] == "":
            del lines[-1]
        return tuple(defuse(_cut(_readable(line))) for line in lines[-MAX_LINES:])

    def close(self) -> None:
        """Stop draining. Idempotent; what was kept stays."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(pipe)
            os.close(pipe)
        if self._log is not None:
            self._log.close()
        self.ended.set()


class LogFiles:
    """``path`` and, older, ``path.1``, ``path.2``…: ``files`` in all, of at most ``size`` bytes each, so
    that no engine fills a disk. A file ends with a whole line where a line fits into one.

    Nothing here stops an engine: what cannot be written, on a full disk, is dropped, said, and tried
    again `RETRY` seconds later."""

    def __init__(self, path: str | os.PathLike[str], size: int, files: int) -> None:
        self._path = Path(path)
        self._size = size
        self._files = files
        self._file = -1
        self._written = 0  # bytes in the open file
        self._dropped = 0
        self._retry_at = 0.0  # monotonic

    def open(self) -> None:
        """Open ``path`` to append to. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._written = os.fstat(self._file).st_size

    def write(self, data: bytes) -> str:
        """Append ``data``; in words, what is wrong since this call, or nothing."""
        if self._retry_at and time.monotonic() < self._retry_at:
            self._dropped += len(data)
            return ""
        known = self._retry_at > 0
        note = f"\n[failsoft: {self._dropped} bytes of output are missing here]\n".encode()
        left = memoryview(note + data if self._dropped else data)
        try:
            if self._file < 0:
                self.open()
            while left:
                left = left[self._append(left) :]
        except OSError as exc:
            self.close()
            self._dropped = len(left) if len(left) <= len(data) else self._dropped + len(data)
            self._retry_at = time.monotonic() + RETRY
            return "" if known else f"the log file {self._path} cannot be written: {exc.strerror}"
        self._dropped = 0
        self._retry_at = 0.0
        return ""

    def _append(self, data: memoryview) -> int:
        """Write as much of ``data`` as goes into the current file, or into a new one; how much it was."""
        room = self._size - self._written
        if room < len(data):
            lines = bytes(data[:room]).rfind(b"\n") + 1 if room > 0 else 0
            room = lines or (room if self._written == 0 else 0)
            if room == 0:
                self._rotate()
                return 0
        done = os.write(self._file, data[:room])
        self._written += done
        return done

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):  # somebody has cleared up
                newer.replace(older)
        if self._files == 1:
            self._path.unlink(missing_ok=True)
        self.open()

    def close(self) -> None:
        """Close the open file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        self._written = 0


def _last_states(data: bytes) -> bytes:
    """``data`` as a terminal would show it: without what a carriage return has let be overwritten."""
    *ended, last = data.split(b"\n")
    again = b"\r" if last.endswith(b"\r") else b""  # what comes next overwrites it; until then it is shown
    return b"\n".join([*map(_last_state, ended), _last_state(last) + again])


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _readable(line: str) -> str:
    return _UNREADABLE.sub("\ufffd", _ESCAPES.sub("", line.rstrip("\r")))


def _cut(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    half = MAX_LINE // 2
    return f"{line[:half]} …[{len(line) - 2 * half} characters cut]… {line[-half:]}"
