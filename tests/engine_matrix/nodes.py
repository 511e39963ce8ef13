"""``python -m tests.engine_matrix.nodes``: a Ray cluster with raylets that can be killed.

In a process of its own, for a test's process may be the driver of another Ray, and starting raylets changes
Ray's globals. Prints one JSON line at its start and one for every line on its standard input, which asks
for another node for engines; ends, and its raylets with it, at the input's end.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from ray.cluster_utils import Cluster

ENGINES: Final = 5
"""Engines that one node has room for; the head, where the driver is, has none."""
HEALTH: Final = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 3,
}
"""Ray's own check of a raylet, which by its defaults takes half a minute to notice a stopped one."""


def add(cluster: Cluster) -> int:
    """Another node for engines; its raylet's pid."""
    node: Any = cluster.add_node(num_cpus=1, resources={"engines": ENGINES})
    return int(node.all_processes["raylet"][0].process.pid)


def main() -> None:
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(json.dumps({"address": cluster.address, "raylet": add(cluster)}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"raylet": add(cluster)}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
