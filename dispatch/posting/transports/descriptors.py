"""File descriptors: every connection is one, and a limit met half-way fails POSTs that did nothing wrong."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Final

from protocol import CodedError

MARGIN: Final = 64
"""Descriptors beyond connections and what is open now: files, pipes and name look-ups to come."""


def check_descriptors(connections: int, what: str) -> int:
    """See that this process may open ``connections`` more descriptors, and raise its own soft limit
    where the hard one allows. ``what`` needs them, and is named where they cannot be had. Returns the
    soft limit that holds now.

    Raises CodedError CONFIG.INVALID where even the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _open_now() + MARGIN
    if _reaches(soft, needed):
        return soft
    if _reaches(hard, needed):
        # No higher than needed: programs that close or poll every possible descriptor, as some do
        # after a fork, take as long as the limit is high.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return needed
    raise CodedError(
        "CONFIG.INVALID",
        f"{what} needs {needed} file descriptors ({connections} connections, {needed - connections - MARGIN} "
        f"open already, {MARGIN} to spare), and this process may have {max(soft, hard)}: run "
        f"`ulimit -n {needed}` before it starts, as root where the hard limit is lower, or lower the "
        f"concurrency",
        {"needed": needed, "soft": soft, "hard": hard, "connections": connections},
    )


def _reaches(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def _open_now() -> int:
    """How many descriptors this process has open; 0 where nothing tells."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0
