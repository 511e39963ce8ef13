"""Where changes go: the base of every sink, and the terminal.

A sink has a bounded queue and a task of its own, so a slow or dead one never holds up the run or
another sink. What it could not deliver is counted, and reported once, when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.text import Text

from faults.alerts.engine import Alert, Change
from protocol import CodedError

QUEUE: Final = 1_000
"""Most changes that wait for one sink; further ones are dropped and counted."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SinkStats:
    """Changes by what became of them: ``delivered``; ``failed`` after all attempts; ``dropped``
    since the queue was full; ``unsent`` when the sink was closed. ``resend_failed`` counts only the
    repetitions of firing alerts."""

    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    unsent: int = 0
    resend_failed: int = 0


class Sink(ABC):
    """Delivers changes, in order, from a task of its own. Subclasses write `deliver`, and may
    override `resend` and ``resend_every`` (seconds)."""

    name: str
    resend_every: float = math.inf

    def __init__(self, name: str) -> None:
        self.name = name
        self.stats = SinkStats()
        self.error: CodedError | None = None
        """The latest failure to deliver; None when all went well."""
        self._queue: asyncio.Queue[Change] = asyncio.Queue(QUEUE)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @abstractmethod
    async def deliver(self, change: Change) -> None:
        """Deliver one change, or raise; it is not asked again for the same one."""

    async def resend(self) -> None:  # noqa: B027 - optional for subclasses
        """Repeat what must be repeated; called every ``resend_every`` seconds."""

    async def opened(self) -> None:  # noqa: B027 - optional for subclasses
        """Make ready; runs on the loop before the first delivery."""

    async def closed(self) -> None:  # noqa: B027 - optional for subclasses
        """Give back what `opened` took."""

    async def start(self) -> None:
        """Begin delivering. Idempotent."""
        if self._task is None and not self._closed:
            await self.opened()
            self._task = asyncio.create_task(self._work(), name=f"alerts: {self.name}")

    def put(self, change: Change) -> None:
        """Take a change for delivery. Never blocks and never raises."""
        try:
            self._queue.put_nowait(change)
        except asyncio.QueueFull:
            self.stats.dropped += 1

    async def flush(self) -> None:
        """Wait until everything taken so far was delivered or given up."""
        await self._queue.join()

    async def close(self, deadline: float = 5.0) -> None:
        """Deliver what is waiting for at most ``deadline`` seconds, then stop and report. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._task is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(deadline):
                        await self.flush()
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})
            self.stats.unsent += self._queue.qsize()
            await self.closed()
            self._report()

    def _report(self) -> None:
        lost = {
            "failed": self.stats.failed,
            "dropped": self.stats.dropped,
            "unsent": self.stats.unsent,
            "repetitions failed": self.stats.resend_failed,
        }
        said = ", ".join(f"{count} {what}" for what, count in lost.items() if count)
        if said:
            why = f"; the latest failure: {self.error}" if self.error is not None else ""
            _log.warning("alert sink %s lost deliveries: %s%s", self.name, said, why)

    async def _work(self) -> None:
        due = time.monotonic() + self.resend_every
        while True:
            left = due - time.monotonic()
            if left <= 0:
                await self._resend()
                due = time.monotonic() + self.resend_every
                continue
            try:
                async with asyncio.timeout(left if math.isfinite(left) else None):
                    change = await self._queue.get()
            except TimeoutError:
                continue
            await self._deliver(change)

    async def _deliver(self, change: Change) -> None:
        try:
            await self.deliver(change)
            self.stats.delivered += 1
        except asyncio.CancelledError:
            self.stats.unsent += 1
            raise
        except Exception as exc:  # noqa: BLE001 - a sink may fail in any way, and never stops the run
            self.stats.failed += 1
            self.error = coded(exc)
        finally:
            self._queue.task_done()

    async def _resend(self) -> None:
        try:
            await self.resend()
        except Exception as exc:  # noqa: BLE001 - as above; the next repetition is due soon
            self.stats.resend_failed += 1
            self.error = coded(exc)


def coded(exc: Exception) -> CodedError:
    """The failure of a sink under a name; one that came without is a failure of the sink's code,
    or of the terminal's file."""
    if isinstance(exc, CodedError):
        return exc
    return CodedError.from_exception(exc, "NODE.IO" if isinstance(exc, OSError) else "INTERNAL.BUG")


class Terminal(Sink):
    """One line a change. Text from events is printed as text: no markup in it is obeyed."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__("terminal")
        shown = console if console is not None else Console(stderr=True)
        self._file = shown.file
        # Rendered aside and written here, for a Console that meets a broken pipe ends the program.
        self._console = Console(
            file=io.StringIO(),
            force_terminal=shown.is_terminal,
            no_color=shown.no_color,
            width=shown.width,
        )

    async def deliver(self, change: Change) -> None:
        """Print the line; a terminal that is gone raises OSError."""
        with self._console.capture() as captured:
            self._console.print(line_of(change), soft_wrap=True)
        self._file.write(captured.get())
        self._file.flush()


_COLOUR: Final = {"info": "cyan", "warning": "yellow", "critical": "bold red"}


def line_of(change: Change) -> Text:
    """A change as one line: when, what, about what, and why or for how long."""
    alert = change.alert
    at = alert.fired_at if alert.resolved_at is None else alert.resolved_at
    line = Text(time.strftime("%H:%M:%S ", time.localtime(at)))
    if change.kind == "fired":
        line.append(f"FIRING {alert.severity} ", style=_COLOUR[alert.severity])
        line.append(f"{alert.rule} {subject_of(alert)}: {alert.summary}")
    else:
        line.append("RESOLVED ", style="green")
        line.append(f"{alert.rule} {subject_of(alert)} {_after(alert)}")
    return line


def subject_of(alert: Alert) -> str:
    """What an alert is about: ``poster/0 (ACTOR.DIED)``."""
    group = ", ".join(value for value in alert.group.values() if value)
    subject = group or alert.key or "the run"
    return f"{subject} ({alert.code})" if alert.code and alert.code != subject else subject


def summarise(changes: list[Change]) -> list[str]:
    """A line for each alert that fired among ``changes``, in order of firing: ``alert poster-died
    fired for poster/0 (ACTOR.DIED), resolved after 1.2 s``."""
    lines: list[str] = []
    firing: dict[tuple[object, ...], int] = {}
    for change in changes:
        alert = change.alert
        group = (alert.rule, *alert.group.items())
        said = f"alert {alert.rule} fired for {subject_of(alert)}"
        if change.kind == "fired":
            firing[group] = len(lines)
            lines.append(f"{said}, still firing")
        elif group in firing:
            lines[firing.pop(group)] = f"{said}, resolved {_after(alert)}"
        else:  # its firing is older than the history
            lines.append(f"{said}, resolved {_after(alert)}")
    return lines


def _after(alert: Alert) -> str:
    return f"after {(alert.resolved_at or alert.fired_at) - alert.fired_at:.1f} s"
