"""verdicts: what a failed attempt says about its server."""

from __future__ import annotations

from typing import Final

from dispatch.posting.load.targets import Verdict
from faults import Blame, Fault, Kind

BROKEN: Final = frozenset({Kind.TRANSPORT, Kind.DIED, Kind.SERVER_ERROR, Kind.TIMEOUT})
"""What counts against a server. A bad reply does not: it may be the request's own doing."""
AT_FAULT: Final = frozenset({"TIMEOUT.CONNECT", "TIMEOUT.READ", "TIMEOUT.WRITE"})
"""The timeouts that are the server's; a passed deadline or a full client are not."""


def verdict_of(fault: Fault) -> Verdict:
    """What ``fault`` says about the server. A poster or a node that died says nothing, a 4xx that it is
    alive (sglang#25811: a stream of oversized prompts must not take an engine out of service)."""
    if fault.kind is Kind.BACKPRESSURE:
        return Verdict.PUSHBACK
    if fault.blame is Blame.REQUEST:
        return Verdict.REQUEST
    if fault.blame is not Blame.UPSTREAM or fault.kind not in BROKEN:
        return Verdict.NONE
    if fault.kind is Kind.TIMEOUT and fault.code not in AT_FAULT:
        return Verdict.NONE
    return Verdict.FAILED
