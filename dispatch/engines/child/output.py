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
from typing import Final

from dispatch.engines.child.log_files import LogFiles
from dispatch.engines.spec import LOG_BYTES, LOG_FILES
from protocol import defuse

MAX_LINES: Final = 200
"""Most last lines kept."""
MAX_BYTES: Final = 64 * 1024
"""Most bytes of output kept."""
MAX_LINE: Final = 1000
"""Longest line given out, in characters; the middle of a longer one is cut."""
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
