"""What a check is given and what it returns: values, nothing that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from dispatch.engines.config import EnginesFile

Severity = Literal["note", "warning", "error"]
"""``note``: to know, also that something was not checked; ``warning``: will fail under load or wastes
what others need; ``error``: the next start will fail."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found: by which ``check``, ``what`` it is, ``where`` (a pid, a path, an
    address), and the command or sentence that is the ``fix``."""

    check: str
    severity: Severity
    what: str
    where: str = ""
    fix: str = ""


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """What is examined: this machine, with the engines file ``file`` if one is given and the Ray at
    ``ray`` (empty: the one that Ray itself would connect to). ``mend``: what may be mended without harm
    is."""

    file: EnginesFile | None = None
    ray: str = ""
    mend: bool = False


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check. ``run`` blocks as long as it needs, in a thread of its own; after ``deadline`` seconds
    nobody waits for it any more."""

    name: str
    run: Callable[[Examined], list[Finding]]
    deadline: float = 10.0
