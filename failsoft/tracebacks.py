"""Tracebacks in a log: where one begins and where it ends, while the lines of other processes run
through it.

Python prints frames indented and the exception at the line's start; Ray prints its own exception, the
frames of the remote side, and the exception once more. A chain is printed cause first, with a sentence
in between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from faults.text_faults import names_failure

MAX_LINES: Final = 2000
"""Most lines of one traceback that are kept; RecursionErrors are folded by Python long before that."""
MAX_BETWEEN: Final = 1000
"""Lines of others after which a traceback that never ended is taken as it is."""

_HEADER: Final = "Traceback (most recent call last):"
_GROUP: Final = "Exception Group Traceback "
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_INNER: Final = "Original exception:"  # below Ray's UnserializableException: one failure, printed twice
_EXCEPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,160}(?:\([A-Za-z0-9_]{1,80}\))?(?::|\Z)")
_REMOTE = re.compile(r"ray::[^\s()]{1,200}\(\)")


class _State(Enum):
    FRAMES = 1  # the exception is still to come
    NAMED = 2  # it has been printed; Ray may print frames and exceptions below it
    BELOW = 3  # in those frames
    BLANK = 4  # a chain may go on here
    CHAINED = 5  # it does


@dataclass(slots=True)
class Traceback:
    """One traceback as it is read: the lines, each with its number, without what a log puts before
    them; ``raw`` has them as they stood."""

    source: str
    at: str
    lines: list[tuple[int, str]] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    between: int = 0
    _state: _State = _State.FRAMES

    def take(self, number: int, text: str, raw: str) -> bool:
        """Whether the line belongs to it, which it then has."""
        state = self._next(text)
        if state is None or len(self.lines) >= MAX_LINES:
            return False
        self._state, self.between = state, 0
        self.lines.append((number, text))
        self.raw.append(raw)
        return True

    @property
    def wants(self) -> bool:
        """Whether its exception is still to come, so that what does not belong to it stands between."""
        remote = self._state is _State.NAMED and _REMOTE.search(self.lines[-1][1]) is not None
        return (remote or self._state in (_State.FRAMES, _State.BELOW)) and self.between < MAX_BETWEEN

    def parts(self) -> list[list[tuple[int, str]]]:
        """The exceptions of the chain, in the order in which they were printed: the cause first."""
        parts: list[list[tuple[int, str]]] = [[]]
        chained = False
        for number, text in self.lines:
            if chained and text.endswith(_HEADER):
                parts.append([])
            chained = text in _CHAINED or (chained and not text.strip())
            parts[-1].append((number, text))
        return parts

    def _next(self, text: str) -> _State | None:
        if not self.lines:
            # The tree of a group is indented as a whole, its exceptions too: any other line ends it.
            group = text.lstrip(" \t+|-").startswith(_GROUP)
            return _State.FRAMES if text.rstrip().endswith(_HEADER) and not group else _State.NAMED
        if (text in _CHAINED or text.rstrip() == _INNER) and self._state is not _State.FRAMES:
            return _State.CHAINED
        if not text.strip():
            return {_State.CHAINED: _State.CHAINED, _State.FRAMES: _State.FRAMES}.get(
                self._state, _State.BLANK
            )
        if text[0] in " \t|+":
            if self._state is _State.BLANK:
                return None
            # What Ray prints below its own exceptions: frames, or facts that are indented with tabs.
            below = self._state is _State.NAMED and text.startswith('  File "')
            return _State.BELOW if below else self._state
        if self._state is _State.CHAINED:
            if text.endswith(_HEADER) or _REMOTE.match(text):
                return _State.FRAMES
            return _State.NAMED if _EXCEPTION.match(text) else None
        if self._state in (_State.FRAMES, _State.BELOW) and _EXCEPTION.match(text):
            return _State.NAMED
        return None


def exception_line(part: list[tuple[int, str]]) -> tuple[int, str]:
    """The line that names the exception of a part; its first one where none does."""
    named = [(number, text) for number, text in part if _EXCEPTION.match(text) and text not in _CHAINED]
    return named[-1] if named else part[0]


def begins(text: str) -> bool:
    """Whether a traceback, or Ray's report of a failure without one, begins with this line."""
    # At the end of the line: a progress bar may stand before it. In the middle it is a quotation.
    return text.rstrip().endswith(_HEADER) or names_failure(text)
