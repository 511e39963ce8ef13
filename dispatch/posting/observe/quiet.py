"""Quiet: events of which a thousand alike say no more than twenty."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from protocol import Code, CodedError, Events
from protocol.events import Level

REPEATED: Final = frozenset({"post.retried", "post.hedged", "post.failed", "post.handed_back"})
"""The events that a pool may write once a POST. All others tell of a change, and always pass."""
MAX_KINDS: Final = 512
"""Most pairs of an event and a code that are told apart; all further ones, which only servers could make
up, share one place."""


@dataclass(slots=True)
class _Kind:
    """One event with one code: when the latest of it were written, and how many were not."""

    event: str
    code: str
    written: deque[float]
    dropped: int = 0


class Quiet(Events):
    """`Events` in front of ``events``: of each event in ``names``, with one code, at most ``burst`` are
    written in any ``per`` seconds. The next that passes has the number of those that did not in its
    ``dropped``; `flush` tells it without waiting for one. Not for use from several threads.

    Raises ValueError for a limit that is none."""

    def __init__(
        self,
        events: Events,
        per: float = 10.0,
        burst: int = 20,
        *,
        names: Collection[str] = REPEATED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Not Events' own: it would open a sink of its own, where nothing would ever be written.
        if not per > 0 or burst < 1:
            raise ValueError(f"{burst} events in {per} s are no limit: both must be above 0")
        self._events = events
        self._per = per
        self._burst = burst
        self._names = frozenset(names)
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def emit(
        self,
        event: str,
        *,
        level: Level = "info",
        error: BaseException | None = None,
        code: Code | str | None = None,
        key: str = "",
        detail: str = "",
        **data: Any,
    ) -> None:
        """Write one event, or count it."""
        if event in self._names:
            kind = self._kind(event, code or (error.code if isinstance(error, CodedError) else ""))
            now = self._clock()
            # The oldest of the last `burst`: where it is within `per`, so are all the others.
            if len(kind.written) == self._burst and now - kind.written[0] < self._per:
                kind.dropped += 1
                return
            kind.written.append(now)
            if kind.dropped:
                data["dropped"], kind.dropped = kind.dropped, 0
        self._events.emit(event, level=level, error=error, code=code, key=key, detail=detail, **data)

    def flush(self) -> None:
        """Say what was dropped and has not been told yet: one ``events.dropped`` a kind. For the end, or
        from time to time."""
        for kind in self._kinds.values():
            if kind.dropped:
                # Without a code of its own: an alert on that code would count this as one more failure.
                self._events.emit(
                    "events.dropped",
                    level="warning",
                    key=kind.event,
                    detail=f"not written: {kind.dropped} times {kind.event}, {kind.code or 'without a code'}",
                    dropped=kind.dropped,
                    dropped_event=kind.event,
                    dropped_code=kind.code,
                )
                kind.dropped = 0

    def close(self) -> None:
        """Say what was dropped, and close the events behind it."""
        self.flush()
        self._events.close()

    def _kind(self, event: str, code: str) -> _Kind:
        kind = self._kinds.get((event, code))
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                event = code = "other"
            kind = self._kinds.setdefault((event, code), _Kind(event, code, deque(maxlen=self._burst)))
        return kind
