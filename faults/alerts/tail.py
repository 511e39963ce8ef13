"""Following an events file: whole lines as they appear, whatever happens to the file meanwhile.

The file may not exist yet, end in half a line, be truncated, be rotated away (another inode under the
name), hold binary rubbish or a line without end. None of that ends the following; all of it is
counted in `TailStats`. There is no thread: a regular file never blocks for long, and the loop gets
its turn after every 64 KiB.

Not detectable, by anyone who polls: a file truncated and written beyond the old position between two
polls. Rotate by renaming, or with copytruncate and an interval longer than the poll's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol import CodedError

MAX_LINE: Final = 1 << 20
"""Longest line that is read, in bytes; of a longer one nothing is kept but the count."""
CHUNK: Final = 1 << 16
"""Bytes read before the loop gets its turn."""

_log = logging.getLogger(__name__)
_decoder = msgspec.json.Decoder()


@dataclass(slots=True)
class TailStats:
    """What was seen so far. ``bad_lines`` are no JSON object; ``long_lines`` exceeded `MAX_LINE`;
    ``half_lines`` were unfinished when the file was rotated away, truncated, or the following ended."""

    bytes: int = 0
    events: int = 0
    bad_lines: int = 0
    long_lines: int = 0
    half_lines: int = 0
    truncations: int = 0
    rotations: int = 0
    open_error: str = ""
    """Why the file could last not be opened or read; empty when it never failed."""


class LineSplitter:
    """Bytes in, whole lines out, whatever the cuts between them. Holds at most ``max_line`` bytes."""

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._part = bytearray()
        self._skipping = False
        self.long_lines = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their newline."""
        lines: list[bytes] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._append(data[start:end])
            if not self._skipping:
                lines.append(bytes(self._part))
            self.reset()
            start = end + 1
        self._append(data[start:])
        return lines

    def reset(self) -> bytes:
        """What there is of an unfinished line, which is then forgotten."""
        part = bytes(self._part)
        self._part.clear()
        self._skipping = False
        return part

    def _append(self, piece: bytes) -> None:
        if self._skipping:
            return
        if len(self._part) + len(piece) > self._max:
            self._part.clear()
            self._skipping = True
            self.long_lines += 1
        else:
            self._part += piece


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The event on a line, or None when it holds no JSON object. NaN and Infinity, which Python's
    own encoder writes for a loss that exploded, are accepted although JSON has no such words."""
    event: Any = None
    try:
        event = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line.decode("utf-8"))
    return event if isinstance(event, dict) else None


class Tail:
    """An async iterator over the events of the file at ``path``, from its beginning.

    ``poll_interval`` (seconds) is how long it waits at the end of the file. With ``follow`` it goes
    on until `stop`, and then ends after what is there; without, it ends at the end of the file, and
    a file that cannot be read is a CodedError CONFIG.INVALID."""

    def __init__(
        self, path: str | Path, *, poll_interval: float = 0.2, follow: bool = True, max_line: int = MAX_LINE
    ) -> None:
        self.path = Path(path)
        self.stats = TailStats()
        self._poll = poll_interval
        self._follow = follow
        self._splitter = LineSplitter(max_line)
        self._fd = -1
        self._position = 0
        self._identity = (0, 0)
        self._stopping = False
        self._woken = asyncio.Event()

    def stop(self) -> None:
        """End the iteration after what is in the file now."""
        self._stopping = True
        self._woken.set()

    def poke(self) -> None:
        """Look at the file now instead of at the next poll."""
        self._woken.set()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events in lists; an empty list says that the end of the file was reached."""
        try:
            while True:
                last = self._stopping or not self._follow
                if self._fd < 0:
                    self._open()
                while (events := self._read()) is not None:
                    if events:
                        yield events
                    await asyncio.sleep(0)
                if last:
                    if events := self._decode([self._splitter.reset()], unfinished=True):
                        yield events
                    yield []
                    return
                yield []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll):
                        await self._woken.wait()
                self._woken.clear()
        finally:
            self._close()

    def _open(self) -> None:
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for its writer, and the loop with it.
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
            what = getattr(exc, "strerror", None) or str(exc)
        else:
            now = os.fstat(fd)
            if stat.S_ISREG(now.st_mode):
                same = self._identity == (now.st_dev, now.st_ino) and now.st_size >= self._position
                self._fd, self._identity = fd, (now.st_dev, now.st_ino)
                self._position = os.lseek(fd, self._position if same else 0, os.SEEK_SET)
                if not same:  # half a line of another file, which is gone, must not begin this one's first
                    self._splitter.reset()
                return
            os.close(fd)
            what = "it is not a regular file"
        if not self._follow:
            raise self._unreadable(what)
        if what != self.stats.open_error:
            self.stats.open_error = what
            _log.info("waiting for the events file %s: %s", self.path, what)

    def _read(self) -> list[dict[str, Any]] | None:
        """The events of the next piece of the file; None at its end."""
        try:
            return self._piece() if self._fd >= 0 else None
        except OSError as exc:  # a network file system: opened anew, at the same place, at the next poll
            self._close()
            what = exc.strerror or str(exc)
            if not self._follow:
                raise self._unreadable(what) from exc
            self.stats.open_error = what
            _log.warning("%s: cannot be read just now: %s", self.path, what)
            return None

    def _unreadable(self, what: str) -> CodedError:
        return CodedError(
            "CONFIG.INVALID", f"{self.path}: cannot read events: {what}; give the path of an events file"
        )

    def _piece(self) -> list[dict[str, Any]] | None:
        data = os.read(self._fd, CHUNK)
        if not data:
            if os.fstat(self._fd).st_size < self._position:
                self.stats.truncations += 1
                os.lseek(self._fd, 0, os.SEEK_SET)
                self._position = 0
                return self._decode([self._splitter.reset()], unfinished=True)
            if not self._rotated():
                return None
            # The writer may have added to the old file between our last read and its renaming.
            data = os.read(self._fd, CHUNK)
            if not data:
                self.stats.rotations += 1
                self._close()
                self._identity = (0, 0)
                events = self._decode([self._splitter.reset()], unfinished=True)
                self._open()
                return events
        self._position += len(data)
        self.stats.bytes += len(data)
        lines = self._splitter.feed(data)
        self.stats.long_lines = self._splitter.long_lines
        return self._decode(lines)

    def _rotated(self) -> bool:
        """Whether the name now leads to another file. While it leads nowhere, the old one is kept."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) != self._identity

    def _decode(self, lines: list[bytes], *, unfinished: bool = False) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for raw in lines:
            # NULs lead a file whose writer went on at its old offset after a truncation.
            line = raw.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\0")
            if not line:
                continue
            event = decode_line(line)
            if event is not None:
                events.append(event)
            elif unfinished:
                self.stats.half_lines += 1
            else:
                self.stats.bad_lines += 1
                if self.stats.bad_lines == 1:
                    _log.warning(
                        "%s: a line that is no JSON object, further ones are only counted: %.80r",
                        self.path,
                        line,
                    )
        self.stats.events += len(events)
        return events

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
