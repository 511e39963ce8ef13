"""Placement: how capacity is split, and where posters run."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from protocol import CodedError


def split(total: int, parts: int) -> list[int]:
    """``total`` over ``parts`` as evenly as whole numbers allow; sums to ``total`` exactly. The first
    parts get what is left over. No parts, no shares."""
    if total < 0 or parts < 0:
        raise ValueError(f"cannot split {total} over {parts}")
    if parts == 0:
        return []
    each, left = divmod(total, parts)
    return [each + 1] * left + [each] * (parts - left)


def alive_nodes() -> list[str]:
    """Ids of the cluster's alive nodes, in a stable order."""
    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]  # Ray gives it no types
    return sorted(node["NodeID"] for node in nodes if node["Alive"])


def affinity(node: str) -> NodeAffinitySchedulingStrategy:
    """Prefer ``node``; run anywhere when it is gone or full."""
    return NodeAffinitySchedulingStrategy(node_id=node, soft=True)


def check_counts(concurrency: int, posters_per_node: int, nodes: int) -> None:
    """CONFIG.INVALID where the split would leave a poster without any share."""
    posters = posters_per_node * nodes
    if concurrency < posters:
        raise CodedError(
            "CONFIG.INVALID",
            f"concurrency {concurrency} is below the number of posters ({nodes} nodes × {posters_per_node} = "
            f"{posters}): raise concurrency to at least {posters} or lower posters_per_node",
        )
