"""Placing: the placement group that holds one engine's resources for as long as anything of it may live.

One group of one bundle an engine, so that seven engines serve where there is no room for the eighth. Ray
moves the bundle by itself when its node dies (Ray: placement groups, fault tolerance), which is how an engine
comes back on another node.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dispatch.engines.keeping.calls import call
from dispatch.engines.spec import EngineSpec


class Place:
    """The room for one engine."""

    def __init__(self, spec: EngineSpec, key: str) -> None:
        self._bundle = {"CPU": spec.num_cpus, "GPU": spec.num_gpus, **spec.resources}
        self._key = key
        self._group: PlacementGroup | None = None

    def ask(self) -> None:
        """Ask for it; about a millisecond. Ray puts groups that are asked for together on different nodes
        as far as it can."""
        if self._group is None:
            bundle = {name: amount for name, amount in self._bundle.items() if amount}
            # Ray wants a bundle to hold something.
            self._group = placement_group([bundle or {"CPU": 0.001}], strategy="PACK", name="")

    async def options(self, timeout: float) -> dict[str, Any]:
        """The actor's options once there is room. Raises CodedError ENGINE.START_TIMEOUT, with what was asked
        for, after ``timeout`` seconds, and what Ray raises for resources that it does not take."""
        self.ask()
        assert self._group is not None
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in self._bundle.items() if amount)
        late = f"{self._key}, stage placement: not scheduled, no node has {wanted or 'room'} left"
        await call(self._group.ready(), timeout, "ENGINE.START_TIMEOUT", late)
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, 0)}

    def release(self) -> None:
        """Give it back. Idempotent."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():  # else it is gone with Ray
            remove_placement_group(group)
