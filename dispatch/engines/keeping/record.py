"""Record: how one engine stands, for those who ask, and what is written about it.

The one place where a change of its life becomes a status and a line of the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dispatch.engines.keeping import lifecycle as event
from dispatch.engines.keeping.lifecycle import Event, Life
from dispatch.engines.spec import EngineStatus, ExitReport
from protocol import CodedError, Events

_REPORTED: Final = ("stage", "status", "signal", "last_lines", "stop_failed", "url", "pids", "device")


_ENDS: Final = (event.Lost, event.StartFailed, event.Checked)
"""What ends a life that nobody asked to end."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was ready, went down and is ready again: ``seconds`` from the detection (unix
    seconds) to being routable; ``code`` is why it went down."""

    key: str
    code: str
    detected_at: float
    seconds: float


class Record:
    """``changed`` is told of each new status, ``recovered`` of an engine that is back. ``exit`` is how this
    life's process ended, ``began`` when this life did (monotonic)."""

    def __init__(
        self,
        key: str,
        events: Events,
        changed: Callable[[EngineStatus], None],
        recovered: Callable[[Recovery], None],
    ) -> None:
        self.status = EngineStatus(key=key, since=time.time())
        self.life = Life()
        self.exit: ExitReport | None = None
        self.began = 0.0
        self._events = events
        self._changed = changed
        self._recovered = recovered
        self._down: tuple[str, float, float] | None = None  # code, unix and monotonic time of the detection

    def say(self, before: Life, happened: Event) -> None:
        """The change as a status and as a line of the log."""
        life = self.life
        if life is before:
            return
        if life.verdict is not None and before.verdict is None:
            error = life.verdict
            self.publish(code=str(error.code), detail=error.detail)
            self.emit("engine.given_up", level="error", error=error, **facts_of(error))
        elif life.state == before.state:
            if life.state == "dead" and before.wanted and not life.wanted:  # drained while it rested
                self._changed(self.status)  # whoever waits for its end looks again
                self.emit("engine.stopped")
        elif life.state == "starting":
            self.exit = None  # of this life; the status keeps the last one's until this one ends
            self.publish(
                stage="actor", pid=0, create_time=0.0, url="", weight_version=None, held="",
                restarts=life.starts - 1,
            )  # fmt: skip
            self.emit("engine.starting")
        elif life.state == "ready" and before.state == "suspect":
            self.publish(code="", detail="")
            self.emit("engine.trusted")
        elif life.state == "ready":
            self.publish(stage="routable")
            self._ready()
        elif life.state == "suspect" and isinstance(happened, event.Checked) and happened.error is not None:
            error = happened.error
            self.publish(code=str(error.code), detail=error.detail)
            self.emit("engine.suspect", level="warning", error=error, **facts_of(error))
        elif life.state == "quarantined" and life.cause is not None:
            error = life.cause
            self.publish(code=str(error.code), detail=error.detail)
            self.emit("engine.quarantined", level="warning", error=error, **facts_of(error))
        elif life.state == "stopping" and isinstance(happened, _ENDS) and life.cause is not None:
            error = life.cause
            if before.ready_at is not None:
                self._down = (str(error.code), time.time(), time.monotonic())
            self.publish(code=str(error.code), detail=error.detail, exit=self.exit)
            self.emit("engine.died", level="error", error=error, pid=self.status.pid, **facts_of(error))
        elif life.state == "dead" and life.wanted:
            self.publish()
            self.emit("engine.restarting", code=self.status.code, pause=life.rest)
        elif life.state == "draining":
            self.publish()
            self.emit("engine.draining", again=life.wanted)
        else:
            self.publish()
            if life.state == "dead":
                self.emit("engine.stopped")

    def _ready(self) -> None:
        ready = time.monotonic()
        self.emit("engine.ready", seconds=ready - self.began, url=self.status.url, pid=self.status.pid)
        down, self._down = self._down, None
        if down is not None:
            code, detected_at, since = down
            self._recovered(
                Recovery(key=self.status.key, code=code, detected_at=detected_at, seconds=ready - since)
            )

    def adopt(self, seen: EngineStatus, **facts: Any) -> None:
        """Take over what the supervisor knows better."""
        known = (
            *("pid", "create_time", "url", "stage", "weight_version"),
            *("node", "node_id", "supervisor_pid", "supervisor_create_time"),
        )
        self.publish(**{name: getattr(seen, name) for name in known}, **facts)

    def publish(self, **facts: Any) -> None:
        state = facts.pop("state", self.life.state)
        now = self.status.since if state == self.status.state else time.time()
        status = msgspec.structs.replace(self.status, state=state, since=now, **facts)
        if status != self.status:
            self.status = status
            self._changed(status)

    def emit(self, name: str, **facts: Any) -> None:
        self._events.emit(name, key=self.status.key, attempt=self.life.starts, **facts)


def facts_of(error: CodedError) -> dict[str, Any]:
    """What of a failure's data stands in the log."""
    return {name: error.data[name] for name in _REPORTED if name in error.data}
