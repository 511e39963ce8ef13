"""Restart policy by role: which actors Ray may restart by itself, and which never.

What Ray does (docs.ray.io, "Actor Fault Tolerance"): with ``max_restarts`` an actor that died is made again
by running its constructor, so its state is what the constructor makes; while that lasts a call of it raises
ActorUnavailableError, afterwards calls succeed. Nobody is told that it is another one. ``max_task_retries``
is how often Ray sends a call again that was lost with the process: 0 is at most once, anything else is at
least once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec


class Role(StrEnum):
    """What an actor has that a restart would lose."""

    STATELESS = "stateless"
    """Nothing beyond its constructor's arguments: a reward function, a tokenizer, the front of a router. A
    data server only if it keeps no position: one that does hands out the same samples again."""
    IDEMPOTENT = "idempotent"
    """Stateless, and each of its calls may run twice with the effect of one."""
    OWNER = "owner"
    """Something outside of Ray: a child process, connections with requests in flight, a lock. Supervisors
    and posters."""
    RANK = "rank"
    """A part of a training group."""


class Policy(msgspec.Struct, frozen=True):
    """Ray's two numbers for a role, and why they are what they are."""

    max_restarts: int
    max_task_retries: int
    why: str


POLICIES: Final[dict[Role, Policy]] = {
    Role.STATELESS: Policy(
        -1, 0, "a new one is as good as the old; a call that was lost may have run, so its caller decides"
    ),
    Role.IDEMPOTENT: Policy(
        -1,
        3,
        "as stateless, and a lost call may be sent again; not for ever, for its input may be what kills",
    ),
    Role.OWNER: Policy(
        0,
        0,
        "a restarted one would have lost what it owned and not know it; its keeper makes another",
    ),
    Role.RANK: Policy(
        0, 0, "a rank alone cannot come back: the others hold its collectives and are ahead of its weights"
    ),
}


def options_for(role: Role | str) -> dict[str, Any]:
    """The options for ``actor_class.options(...)`` that the role decides. Raises ValueError for no role."""
    policy = POLICIES[Role(role)]
    return {"max_restarts": policy.max_restarts, "max_task_retries": policy.max_task_retries}
