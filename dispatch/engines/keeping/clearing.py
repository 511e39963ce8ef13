"""Clearing: a lost supervisor and its engine seen to have ended, on whichever node they ran.

A supervisor that is stopped (SIGSTOP) or wedged cannot do what `ray.kill` asks of it, and its guard ends the
engine only once it is really gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import psutil
import ray
from ray.exceptions import RayError

from dispatch.engines.spec import EngineStatus
from dispatch.processes import is_alive, same_process, see_gone, until
from dispatch.tasks import on_node
from protocol import CodedError
from protocol.errors import here

_TASK: Final = 10.0
"""Seconds that a task on another node may take to begin."""


async def see_cleared(status: EngineStatus, timeout: float) -> None:
    """See that the supervisor and the engine of ``status`` end; SIGKILL for what does not by itself. A node
    that is gone has taken them with it. Raises CodedError ENGINE.STOP_FAILED, stage ``guard``, with the pids
    that are left ``timeout`` seconds after their supervisor's end, or unknown."""
    pids = [(status.supervisor_pid, status.supervisor_create_time), (status.pid, status.create_time)]
    if status.node == here().host:
        left = await _end(pids, timeout)
    elif status.node_id and ray.is_initialized():
        left = await _end_there(status.node_id, pids, timeout)
    else:
        return
    if left:
        raise CodedError(
            "ENGINE.STOP_FAILED",
            f"stage guard: {', '.join(f'process {pid}' for pid in left)} of {status.key} on {status.node}"
            " outlived its supervisor",
            {"stage": "guard", "pids": left},
        )


async def _end(pids: list[tuple[int, float]], timeout: float) -> list[int]:
    """End the first, then the others if their guard does not; which of them are left."""
    named = [(pid, created) for pid, created in pids if pid]
    if pids[0][0]:
        await see_gone(*pids[0])
    if not await until(lambda: not any(is_alive(*one) for one in named), timeout / 2):
        for pid, created in named:
            process = same_process(pid, created)
            if process is not None:
                with contextlib.suppress(psutil.Error):  # gone, or not ours to kill: it is reported as left
                    process.kill()
        await until(lambda: not any(is_alive(*one) for one in named), timeout / 2)
    return [pid for pid, created in named if is_alive(pid, created)]


async def _end_there(node_id: str, pids: list[tuple[int, float]], timeout: float) -> list[int]:
    try:
        return list(await on_node(node_id, _TASK + 2 * timeout, _end_blocking, pids, timeout))
    except RayError:
        return []  # the node is gone, or its raylet, which takes its workers with it
    except TimeoutError:
        return [pid for pid, _ in pids if pid]


def _end_blocking(pids: list[tuple[int, float]], timeout: float) -> list[int]:
    return asyncio.run(_end(pids, timeout))
