"""Events: one JSON object a line, through structlog, always with the same keys.

``ts`` (unix seconds) · ``level`` · ``event`` (a dotted name, ``poster.died``) · ``code`` and ``id``
(of the failure, or null) · ``key`` (what it is about: ``poster/0``) · ``run`` · ``role`` · ``host`` ·
``pid`` · ``detail`` (text) · ``data`` (everything else) · ``token`` (the failure's token, or null: last
in the line, so that a line cut at either end still names its failure). Alert rules, ``failsoft
explain`` and dashboards read these; a new fact goes into ``data``, never beside it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec
import structlog

from protocol.codes import Code
from protocol.reading import Reading, read, trust_facts
from protocol.safe import clean, json_safe
from protocol.token import Trust, defuse, mint, new_id

KEYS: Final = (
    *("ts", "level", "event", "code", "id", "key", "run", "role", "host", "pid", "detail", "data", "token"),
)
Level = Literal["debug", "info", "warning", "error"]

_encoder = msgspec.json.Encoder()


class Events:
    """Where events go: a file (`to_file`), or the stdlib logger ``failsoft`` when none is named."""

    def __init__(self, sink: Any = None, *, run: str = "", role: str = "") -> None:
        self._sink = sink if sink is not None else _Stdlib()
        self._log = structlog.wrap_logger(
            self._sink,
            processors=[_fixed_keys, _render],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
            run=run,
            role=role,
            host=socket.gethostname(),
        )

    @classmethod
    def to_file(cls, path: Path, *, run: str, role: str) -> Self:
        """Append to ``path``, each event with one write, so that several processes may share it. A file that
        was renamed or removed (rotated) is left for a new one of that name, at the next event. Where writing
        fails later, on a full disk, events go to the logger until it works again: whoever tells of a failure
        does not fail for it. Raises OSError when ``path`` cannot be opened."""
        return cls(_File(path), run=run, role=role)

    def emit(
        self,
        event: str,
        *,
        level: Level = "info",
        error: BaseException | None = None,
        code: Code | str | None = None,
        key: str = "",
        detail: str = "",
        **data: Any,
    ) -> None:
        """Write one event. ``error`` fills in code, id and detail where they are not given."""
        found = read(error) if error is not None else None
        if found is not None:
            code = code or found.code
            detail = detail or found.detail or clean(error)
            data |= trust_facts(found)  # or the line would be believed further
        occurrence, token = _occurrence(code, found)
        getattr(self._log, level)(
            event,
            level=level,
            code=str(code) if code else None,
            id=occurrence,
            key=clean(key, 256),
            detail=defuse(clean(detail)),  # the line's own token stands in its last key
            data=json_safe(data),
            token=token,
        )
        sink = self._sink
        if isinstance(sink, _File) and sink.missing and not sink.full:
            count, sink.missing = sink.missing, 0
            self.emit("events.missing", level="warning", count=count, detail="they are in the process's log")

    def close(self) -> None:
        """Close the file, if there is one. Idempotent."""
        close = getattr(self._sink, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _occurrence(code: Code | str | None, found: Reading | None) -> tuple[str | None, str | None]:
    if not code:
        return None, None
    if found is not None and found.raw and found.code == code:
        return found.id, found.raw
    occurrence = found.id if found is not None and found.id else new_id()
    # Not signed where the code was read from what anybody could have written: as in `CodedError.token`.
    read_unsigned = found is not None and found.code == code and found.trust < Trust.SIGNED
    return occurrence, mint(code, occurrence, key=b"" if read_unsigned else None)


def _fixed_keys(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event["ts"] = round(time.time(), 6)
    event["pid"] = os.getpid()  # not once and for all: a fork inherits the logger
    return {key: event.get(key) for key in KEYS}


def _render(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    return _encoder.encode(event).decode()


class _File:
    """A structlog sink: whole lines, appended with a single write each (POSIX: O_APPEND writes do
    not interleave on a local file). What cannot be written, on a full disk, goes to the logger."""

    def __init__(self, path: Path) -> None:
        self.missing = 0
        """How many events the file lacks and has not told of."""
        self.full = False
        """Whether the last one could not be written."""
        self._path = path
        self._at = os.path.abspath(path)  # the program may change its directory
        self._fd = self._open()
        self._torn = b""  # what ends a half-written line
        self._logger = _Stdlib()

    def _open(self) -> int:
        return os.open(self._at, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _follow(self) -> None:
        """Go on in the file that has the name now: whoever follows the name would miss the rest."""
        with suppress(OSError):  # its directory may be gone: the one that is open has to do
            try:
                same = os.path.samestat(os.stat(self._at), os.fstat(self._fd))
            except FileNotFoundError:
                same = False
            if not same:
                fd = self._open()
                os.dup2(fd, self._fd, inheritable=False)  # under the number that another thread may be using
                os.close(fd)

    def _write(self, level: Level, line: str) -> None:
        if self._fd < 0:
            return
        self._follow()
        data = self._torn + line.encode() + b"\n"
        try:
            while data:  # a second time only where the disk fills up right now: then it raises
                data = data[os.write(self._fd, data) :]
                self._torn = b"\n"
        except OSError as exc:
            if not self.full:
                why = f"{self._path} cannot be written, events go here until it can: {exc.strerror}"
                self._logger.warning(why)
            self.full = True
            self.missing += 1
            getattr(self._logger, level)(line)
        else:
            self.full, self._torn = False, b""

    debug = partialmethod(_write, "debug")
    info = partialmethod(_write, "info")
    warning = partialmethod(_write, "warning")
    error = partialmethod(_write, "error")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Stdlib:
    """A structlog sink: the stdlib logger ``failsoft``, for programs that set up their own logging."""

    def __init__(self) -> None:
        log = logging.getLogger("failsoft")
        self.debug, self.info, self.warning, self.error = log.debug, log.info, log.warning, log.error
