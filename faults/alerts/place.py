"""Complaints about a rules file: each names the file, the place in it, what is wrong and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

from protocol import CodedError

MAX_COUNT: Final = 10_000
"""Largest ``count`` of a frequency rule; its window holds up to twice as many numbers a group."""

_WHERE: Final = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?\Z", re.DOTALL)
_REMEDY: Final = {
    "rule": "write each rule as a [[rule]] table",
    "sinks": "write one [sinks] table",
    "name": 'write letters, digits, _ and -, at most 64: name = "poster-died"',
    "type": 'write type = "any" or type = "frequency"',
    "match": 'write fields and globs: match = { event = "poster.died" }',
    "group_by": 'write a list of fields: group_by = ["key"]',
    "resolve": 'write fields and globs: resolve = { event = "poster.ready" }',
    "resolve_after": "write seconds above 0: resolve_after = 60.0",
    "severity": 'write "info", "warning" or "critical"',
    "summary": 'write text with fields in braces: summary = "{key} died"',
    "count": f"write a whole number from 1 to {MAX_COUNT}: count = 5",
    "within": "write seconds above 0: within = 60.0",
    "terminal": "write terminal = true or terminal = false",
    "webhook": 'write a list of URLs: webhook = ["http://host:port/path"]',
    "alertmanager": 'write a list of base URLs: alertmanager = ["http://host:9093"]',
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the file we are, so that every complaint names it the same way."""

    origin: str
    where: str = ""

    def bad(self, key: str, what: str, remedy: str | None = None) -> NoReturn:
        at = ", ".join(part for part in (self.where, f"key {key!r}" if key else "") if part)
        raise invalid(self.origin, at, what, remedy if remedy is not None else _REMEDY.get(key, ""))

    def decode(self, table: Mapping[str, Any], into: type[Any]) -> Any:
        try:
            return msgspec.convert(table, into)
        except (msgspec.ValidationError, OverflowError) as exc:
            found = _WHERE.match(str(exc))
            what, path = (found["what"], found["path"] or "") if found else (str(exc), "")
            unknown = re.search(r"unknown field `(.*)`|required field `(.*)`", what, re.DOTALL)
            if unknown is None:
                key = re.split(r"[.\[]", path.lstrip("."), maxsplit=1)[0]
                return self.bad(key, what.replace("`", ""))
            known = list(into.__struct_fields__)
            if unknown[1] is None:
                return self.bad(unknown[2], "is missing")
            close = difflib.get_close_matches(unknown[1], known, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            return self.bad(unknown[1][:80], "is not known here", f"{hint}the keys are {', '.join(known)}")


def invalid(origin: str, at: str, what: str, remedy: str) -> CodedError:
    parts = [part for part in (origin, at) if part]
    said = f"{', '.join(parts)}: {what}" + (f"; {remedy}" if remedy else "")
    return CodedError("CONFIG.INVALID", " ".join(said.split()), {"file": origin, "place": at})
