"""The session: this process's connection to Ray with which a pool was started, and whether it still is.

Others may end it under the pool. ``ray.shutdown()`` does; then the next call of an actor, ``ray.kill`` and
most else of Ray's API would start a new cluster of its own accord, on the caller's loop, while what was
awaited is never answered. And the raylet of this node may be killed, which takes with it all that this
process owns, wherever it runs: no poster can be made any more, and with Ray 2.60 the first ``ray.put``
after that ends the process, with status 1 and without an exception. So each is preceded by a look;
what remains is a message that is being put there in the very moment of the raylet's death.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Final

import ray

from protocol import CodedError

CONNECT_TIMEOUT: Final = 0.2
"""Seconds for a connection to the raylet's socket; a live one takes it at once, or its kernel does."""


class Session:
    """See the module. Make it where Ray is initialised."""

    def __init__(self) -> None:
        self.node, self._job = _who()
        self._socket = _raylet_socket()
        if self.orphaned() is not None:  # this Ray is here, so what was found is not where its raylet listens
            self._socket = None

    def ended(self) -> CodedError | None:
        """POOL.MISUSE where Ray was shut down since, or is another one now."""
        if ray.is_initialized() and _who() == (self.node, self._job):
            return None
        return CodedError(
            "POOL.MISUSE",
            "ray.shutdown() was called while the pool was in use: close the pool first, and make a new one "
            "after ray.init()",
        )

    def orphaned(self) -> CodedError | None:
        """NODE.DIED where this node's raylet is gone; None too where that cannot be told."""
        if self._socket is None:
            return None
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_TIMEOUT)
            try:
                probe.connect(self._socket)
            except (ConnectionRefusedError, FileNotFoundError):
                return CodedError(
                    "NODE.DIED",
                    "the raylet of this process's node is gone, and with it all that this process owns: no "
                    "poster can be made from here any more",
                )
            except OSError:
                return None  # a busy one's queue may be full
        return None

    def over(self) -> CodedError | None:
        """Why no poster can be made any more, if so."""
        return self.ended() or self.orphaned()


def _who() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _raylet_socket() -> str | None:
    """Where this node's raylet listens, None where this Ray does not tell."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._private.worker import global_worker

        node: Any = global_worker.node
        path = node.raylet_socket_name
        return path if isinstance(path, str) else None
    return None
