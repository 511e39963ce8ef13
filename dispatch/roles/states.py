"""The states of a training group, and what leads from one to another: a table, and nothing that waits.

new ── start ──> starting ── started ──> ready ── failed ──> failed
                                           └── restart ──> restarting <── restart ──┘
close leads from each to closing, and closed
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from protocol import CodedError


class State(StrEnum):
    """``FAILED`` holds until somebody calls `restart` or `close`: nothing is restarted by itself."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    RESTARTING = "restarting"
    CLOSING = "closing"
    CLOSED = "closed"


Event = Literal["start", "started", "failed", "restart", "close", "closed"]

TABLE: Final[dict[tuple[State, Event], State]] = {
    (State.NEW, "start"): State.STARTING,
    (State.STARTING, "started"): State.READY,
    (State.STARTING, "failed"): State.FAILED,
    (State.READY, "failed"): State.FAILED,
    (State.READY, "restart"): State.RESTARTING,
    (State.FAILED, "failed"): State.FAILED,  # a consequence of the first
    (State.FAILED, "restart"): State.RESTARTING,
    (State.RESTARTING, "restart"): State.RESTARTING,  # one restart, however many ask for it
    (State.RESTARTING, "started"): State.READY,
    (State.RESTARTING, "failed"): State.FAILED,
    (State.CLOSING, "failed"): State.CLOSING,  # ranks are being killed
    (State.CLOSING, "closed"): State.CLOSED,
    (State.CLOSED, "close"): State.CLOSED,
    **{(state, "close"): State.CLOSING for state in State if state is not State.CLOSED},
}


def after(state: State, event: Event) -> State:
    """The state that ``event`` leads to. Raises CodedError: POOL.CLOSED in a group that is closed or
    closing, POOL.MISUSE where the event has no place."""
    following = TABLE.get((state, event))
    if following is not None:
        return following
    if state in (State.CLOSING, State.CLOSED):
        raise CodedError("POOL.CLOSED", f"the training group is {state}: make a new one")
    raise CodedError("POOL.MISUSE", f"the training group is {state}, where {event!r} has no place")
