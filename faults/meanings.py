"""The table from a code to its kind and blame: by family, with the exceptions by code.

The outcome and the default advice of a code stand in the catalogue (`protocol.catalogue`).
"""

from __future__ import annotations

from typing import Final

from faults.fault import Blame, Kind, Outcome
from protocol import Code, Family, catalogue

BY_FAMILY: Final[dict[Family, tuple[Kind, Blame]]] = {
    Family.TASK: (Kind.RAISED, Blame.CALLEE),
    Family.ACTOR: (Kind.DIED, Blame.CALLEE),
    Family.NODE: (Kind.DIED, Blame.NODE),
    Family.OBJECT: (Kind.LOST, Blame.NODE),
    Family.TIMEOUT: (Kind.TIMEOUT, Blame.UPSTREAM),
    Family.CANCEL: (Kind.CANCELLED, Blame.CALLER),
    Family.TRANSPORT: (Kind.TRANSPORT, Blame.UPSTREAM),
    Family.UPSTREAM: (Kind.BAD_REPLY, Blame.UPSTREAM),
    Family.REQUEST: (Kind.REJECTED, Blame.REQUEST),
    Family.BACKPRESSURE: (Kind.BACKPRESSURE, Blame.UPSTREAM),
    Family.POOL: (Kind.UNAVAILABLE, Blame.CALLER),
    Family.ENGINE: (Kind.DIED, Blame.UPSTREAM),
    Family.WEIGHTS: (Kind.RAISED, Blame.UPSTREAM),
    Family.QUEUE: (Kind.UNAVAILABLE, Blame.CALLEE),
    Family.CONFIG: (Kind.MISCONFIGURED, Blame.CALLER),
    Family.INTERNAL: (Kind.SYSTEM, Blame.CALLEE),
    Family.UNKNOWN: (Kind.UNKNOWN, Blame.CALLEE),
}

BY_CODE: Final[dict[str, tuple[Kind, Blame]]] = {
    "TASK.WORKER_CRASHED": (Kind.DIED, Blame.CALLEE),
    "TASK.GPU_FAILED": (Kind.SYSTEM, Blame.CALLEE),
    "TASK.ENVIRONMENT": (Kind.MISCONFIGURED, Blame.CALLER),
    "TASK.UNSCHEDULABLE": (Kind.MISCONFIGURED, Blame.CALLER),
    "ACTOR.UNAVAILABLE": (Kind.UNAVAILABLE, Blame.CALLEE),
    "ACTOR.WEDGED": (Kind.WEDGED, Blame.CALLEE),
    "ACTOR.TOO_MANY_PENDING": (Kind.BACKPRESSURE, Blame.CALLER),
    "ACTOR.NESTED_DIED": (Kind.DIED, Blame.NESTED),
    "NODE.DISK_FULL": (Kind.SYSTEM, Blame.NODE),
    "NODE.IO": (Kind.SYSTEM, Blame.NODE),
    "NODE.NETWORK": (Kind.UNAVAILABLE, Blame.NODE),
    "OBJECT.OWNER_DIED": (Kind.LOST, Blame.CALLER),
    "OBJECT.STORE_FULL": (Kind.BACKPRESSURE, Blame.NODE),
    "TIMEOUT.RAY_GET": (Kind.TIMEOUT, Blame.CALLEE),
    "TIMEOUT.NESTED": (Kind.TIMEOUT, Blame.NESTED),
    "TIMEOUT.POOL": (Kind.TIMEOUT, Blame.CALLER),
    "TRANSPORT.PROXY": (Kind.MISCONFIGURED, Blame.CALLER),
    "UPSTREAM.SERVER_ERROR": (Kind.SERVER_ERROR, Blame.UPSTREAM),
    "UPSTREAM.BAD_GATEWAY": (Kind.SERVER_ERROR, Blame.UPSTREAM),
    "UPSTREAM.REDIRECT": (Kind.MISCONFIGURED, Blame.CALLER),
    "UPSTREAM.NO_ENGINE": (Kind.UNAVAILABLE, Blame.UPSTREAM),
    "UPSTREAM.EJECTED": (Kind.UNAVAILABLE, Blame.UPSTREAM),
    "REQUEST.OUTCOME_UNKNOWN": (Kind.LOST, Blame.CALLEE),
    "POOL.MISUSE": (Kind.MISCONFIGURED, Blame.CALLER),
}


_OUTCOME: Final = {outcome.value: outcome for outcome in Outcome}


def meaning(code: Code) -> tuple[Kind, Blame, Outcome]:
    """Kind, blame and outcome of a code; those of its family where nothing more is known."""
    kind, blame = BY_CODE.get(code) or BY_FAMILY[code.family]
    return kind, blame, _OUTCOME[catalogue.entry(code).outcome]
