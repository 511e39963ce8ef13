"""Removes a node under a call and prints, as JSON, what the caller got. A script: a cluster of its
own cannot live beside the one that the other tests use.

``python -m tests.ray_table.node_removed``"""

from __future__ import annotations

import json
import time
import traceback

import ray
from ray.cluster_utils import Cluster

from faults import classify, classify_text
from tests.ray_table.helpers import WAIT


@ray.remote(resources={"there": 1}, num_cpus=0)
class There:
    def ping(self) -> int:
        return 1


def main() -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}, connect=False
    )
    node = cluster.add_node(num_cpus=1, resources={"there": 1})
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    there = There.remote()
    ray.get(there.ping.remote(), timeout=WAIT)
    cluster.remove_node(node, allow_graceful=False)
    began = time.monotonic()
    answers, seen = 0, []
    while time.monotonic() - began < WAIT and not seen:
        try:
            ray.get(there.ping.remote(), timeout=5)
            answers += 1
        except Exception as exc:  # noqa: BLE001 - whatever it is, is what is asked
            fault = classify(exc)
            text = classify_text("".join(traceback.format_exception(exc)))
            seen.append(
                {
                    "type": type(exc).__name__,
                    "text": str(exc),
                    "code": fault.code,
                    "kind": fault.kind,
                    "outcome": fault.outcome,
                    "text_code": text.code,
                }
            )
        time.sleep(0.02)
    print(json.dumps({"answers": answers, "seconds": time.monotonic() - began, "seen": seen}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
