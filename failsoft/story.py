"""What a log tells: its failures in the order in which they appear, the first one and what followed.

A log holds events, tokens and tracebacks, of several processes at once. An occurrence that is reported
again (the same id) is one failure. Some failures only tell that something else failed before, or that
somebody gave up: they are the first one only where nothing else is.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

from failsoft.tracebacks import Traceback, begins, exception_line
from faults import Blame, Fault, Kind, Outcome, classify_text
from faults.meanings import meaning
from faults.text_faults import plain
from protocol import Code, Family, Reading, Trust, scan
from protocol.carriers.log_line import Line, event_of, read_line, unwrap
from protocol.keys import Key
from protocol.reading import FOREIGN
from protocol.safe import MAX_TEXT, clean

MAX_KINDS: Final = 500
"""Most different failures that are counted one by one."""
MAX_IDS: Final = 100_000
"""Most occurrences that are remembered."""
MAX_SOURCES: Final = 64
"""Most processes whose tracebacks may be open at once."""
CONSEQUENCES: Final = frozenset(
    (
        *("REQUEST.OUTCOME_UNKNOWN", "UPSTREAM.NO_ENGINE", "UPSTREAM.EJECTED"),
        *("POOL.NO_POSTER", "POOL.CLOSED", "OBJECT.OWNER_DIED"),
    )
)
"""Codes that tell of an earlier failure; those of the family CANCEL do as well."""

# An event that tells of no failure, before it costs anything: most are.
_QUIET = re.compile(rb'\s*\{"ts":\s?[0-9.eE+-]{1,40},\s?"level":\s?"(?:info|debug)",\s?"event":')
_CUT = re.compile(
    r'\{"ts":\s?([0-9.]{1,30})[^,]{0,10},\s?"level":\s?"([a-z]{1,16})",\s?"event":\s?"([^"\\]{1,80})"'
)
_TOKENISH = re.compile(
    r"FS[0-9]{1,3}\.[A-Z]{1,16}\.[A-Z][A-Z0-9_]{0,39}\.[0-9A-Z]{8}\.[0-9A-Z]{8}(?![A-Z0-9_])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure and where it stands: the line's number, the time as it stood there, who printed it.
    ``what`` is how it is counted."""

    fault: Fault
    what: str
    line: int
    at: str = ""
    source: str = ""
    event: dict[str, Any] | None = None

    @property
    def named(self) -> bool:
        """Whether a table or an event names it."""
        return self.event is not None or self.fault.code.family is not Family.UNKNOWN

    @property
    def when(self) -> str:
        """Its time: as it stands in the log, or of an event (unix seconds) in ISO 8601, in UTC."""
        ts = self.event.get("ts") if self.event is not None else None
        try:
            return (
                datetime.fromtimestamp(float(ts), UTC).isoformat(timespec="milliseconds") if ts else self.at
            )
        except (TypeError, ValueError, OverflowError, OSError):
            return self.at

    @property
    def only_follows(self) -> bool:
        """Whether it tells of something that failed before it, or that nobody can name."""
        code = self.fault.code
        return code in CONSEQUENCES or code.family in (Family.CANCEL, Family.UNKNOWN)


@dataclass(slots=True)
class Followed:
    """Failures of one kind: how many, and where the first two of them stand."""

    what: str
    count: int = 0
    places: list[tuple[int, str]] = field(default_factory=list)


class Story:
    """Feed it the lines of a log (`feed`), then `end` it. Bounded in memory, whatever the log holds."""

    def __init__(self, key: Key = None) -> None:
        self.events = 0
        self.unnamed: Failure | None = None
        self.unverified = 0
        self._key = key
        self._first: Failure | None = None
        self._fallback: Failure | None = None
        self._kinds: dict[str, Followed] = {}
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._open: dict[str, Traceback] = {}

    @property
    def open(self) -> bool:
        """Whether a traceback is being read, so that every line matters."""
        return bool(self._open)

    @property
    def first(self) -> Failure | None:
        """The earliest failure that has a name and is not merely a consequence; else the earliest."""
        return self._first or self._fallback

    @property
    def followed(self) -> list[Followed]:
        """All the others, most frequent first."""
        found = []
        for kind in self._kinds.values():
            if self.first is not None and kind.what == self.first.what:
                if kind.count > 1:
                    places = [place for place in kind.places if place[0] != self.first.line]
                    found.append(Followed(kind.what, kind.count - 1, places or kind.places))
            else:
                found.append(kind)
        return sorted(found, key=lambda kind: -kind.count)

    def feed(self, number: int, raw: bytes) -> None:
        """Read one line."""
        if _QUIET.match(raw) is not None:
            self.events += 1
            return
        text = raw.decode("utf-8", "replace")
        line = unwrap(text)
        if line.text.startswith('{"ts":'):
            self._event(number, text, line)
            return
        traceback = self._open.get(line.source)
        if traceback is not None:
            if traceback.take(number, line.text, text):
                return
            if not traceback.wants:
                self._close(line.source)
        if begins(line.text):
            if line.source in self._open:
                self._close(line.source)
            while len(self._open) >= MAX_SOURCES:
                self._close(next(iter(self._open)))
            traceback = self._open[line.source] = Traceback(line.source, line.at)
            traceback.take(number, line.text, text)
        else:
            self._text(number, text, line)
        for source in [s for s, t in self._open.items() if self._waited(t)]:
            self._close(source)

    def end(self) -> None:
        """There are no more lines."""
        for source in list(self._open):
            self._close(source)

    @staticmethod
    def _waited(traceback: Traceback) -> bool:
        traceback.between += 1
        return not traceback.wants and traceback.between > 100

    def _event(self, number: int, text: str, line: Line) -> None:
        event = event_of(line.text)
        if event is not None:
            self.events += 1
        else:
            head = _CUT.match(line.text)
            if head is None:  # another program's JSON
                self._text(number, text, line)
                return
            event = {"ts": head.group(1), "level": head.group(2), "event": head.group(3), "key": ""}
        if event["level"] not in ("warning", "error"):
            return
        found = read_line(text, key=self._key)
        if found.code is None:
            return
        what = f"{plain(str(event['event']))} {found.code}"
        self._add(Failure(_fault(found), what, number, "", line.source, event), max(1, line.repeated))

    def _text(self, number: int, text: str, line: Line) -> None:
        shapes = _TOKENISH.findall(line.text)
        if not shapes:
            return
        found = read_line(text, key=self._key)
        if found.code is None:
            self.unverified += len(shapes)
            return
        fault = _fault(found, line.text)
        self._add(Failure(fault, str(fault.code), number, line.at, line.source), max(1, line.repeated))

    def _close(self, source: str) -> None:
        traceback = self._open.pop(source)
        visible = {token.raw for token in scan("\n".join(traceback.raw), key=self._key)}
        signed = False
        for number, text in traceback.lines:
            for token in scan(text, key=self._key):
                signed = True
                trust = token.trust
                if token.raw not in visible and trust < Trust.SIGNED:
                    trust = Trust.HEURISTIC  # whole only without the colours: `defuse` could not see it
                fault = _fault(Reading(token.code, token.id, "", {}, trust, token.raw), text)
                self._add(Failure(fault, str(fault.code), number, traceback.at, source), 1)
        if signed:  # a token names what the exceptions around it were: guesses would count it twice
            return
        alone = unwrap(traceback.raw[0]).repeated if len(traceback.lines) == 1 else 0
        for part in traceback.parts():
            fault = _classified("\n".join(text for _, text in part), self._key)
            number, text = exception_line(part)
            if fault.code.family is Family.UNKNOWN:
                fault = msgspec.structs.replace(fault, evidence=clean(plain(text), MAX_TEXT))
            else:
                number = next((n for n, text in part if _is_in(text, fault.evidence)), number)
            self._add(Failure(fault, str(fault.code), number, traceback.at, source), max(1, alone))
            self.unverified += sum(len(_TOKENISH.findall(text)) for _, text in part)

    def _add(self, failure: Failure, count: int) -> None:
        if not failure.named:
            if self.unnamed is None or failure.line < self.unnamed.line:
                self.unnamed = failure
            return
        if failure.fault.id:
            if failure.fault.id in self._ids:
                return
            self._ids[failure.fault.id] = None
            if len(self._ids) > MAX_IDS:
                self._ids.popitem(last=False)
        if not failure.only_follows and (self._first is None or failure.line < self._first.line):
            self._first = failure  # a traceback is known only at its end, when others have come
        if self._fallback is None or failure.line < self._fallback.line:
            self._fallback = failure
        what = failure.what if failure.what in self._kinds or len(self._kinds) < MAX_KINDS else "others"
        kind = self._kinds.setdefault(what, Followed(what))
        kind.count += count
        kind.places = sorted([*kind.places, (failure.line, failure.when)])[:2]


@lru_cache(maxsize=128)
def _classified(text: str, key: Key) -> Fault:
    return classify_text(text, key=key)


def _is_in(text: str, evidence: str) -> bool:
    start = plain(text).lstrip(" \t+|-")[:100].rstrip()
    return bool(start) and evidence.startswith(start)


def _fault(found: Reading, evidence: str = "") -> Fault:
    code = found.code or FOREIGN
    told = found.detail or clean(plain(evidence), MAX_TEXT)
    return Fault(*_facts(code), found.trust, evidence=told, id=found.id)


def _facts(code: Code) -> tuple[Kind, Code, Blame, Outcome]:
    kind, blame, outcome = meaning(code)
    return kind, code, blame, outcome
