"""dispatch: sending work where it may fail.

Inner rooms: `posting` (POSTs through a pool of poster actors), `engines` (inference engines as
supervised child processes), `rollout` (sampling prompts over both), `roles` (restart policy, training
groups). Names are imported when first
used, so that an engine's process does not load Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.engines import EngineFleet, EngineSpec, EngineSupervisor
    from dispatch.posting import PosterPool, Reply, Request
    from dispatch.rollout import RolloutClient

_HOME = {
    "EngineFleet": "dispatch.engines",
    "EngineSpec": "dispatch.engines",
    "EngineSupervisor": "dispatch.engines",
    "PosterPool": "dispatch.posting",
    "Reply": "dispatch.posting",
    "Request": "dispatch.posting",
    "RolloutClient": "dispatch.rollout",
}

__all__ = [
    "EngineFleet",
    "EngineSpec",
    "EngineSupervisor",
    "PosterPool",
    "Reply",
    "Request",
    "RolloutClient",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    return getattr(import_module(home), name)
