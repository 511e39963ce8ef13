"""Codes: what a failure is called, everywhere.

A code is ``FAMILY.REASON``. The family is a closed set and decides the default policy; the
reason is open, and users register their own. A code is never renamed and never reused: logs,
alert rules and dashboards of years ago still mean what they said.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

MAX_REASON: Final = 40
"""Longest reason, in characters: with it the longest token stays within 80 bytes."""

_REASON = re.compile(rf"[A-Z](?:[A-Z0-9_]{{0,{MAX_REASON - 2}}}[A-Z0-9])?\Z")


class Family(StrEnum):
    """The closed set of families, roughly from the innermost layer to the outermost."""

    TASK = "TASK"
    ACTOR = "ACTOR"
    NODE = "NODE"
    OBJECT = "OBJECT"
    TIMEOUT = "TIMEOUT"
    CANCEL = "CANCEL"
    TRANSPORT = "TRANSPORT"
    UPSTREAM = "UPSTREAM"
    REQUEST = "REQUEST"
    BACKPRESSURE = "BACKPRESSURE"
    POOL = "POOL"
    ENGINE = "ENGINE"
    WEIGHTS = "WEIGHTS"
    QUEUE = "QUEUE"
    CONFIG = "CONFIG"
    INTERNAL = "INTERNAL"
    UNKNOWN = "UNKNOWN"


class Code(str):
    """A well-formed code. It is a ``str``, so it compares, hashes, pickles and serialises as one.

    Raises ValueError for text that is no code: a code is written by a programmer, so a malformed
    one is a bug to be seen at import, not an input to be tolerated. Text of unknown origin goes
    through `protocol.read`, which never raises.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Code:
        if type(text) is Code:
            return text
        family, dot, reason = str(text).partition(".")
        if not dot:
            raise ValueError(f"{text!r} is not a code: write FAMILY.REASON, for instance TASK.FAILED")
        if family not in Family.__members__:
            known = ", ".join(Family.__members__)
            raise ValueError(
                f"{text!r} is not a code: there is no family {family!r}; the families are {known}"
            )
        if not _REASON.match(reason):
            raise ValueError(
                f"{text!r} is not a code: the reason {reason!r} must be 1 to {MAX_REASON} characters of "
                "A-Z, 0-9 and _, begin with a letter and not end with _"
            )
        return super().__new__(cls, text)

    @property
    def family(self) -> Family:
        """The part before the dot, which decides the default policy."""
        return Family(self.partition(".")[0])

    @property
    def reason(self) -> str:
        """The part after the dot."""
        return self.partition(".")[2]

    def __repr__(self) -> str:
        return f"Code({str(self)!r})"

    def __str__(self) -> str:
        return str.__str__(self)
