"""What the server saw, counted where it can't be wrong: at the server.

A client that believes it sent a request once, or that it holds at most N in flight, is checked against these
numbers. Every generation request is counted in exactly one outcome when it ends, so that
`requests = in_flight + completed + aborted + disconnected + refused + faulted` at every instant.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["completed", "aborted", "disconnected", "refused", "faulted"]
"""How a visit ended: the model stopped; an abort; the client left; a 4xx or 503; an armed fault took it."""

MAX_IDS = 100_000
"""Request ids remembered in `arrived`; beyond that the one first seen longest ago is forgotten."""

MAX_ID_CHARS = 128
"""Longer ids are counted under their first characters: a hostile header must not fill the memory."""


@dataclass(slots=True)
class Visit:
    """One generation request open at the server. A visit nobody judges was broken off by its client."""

    request_id: str = "-"
    outcome: Outcome = "disconnected"
    label: str = "-"


@dataclass(slots=True)
class Witness:
    requests: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    ended: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("completed", "aborted", "disconnected", "refused", "faulted"), 0
        )
    )
    arrived: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def visit(self) -> Iterator[Visit]:
        """Hold one request open. It is closed before the last bytes of a whole reply are sent, so a client
        that has its answer never still sees itself in flight."""
        visit = Visit()
        self.requests += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            yield visit
        finally:
            self.in_flight -= 1
            self.ended[visit.outcome] += 1

    def arrive(self, visit: Visit, request_id: str | None) -> None:
        """Count an arrival under the id its sender gave; requests without one are only in `requests`."""
        if not request_id:
            return
        key = visit.request_id = request_id[:MAX_ID_CHARS]
        if key not in self.arrived and len(self.arrived) >= MAX_IDS:
            del self.arrived[next(iter(self.arrived))]
        self.arrived[key] = self.arrived.get(key, 0) + 1

    def as_json(self) -> dict[str, Any]:
        return {
            "arrived": self.arrived,
            "requests": self.requests,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            **self.ended,
        }
