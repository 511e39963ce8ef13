"""The state machine of alerting: events in, changes out. No input, no output, no clock of its own.

Two rules about time and order, chosen for files that several processes on several hosts append to:

* **Whether** an alert fires or resolves follows the order of the lines, which is the order in which
  things became known. A ``poster.ready`` written after a ``poster.died`` resolves it even when the
  other host's clock is behind; so skewed clocks never leave an alert hanging.
* **When** (windows, ``resolve_after``) follows the events' own ``ts``, so that replaying an old file
  gives the alerts that it gave live. `tick` with the wall clock lets silence resolve alerts while no
  event comes.

Memory is bounded: at most `MAX_GROUPS` groups a rule. When a rule has that many, the group that has
been idle (resolved, or never fired) for longest is dropped with its partial window; when all of them
are firing, a new group is refused. Both are counted in `AlertEngine.dropped_groups` and
`AlertEngine.refused_groups`.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from faults.alerts.fields import Event, lookup, shown
from faults.alerts.rules import Rule, Severity
from faults.alerts.windows import SlidingWindow

MAX_GROUPS: Final = 1_000
"""Most groups that one rule keeps."""
MAX_AHEAD: Final = 300.0
"""Seconds that a live event's ``ts`` may be ahead of the clock; beyond that it is not believed."""
_LATEST_TS: Final = 4_102_444_800.0  # the year 2100: beyond it, ts is in milliseconds or nonsense


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One firing of one rule for one group.

    Everything but ``resolved_at`` and ``count`` is that of the event that fired it, so that it keeps
    its identity while it lasts. ``id`` is the failure's occurrence id: it joins the alert with the
    log lines. Times are unix seconds; ``count`` is how many matches it has seen so far."""

    rule: str
    severity: Severity
    summary: str
    group: dict[str, str]
    code: str | None
    key: str | None
    id: str | None
    run: str | None
    detail: str
    fired_at: float
    resolved_at: float | None = None
    count: int


class Change(msgspec.Struct, frozen=True):
    """An alert that has just fired or has just been resolved."""

    kind: Literal["fired", "resolved"]
    alert: Alert


GroupKey = tuple[str, ...]


@dataclass(slots=True)
class _Firing:
    alert: Alert
    count: int
    last_match: float


@dataclass(slots=True)
class _RuleState:
    rule: Rule
    firing: dict[GroupKey, _Firing] = field(default_factory=dict)
    idle: OrderedDict[GroupKey, SlidingWindow] = field(default_factory=OrderedDict)
    due: float = math.inf  # no firing group can be silenced earlier than this

    def room(self) -> bool:
        return len(self.firing) + len(self.idle) < MAX_GROUPS


class AlertEngine:
    """Feeds events through the rules.

    ``clock`` (unix seconds) is the wall clock when events are followed live: it unmasks timestamps
    from the future, and `tick` reads it. Without one (a replay) the newest ``ts`` is the clock. An
    event without a usable ``ts`` is dated like the newest one before it."""

    def __init__(self, rules: Iterable[Rule], clock: Callable[[], float] | None = time.time) -> None:
        self._states = [_RuleState(rule) for rule in rules]
        self._clock = clock
        self.now = 0.0
        """The newest time known (unix seconds); it never goes back."""
        self.dropped_groups = 0
        """Idle groups forgotten to make room."""
        self.refused_groups = 0
        """Matches of groups for which there was no room, since all were firing."""

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that are firing now, by rule and then oldest first."""
        return tuple(
            msgspec.structs.replace(one.alert, count=one.count)
            for state in self._states
            for one in state.firing.values()
        )

    def feed(self, event: Event) -> list[Change]:
        """What ``event`` changes. First, alerts whose silence ended before it are resolved."""
        ts = self._time_of(event)
        changes = self.tick(ts)
        for state in self._states:
            rule = state.rule
            if rule.match.matches(event):
                changes.extend(self._matched(state, event, ts))
            elif rule.resolve is not None and state.firing and rule.resolve.matches(event):
                changes.extend(_resolve(state, _group_of(rule, event), ts))
        return changes

    def tick(self, now: float | None = None) -> list[Change]:
        """What the passing of time changes, at ``now`` (unix seconds; default: the clock). They are
        dated when the silence was long enough, not when somebody looked."""
        if now is None:
            now = self._clock() if self._clock is not None else self.now
        self.now = max(self.now, now)
        changes: list[Change] = []
        for state in self._states:
            after = state.rule.resolve_after
            if after is None or self.now < state.due:
                continue
            ended = [
                (k, f.last_match + after) for k, f in state.firing.items() if f.last_match + after <= self.now
            ]
            for key, at in ended:
                changes.extend(_resolve(state, key, at))
            state.due = min((f.last_match + after for f in state.firing.values()), default=math.inf)
        return changes

    def _time_of(self, event: Event) -> float:
        ts = event.get("ts")
        latest = _LATEST_TS if self._clock is None else self._clock() + MAX_AHEAD
        if isinstance(ts, int | float) and not isinstance(ts, bool) and 0 <= ts <= latest:
            return float(ts)
        # The lines before it date it better than the wall clock: the file may be of yesterday.
        return self.now or (self._clock() if self._clock is not None else 0.0)

    def _matched(self, state: _RuleState, event: Event, ts: float) -> list[Change]:
        rule = state.rule
        key = _group_of(rule, event)
        firing = state.firing.get(key)
        if firing is not None:
            firing.count += 1
            firing.last_match = max(firing.last_match, ts)
            return []
        window = state.idle.get(key)
        if window is None and not state.room():
            if not state.idle:
                self.refused_groups += 1
                return []
            state.idle.popitem(last=False)
            self.dropped_groups += 1
        count = 1
        if rule.type == "frequency":
            if window is None:
                window = state.idle[key] = SlidingWindow(rule.count, rule.within)
            state.idle.move_to_end(key)
            if not window.add(ts):
                return []
            del state.idle[key]
            count = rule.count
        alert = _alert(rule, key, event, ts, count)
        state.firing[key] = _Firing(alert, count, ts)
        if rule.resolve_after is not None:
            state.due = min(state.due, ts + rule.resolve_after)
        return [Change("fired", alert)]


def _group_of(rule: Rule, event: Event) -> GroupKey:
    return tuple(shown(lookup(event, path)) for path in rule.group_by)


def _alert(rule: Rule, key: GroupKey, event: Event, ts: float, count: int) -> Alert:
    return Alert(
        rule=rule.name,
        severity=rule.severity,
        summary=rule.summary.render(event),
        group=dict(zip(rule.group_by, key, strict=True)),
        code=shown(event.get("code")) or None,
        key=shown(event.get("key")) or None,
        id=shown(event.get("id")) or None,
        run=shown(event.get("run")) or None,
        detail=shown(event.get("detail"), 1_000),
        fired_at=ts,
        count=count,
    )


def _resolve(state: _RuleState, key: GroupKey, at: float) -> list[Change]:
    """A resolved group is forgotten: it starts with an empty window, and may fire anew."""
    firing = state.firing.pop(key, None)
    if firing is None:
        return []
    # Another host's clock may be behind the one that wrote the match: an alert never ends before it began.
    at = max(at, firing.alert.fired_at)
    return [Change("resolved", msgspec.structs.replace(firing.alert, resolved_at=at, count=firing.count))]
