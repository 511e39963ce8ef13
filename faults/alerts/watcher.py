"""AlertWatcher: a file followed, rules applied, sinks served, inside somebody else's asyncio program.

    async with AlertWatcher("events.jsonl", default_rules()) as watcher:
        ...                         # the run
        await watcher.drain(5.0)    # optional: everything written so far was seen and delivered
    for line in watcher.summary():
        print(line)

Alerting is a witness of the run and never its judge: whatever goes wrong in here is logged and kept
in ``watcher.error``, and the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from faults.alerts.engine import Alert, AlertEngine, Change
from faults.alerts.rules import Rule, RuleFile
from faults.alerts.sinks import Sink, coded, summarise
from faults.alerts.tail import Tail, TailStats
from protocol import CodedError

MAX_HISTORY: Final = 10_000
"""Most changes kept in `AlertWatcher.history`; of more, the oldest are forgotten."""

_log = logging.getLogger(__name__)


class AlertWatcher:
    """Follows ``path`` from its beginning until the context ends; with ``follow=False`` only to its
    end, by the events' own clock.

    It owns its ``sinks``: it starts them and closes them. ``poll_interval`` and ``close_deadline``
    are seconds; leaving the context takes at most twice ``close_deadline``: for the rest of the
    file, and for the sinks."""

    def __init__(
        self,
        path: str | Path,
        rules: RuleFile | Iterable[Rule],
        sinks: Sequence[Sink] = (),
        *,
        follow: bool = True,
        poll_interval: float = 0.2,
        close_deadline: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock if follow else None
        self.engine = AlertEngine(rules.rules if isinstance(rules, RuleFile) else rules, self._clock)
        self.sinks = tuple(sinks)
        self.error: CodedError | None = None
        """Why the watching ended early; None while all is well."""
        self.fired = 0
        """How many alerts have fired so far, also those that `history` has forgotten."""
        self._tail = Tail(path, poll_interval=poll_interval, follow=follow)
        self._close_deadline = close_deadline
        self._changes: deque[Change] = deque(maxlen=MAX_HISTORY)
        self._passes = 0
        self._passed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def history(self) -> list[Change]:
        """All changes so far, oldest first (at most `MAX_HISTORY`)."""
        return list(self._changes)

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that are firing now."""
        return self.engine.firing

    @property
    def stats(self) -> TailStats:
        """What was read: bytes, events, bad lines, rotations."""
        return self._tail.stats

    def summary(self) -> list[str]:
        """A line for each alert of `history`: ``alert poster-died fired for poster/0 (ACTOR.DIED),
        resolved after 1.2 s``."""
        return summarise(self.history)

    async def wait(self) -> None:
        """Wait until the watching has ended: with ``follow=False`` the end of the file."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def stop(self) -> None:
        """End the watching after what is in the file now. Safe to call from a signal handler of the
        loop; leaving the context does it too."""
        self._tail.stop()

    async def drain(self, deadline: float) -> bool:
        """Wait until every line that is in the file now was seen, and what it changed was delivered
        or given up. False when ``deadline`` (seconds) passed before."""
        try:
            async with asyncio.timeout(deadline):
                # The pass that ends next may have read the end of the file before this call only if
                # it ended already: reading the end and counting the pass happen without a pause.
                target = self._passes + 1
                while self._passes < target and self._task is not None and not self._task.done():
                    self._passed.clear()
                    self._tail.poke()
                    await self._passed.wait()
                await asyncio.gather(*(sink.flush() for sink in self.sinks))
        except TimeoutError:
            return False
        return True

    async def __aenter__(self) -> Self:
        try:
            for sink in self.sinks:
                await sink.start()
        except BaseException:  # cancelled or failed: a start leaves no sink open
            await self._close_sinks()
            raise
        self._task = asyncio.create_task(self._watch(), name="alerts: watcher")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()
        try:
            if self._task is not None:
                await asyncio.wait({self._task}, timeout=self._close_deadline)
        finally:
            try:
                if self._task is not None and not self._task.done():
                    self._task.cancel()
                    await asyncio.wait({self._task})
            finally:
                await self._close_sinks()
        self._report()

    async def _close_sinks(self) -> None:
        await asyncio.gather(
            *(sink.close(self._close_deadline) for sink in self.sinks), return_exceptions=True
        )

    def _report(self) -> None:
        engine = self.engine
        if engine.dropped_groups or engine.refused_groups:
            _log.warning(
                "alert rules with too many groups: %d idle ones were forgotten, %d matches refused; "
                "group by fewer or coarser fields",
                engine.dropped_groups,
                engine.refused_groups,
            )
        stats = self.stats
        if stats.bad_lines or stats.long_lines:
            _log.warning(
                "%s: %d lines were no JSON object, %d were too long",
                self._tail.path,
                stats.bad_lines,
                stats.long_lines,
            )

    async def _watch(self) -> None:
        try:
            async with contextlib.aclosing(self._tail.batches()) as batches:
                async for batch in batches:
                    for event in batch:
                        self._publish(self.engine.feed(event))
                    if not batch:
                        # Only with the whole file read does the wall clock say anything about silence.
                        if self._clock is not None:
                            self._publish(self.engine.tick(self._clock()))
                        self._passes += 1
                        self._passed.set()
        except Exception as exc:  # noqa: BLE001 - a bug in here must not end the run that it watches
            self.error = coded(exc)
            _log.error("alerting has stopped: %s", self.error)
        finally:
            self._passed.set()

    def _publish(self, changes: list[Change]) -> None:
        for change in changes:
            self._changes.append(change)
            self.fired += change.kind == "fired"
            for sink in self.sinks:
                sink.put(change)
