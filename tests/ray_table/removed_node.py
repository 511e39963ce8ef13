"""A node is removed ungracefully under an actor: what its caller gets. Prints one JSON line."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from faults import classify
from tests.ray_table.actors import Plain

BUDGET = 90.0


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    cluster.wait_for_nodes()
    actor: Any = Plain.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
    ).remote()
    assert ray.get(actor.where.remote(), timeout=60)[1] == node.node_id
    cluster.remove_node(node, allow_graceful=False)
    seen: dict[str, Any] = {}
    end = time.monotonic() + BUDGET
    while time.monotonic() < end:
        try:
            ray.get(actor.count.remote(), timeout=30)
            continue  # Ray takes a moment to notice
        except ray.exceptions.RayError as exc:
            fault = classify(exc)
            told = {
                "type": type(exc).__name__,
                "code": str(fault.code),
                "outcome": fault.outcome,
                "text": str(exc),
            }
        seen.setdefault("first", told)
        seen["last"] = told
        if told["code"] == "ACTOR.DIED":
            break
    print(json.dumps(seen), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
