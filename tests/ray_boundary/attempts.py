"""Far sides that count their attempts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray

from faults import name_of
from protocol import CodedError, coded
from tests.ray_boundary.shapes import ABORTED, RefitAborted


def attempt(path: str, how: str = "coded") -> int:
    """Count this attempt by a line in a file, and fail with an occurrence of its own, which the line names.
    ``how``: a CodedError (``coded``), a ``subclass`` of it, a ``foreign`` one; or ``succeed second``, or
    ``die first``."""
    error: CodedError = RefitAborted(3, step=17) if how == "subclass" else CodedError(ABORTED, "once more")
    error.id = CodedError(ABORTED).id
    with Path(path).open("a") as file:
        file.write(f"{error.id}\n")
    count = len(Path(path).read_text().split())
    if how == "succeed second" and count == 2:
        return count
    if how == "die first" and count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "foreign":
        raise ValueError("no code at all")
    raise error


class Attempts:
    def attempt(self, path: str, how: str = "coded") -> int:
        return attempt(path, how)


class AttemptsAsync:
    async def attempt(self, path: str, how: str = "coded") -> int:
        return attempt(path, how)


def callables() -> dict[str, Any]:
    """What makes an attempt, by where it runs."""
    return {
        "task": ray.remote(num_cpus=0)(attempt),
        "coded task": ray.remote(num_cpus=0)(coded(name=name_of)(attempt)),
        "sync actor": ray.remote(num_cpus=0)(Attempts).remote().attempt,
        "async actor": ray.remote(num_cpus=0)(AttemptsAsync).remote().attempt,
    }
