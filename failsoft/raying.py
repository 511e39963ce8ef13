"""Ray for a command: a cluster's, or one of its own that ends with it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import ray

from protocol import CodedError

REACH: Final = 3.0
"""Seconds for a connection to a cluster's address."""
LATE: Final = 10.0
"""Seconds that a signal, which came while the loop stood still, has to reach its handler."""


@contextmanager
def ray_at(address: str | None) -> Iterator[None]:
    """Ray for this command: the cluster at ``address``, or a local one that ends with it. Raises
    CodedError CONFIG.INVALID where Ray does not start, and SystemExit from Ray's own handler when a SIGTERM
    comes meanwhile: then the loop's handler, if there is one, runs within `LATE` seconds as well."""
    if address is not None and (why := refused(address)) is not None:
        raise CodedError("CONFIG.INVALID", f"there is no Ray at {address}: {why}")
    # Ray's own words about starting are noise here; its failures are exceptions.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            ray.init(address="local", include_dashboard=False, **quiet)  # whatever RAY_ADDRESS says
    except (OSError, ValueError, RuntimeError) as exc:
        text = f"Ray does not start {f'at {address}' if address else 'locally'}: {exc}"
        if isinstance(exc, OSError) and not isinstance(exc, ConnectionError):
            # Its own folder: a full or read-only disk, or a path too long for the sockets in it.
            text += "; set RAY_TMPDIR to another, short one"
        raise CodedError("CONFIG.INVALID", text) from exc
    try:
        yield
    finally:
        ray.shutdown()


def refused(address: str) -> str | None:
    """Why nobody can be at ``address``, where it is HOST:PORT; None when somebody may be. Ray 2.60 itself
    goes on trying for minutes, deaf to signals meanwhile."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()
    except (OSError, OverflowError, ValueError) as exc:  # the last: no name to look up, no number
        return getattr(exc, "strerror", None) or str(exc)
    return None
