"""The table of what the pools of the standard library raise, by full class name: ``multiprocessing`` and
``concurrent.futures``.
"""

from __future__ import annotations

from typing import Final

POOLS: Final[dict[str, str]] = {
    # A worker process was killed: BrokenProcessPool and BrokenThreadPool are below it.
    "concurrent.futures._base.BrokenExecutor": "TASK.WORKER_CRASHED",
    # A result or an exception that cannot be pickled: text only.
    "multiprocessing.pool.MaybeEncodingError": "TASK.UNSERIALIZABLE",
    # No TimeoutError of the builtin kind; and all that a Pool's caller gets when its worker was killed.
    "multiprocessing.context.TimeoutError": "TIMEOUT.DEADLINE",
    "multiprocessing.context.AuthenticationError": "CONFIG.INVALID",
    "multiprocessing.context.BufferTooShort": "TRANSPORT.PROTOCOL",
}
