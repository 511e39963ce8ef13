"""rollout: sampling prompts over engines that may fail, with every sample accounted for.

`load_prompts` reads, `Router` chooses engines, `RolloutClient` asks through the poster pool, and
`SampleWriter` keeps what came, line by line.
"""

from dispatch.engines.dialect import Sampling
from dispatch.rollout.client import Failure, Group, RolloutClient, RolloutStats, Sample
from dispatch.rollout.output import SampleWriter
from dispatch.rollout.prompts import Prompt, load_prompts
from dispatch.rollout.routing import Router

__all__ = [
    "Failure",
    "Group",
    "Prompt",
    "RolloutClient",
    "RolloutStats",
    "Router",
    "Sample",
    "SampleWriter",
    "Sampling",
    "load_prompts",
]
