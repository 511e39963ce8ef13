"""A driver that leaves a detached actor and a detached placement group behind, and ends."""

import sys

import ray
from ray.util.placement_group import placement_group

ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)


@ray.remote(num_cpus=0.01)
class Left:
    def hello(self) -> str:
        return "hello"


actor = Left.options(name=sys.argv[3], lifetime="detached").remote()
assert ray.get(actor.hello.remote(), timeout=60) == "hello"
group = placement_group([{"CPU": 0.01}], name=sys.argv[3], lifetime="detached")
ray.get(group.ready(), timeout=60)
