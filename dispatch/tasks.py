"""Tasks: small functions that Ray runs, for what would block its caller or has to be done on another node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@cache
def task_of(function: Callable[..., Any]) -> Any:
    """``function`` as a task that holds no resources and is run once. Made once as well: Ray exports each
    function anew, which blocks its caller for as long as the GCS is away."""
    remote: Any = ray.remote
    return remote(num_cpus=0, max_retries=0)(function)


async def on_node(node_id: str, timeout: float, function: Callable[..., Any], *args: Any) -> Any:
    """``function`` run on that very node. Raises TimeoutError after ``timeout`` seconds, when the task is
    cancelled, and RayError, also where the node is gone."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ref = task_of(function).options(scheduling_strategy=where).remote(*args)
    try:
        async with asyncio.timeout(timeout):
            return await ref
    except TimeoutError:
        ray.cancel(ref)
        raise
