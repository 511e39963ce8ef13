"""Log files of an engine's output: rotated within a start, and of an engine's starts only the last ones.

So neither an engine that prints without end nor one that dies at once every time fills a disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Final

import psutil

RETRY: Final = 10.0
"""Seconds between two tries to write to a log file that could not be written."""


def for_start(folder: str | os.PathLike[str], key: str, start: int, keep: int) -> Path:
    """Where the output of this process's start number ``start`` of the engine ``key`` goes.

    Removes the files of that engine's older starts until ``keep`` starts remain with the new one, also of
    supervisors that are gone. What another living process writes stays. What cannot be removed stays, too:
    nothing here stops an engine."""
    name = key.replace("/", "-")
    mine = re.compile(re.escape(name) + r"\.(\d+)\.(\d+)\.log(\.\d+)?")
    starts: dict[tuple[int, int], tuple[float, list[str]]] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            found = mine.fullmatch(entry.name)
            if found is None:
                continue
            begun = int(found[1]), int(found[2])
            newest, files = starts.get(begun, (0.0, []))
            with contextlib.suppress(OSError):  # somebody has cleared up
                starts[begun] = max(newest, entry.stat().st_mtime), [*files, entry.path]
    by_age = sorted(starts, key=lambda begun: (starts[begun][0], begun))
    for pid, number in by_age[: max(len(by_age) - keep + 1, 0)]:
        if pid != os.getpid() and psutil.pid_exists(pid):
            continue
        for path in starts[pid, number][1]:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return Path(folder) / f"{name}.{os.getpid()}.{start}.log"


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
