"""Injectors: real signals to real processes, and a count of how many were really hit.

A kill that hit nothing proves nothing: each injector makes sure that the very process it means is
there (pid and start time), and raises LookupError when there is none to hit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dispatch.processes import is_alive


class Victim(Protocol):
    """What an injector needs of a process: what it is called, and which one it is."""

    @property
    def key(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def create_time(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Injury:
    """One injected failure: which signal hit what, and when (unix seconds)."""

    signal: str
    key: str
    pid: int
    at: float


def strike(victims: Sequence[Victim], how: signal.Signals, *, key: str | None = None, state: str) -> Injury:
    """Send ``how`` to the first of ``victims`` in ``state`` (to the one called ``key``, when given).

    Raises LookupError when none of them is there to be hit."""
    for victim in victims:
        if victim.state != state or key not in (None, victim.key):
            continue
        if not is_alive(victim.pid, victim.create_time):
            continue
        os.kill(victim.pid, how)
        return Injury(how.name, victim.key, victim.pid, time.time())
    raise LookupError(f"no {key or 'victim'} in state {state!r} to send {how.name} to")
