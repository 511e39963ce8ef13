"""The values: what a failure means (`Fault`) and what is done about it (`Decision`)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from protocol import Code, Trust


class Kind(StrEnum):
    """What sort of thing happened."""

    RAISED = "raised"
    DIED = "died"
    UNAVAILABLE = "unavailable"
    WEDGED = "wedged"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    LOST = "lost"
    TRANSPORT = "transport"
    SERVER_ERROR = "server_error"
    BAD_REPLY = "bad_reply"
    REJECTED = "rejected"
    BACKPRESSURE = "backpressure"
    MISCONFIGURED = "misconfigured"
    SYSTEM = "system"
    UNKNOWN = "unknown"


class Blame(StrEnum):
    """Who is at fault, seen from the caller. ``NESTED`` is something that our callee called: the
    callee itself is alive, and replacing it would be wrong."""

    CALLEE = "callee"
    NESTED = "nested"
    CALLER = "caller"
    NODE = "node"
    UPSTREAM = "upstream"
    REQUEST = "request"


class Outcome(StrEnum):
    """What is known of the work: it did not run, it may have, it ran."""

    NOT_RUN = "not_run"
    UNKNOWN = "unknown"
    RAN = "ran"


class Action(StrEnum):
    """What to do. The catalogue's advice uses the same words."""

    RETRY_SAME = "retry_same"
    RETRY_ELSEWHERE = "retry_elsewhere"
    WAIT = "wait"
    RECREATE = "recreate"
    CANCEL = "cancel"
    GIVE_UP = "give_up"

    @property
    def sends_again(self) -> bool:
        """Whether the work is submitted once more."""
        return self not in (Action.CANCEL, Action.GIVE_UP)


class Fault(msgspec.Struct, frozen=True):
    """What a failure means.

    ``retry_after`` is what the server asked for (seconds), ``status`` the HTTP status where there
    was one, ``evidence`` the text or type that it was read from, ``id`` the occurrence."""

    kind: Kind
    code: Code
    blame: Blame
    outcome: Outcome
    trust: Trust
    retry_after: float | None = None
    status: int | None = None
    evidence: str = ""
    id: str = ""

    @property
    def forgivable(self) -> bool:
        """Whether this failure may be forgiven: a retry that is not counted, a sample masked from the
        loss. Never on the word of text that anybody could have written, or a policy that learns to
        print an infrastructure failure earns free retries; and never where the work itself is at fault."""
        return self.trust >= Trust.SIGNED and self.blame not in (Blame.REQUEST, Blame.CALLER)


class Decision(msgspec.Struct, frozen=True):
    """What follows from a fault: the action, how long to wait first (seconds), and why."""

    action: Action
    delay: float
    why: str
