"""An engine's output: always read, its end kept, the whole of it in a file if wanted.

A pipe that nobody reads fills up after 64 KiB and blocks the engine in the middle of a print. And
the last lines are usually the only witness of why an engine ended, so they go into every report.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from protocol import defuse

MAX_LINES: Final = 200
"""Most last lines kept."""
MAX_BYTES: Final = 64 * 1024
"""Most bytes of output kept."""
MAX_LINE: Final = 1000
"""Longest line given out, in characters; the middle of a longer one is cut."""
_CHUNK: Final = 1 << 20


class Output:
    """Drains one pipe on the loop, a read of at most 1 MiB at a time, so that other tasks get their
    turn while an engine prints without end."""

    def __init__(self, log_path: str | os.PathLike[str] | None) -> None:
        self.ended = asyncio.Event()
        self._log_path = log_path
        self._log = self._pipe = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tail = bytearray()
        self._total = 0

    def attach(self, loop: asyncio.AbstractEventLoop) -> int:
        """Open pipe and log file and begin to drain; the write end, for the caller to pass on and
        close. Raises OSError when the log file cannot be opened."""
        if self._log_path is not None:
            Path(self._log_path).parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        if self._log >= 0:
            try:
                os.write(self._log, data)
            except OSError as exc:  # a full disk must not stop the engine; said where it will be read
                os.close(self._log)
                self._log = -1
                self._keep(f"\n[failsoft: the log file {self._log_path} cannot be written: {exc}]\n".encode())

    def _keep(self, data: bytes) -> None:
        self._total += len(data)
        self._tail += data[-MAX_BYTES:]
        del self._tail[:-MAX_BYTES]

    def last_lines(self) -> tuple[str, ...]:
        """The last lines, oldest first, as text without tokens: what an engine prints may come from
        a model, and must not pass for a failure of ours."""
        lines = self._tail.decode("utf-8", "replace").splitlines()
        if self._total > len(self._tail) and len(lines) > 1:
            del lines[0]  # its beginning is lost
        return tuple(defuse(_cut(line)) for line in lines[-MAX_LINES:])

    def close(self) -> None:
        """Stop draining. Idempotent; what was kept stays."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(pipe)
            os.close(pipe)
        log, self._log = self._log, -1
        if log >= 0:
            os.close(log)
        self.ended.set()


def _cut(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    half = MAX_LINE // 2
    return f"{line[:half]} …[{len(line) - 2 * half} characters cut]… {line[-half:]}"
