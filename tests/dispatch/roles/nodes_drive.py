"""A driver of its own on a cluster of two nodes, with a rank on each. It prints what it has seen as one JSON
object."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import ray

from dispatch.processes import is_alive
from dispatch.roles import Limits, TrainingGroup
from protocol import CodedError
from tests.dispatch.posting.posters.cluster_drive import SOON_DEAD, cluster_of
from tests.dispatch.roles.ranks import Trainer, group_of

LIMITS = Limits(interval=0.2, silence=6.0, unavailable=20.0)


async def main(cluster: Any) -> dict[str, Any]:
    own = ray.get_runtime_context().get_node_id()
    told: dict[str, Any] = {}
    async with TrainingGroup(
        Trainer, 2, name="two", resources={"CPU": 0.5}, strategy="SPREAD", limits=LIMITS
    ) as group:
        infos = [info for info in group.ranks if info is not None]
        told["nodes"] = len({info.node for info in infos})

        # Stopped on the other node: ray.kill does not reach it, and no process of this node may be asked.
        (there,) = [info for info in infos if info.node != own]
        os.kill(there.pid, signal.SIGSTOP)
        told["stopped"] = (await group.failed()).data["code"]
        await group.restart("a rank was stopped")
        told["stopped_is_alive"] = is_alive(there.pid, there.create_time)
        told["steps"] = await group.call("step", timeout=20.0)

        # Its node goes, and a rank with it; there is room for both on the one that is left.
        (there,) = [info for info in group.ranks if info is not None and info.node != own]
        node = next(one for one in cluster.worker_nodes if one.node_id == there.node)
        cluster.remove_node(node, allow_graceful=False)
        error: CodedError = await group.failed()
        told["node_gone"] = [error.code, error.data["rank"] == group.ranks.index(there)]
        told["why"] = error.data["code"]
        told["epoch"] = (await group.restart("a node is gone")).epoch
        told["nodes_after"] = len({info.node for info in group.ranks if info is not None})
        told["gone_is_alive"] = is_alive(there.pid, there.create_time)
        told["steps_after"] = await group.call("step", timeout=20.0)
    told["placement_groups"] = len(group_of("two"))
    return told


if __name__ == "__main__":
    with cluster_of(2, SOON_DEAD) as cluster:
        print(json.dumps(asyncio.run(main(cluster))), flush=True)
