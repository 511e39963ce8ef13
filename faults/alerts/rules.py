"""The rules file: TOML in, checked rules out, or one error that names the place and the remedy.

    [sinks]
    terminal = true
    webhook = ["https://hooks.example.org/alerts"]
    alertmanager = ["http://127.0.0.1:9093"]

    [[rule]]
    name = "poster-died"
    type = "any"                      # or "frequency", which needs count and within (seconds)
    match = { event = "poster.died", code = ["ACTOR.*", "NODE.*"] }
    group_by = ["key"]                # one alert for each value; default: one for the whole rule
    resolve = { event = "poster.ready" }
    resolve_after = 300.0             # seconds without a match; frequency: `within` when not given
    severity = "critical"             # info, warning (default), critical
    summary = "{key} died: {detail}"  # fields of the event that fires it

Values in ``match`` and ``resolve`` are shell-style globs or lists of them; ``data.x`` reaches into
the event's data.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import msgspec

from faults.alerts.fields import KEYS, Matcher, Template, is_path
from faults.alerts.place import MAX_COUNT, Place, invalid

MAX_FILE: Final = 1 << 20
"""Largest rules file, in bytes."""
MAX_PATTERN: Final = 500
"""Longest glob, in characters."""

Severity = Literal["info", "warning", "critical"]

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_LINE: Final = re.compile(
    r"(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)\Z", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One checked rule. ``count`` is 1 and ``within`` 0.0 for type ``any``; ``resolve_after`` is in
    seconds, None when no silence resolves it."""

    name: str
    type: Literal["any", "frequency"]
    match: Matcher
    group_by: tuple[str, ...]
    resolve: Matcher | None
    resolve_after: float | None
    severity: Severity
    summary: Template
    count: int
    within: float


class SinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``[sinks]`` table: whether to print, and the URLs to deliver to."""

    terminal: bool = True
    webhook: tuple[str, ...] = ()
    alertmanager: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleFile:
    """What a rules file says; ``origin`` names the file in messages."""

    rules: tuple[Rule, ...]
    sinks: SinkSettings
    origin: str


class _RuleTable(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["any", "frequency"]
    match: dict[str, Any]
    group_by: list[str] = []
    resolve: dict[str, Any] | None = None
    resolve_after: float | None = None
    severity: Severity = "warning"
    summary: str = "{event} {key} {detail}"
    count: int | None = None
    within: float | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[dict[str, Any]] = []
    sinks: dict[str, Any] = {}


def load_rules(path: str | Path) -> RuleFile:
    """Read and check a rules file. Raises CodedError CONFIG.INVALID for anything wrong with it."""
    origin = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        what = getattr(exc, "strerror", None) or str(exc)
        raise invalid(origin, "", f"cannot be read: {what}", "give the path of a readable TOML file") from exc
    if len(raw) > MAX_FILE:
        raise invalid(origin, "", f"is larger than {MAX_FILE} bytes", "is it really a rules file?")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise invalid(origin, f"line {line}", "is not UTF-8", "save the file as UTF-8 text") from exc
    return parse_rules(text, origin)


def default_rules() -> RuleFile:
    """The rules that ship with the package (`default.toml`)."""
    text = resources.files("faults.alerts").joinpath("default.toml").read_text("utf-8")
    return parse_rules(text, "faults/alerts/default.toml")


def parse_rules(text: str, origin: str = "<rules>") -> RuleFile:
    """Check the text of a rules file; ``origin`` names it in messages. Raises CodedError
    CONFIG.INVALID, and nothing else, whatever the text."""
    place = Place(origin)
    try:
        document = tomllib.loads(text)
    except RecursionError:
        place.bad("", "its values are nested too deeply", "rules need two levels")
    except ValueError as exc:  # TOMLDecodeError is one; a plain one comes from numbers of 5,000 digits
        found = _LINE.match(str(exc))
        line = (found["line"] if found else None) or str(text.count("\n") + 1)
        column = f", column {found['column']}" if found and found["column"] else ""
        what = found["what"] if found else str(exc)
        raise invalid(origin, f"line {line}{column}", f"not TOML: {what}", "correct the syntax") from exc
    file: _File = place.decode(document, _File)
    if not file.rule:
        place.bad("rule", "there is no rule", "write at least one [[rule]] table")
    rules: dict[str, Rule] = {}
    for number, table in enumerate(file.rule, 1):
        name = table.get("name")
        label = f" ({name!r})" if isinstance(name, str) and _NAME.match(name) else ""
        at = Place(origin, f"rule {number}{label}")
        rule = _rule(at, at.decode(table, _RuleTable))
        if rule.name in rules:
            at.bad("name", "another rule has this name", "names tell alerts apart: choose another")
        rules[rule.name] = rule
    return RuleFile(tuple(rules.values()), _sinks(Place(origin, "[sinks]"), file.sinks), origin)


def _rule(at: Place, table: _RuleTable) -> Rule:
    if not _NAME.match(table.name):
        at.bad("name", "is not a name")
    resolve_after = _seconds(at, "resolve_after", table.resolve_after)
    if table.type == "frequency":
        count, within = table.count, _seconds(at, "within", table.within)
        if count is None:
            at.bad("count", "is missing: a frequency rule counts matches")
        if not 1 <= count <= MAX_COUNT:
            at.bad("count", "is out of range")
        if within is None:
            at.bad("within", "is missing: a frequency rule looks at a stretch of time")
        resolve_after = within if resolve_after is None else resolve_after
    else:
        for key in ("count", "within"):
            if getattr(table, key) is not None:
                at.bad(key, 'belongs to type "frequency" only', 'remove it, or write type = "frequency"')
        count, within = 1, 0.0
    for path in table.group_by:
        _field(at, "group_by", path)
    try:
        summary = Template.parse(table.summary)
    except ValueError as exc:
        at.bad("summary", str(exc), "")
    return Rule(
        name=table.name,
        type=table.type,
        match=_matcher(at, "match", table.match),
        group_by=tuple(dict.fromkeys(table.group_by)),
        resolve=None if table.resolve is None else _matcher(at, "resolve", table.resolve),
        resolve_after=resolve_after,
        severity=table.severity,
        summary=summary,
        count=count,
        within=within,
    )


def _seconds(at: Place, key: str, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        at.bad(key, f"{value} is not a length of time")
    return value


def _field(at: Place, key: str, path: str) -> None:
    if not is_path(path):
        close = difflib.get_close_matches(path, KEYS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        at.bad(
            key,
            f"{path[:80]!r} is no field of an event",
            f"{hint}the fields are {', '.join(KEYS)} and data.x",
        )


def _matcher(at: Place, key: str, table: Mapping[str, Any]) -> Matcher:
    globs: dict[str, tuple[str, ...]] = {}
    flat = _flatten(table)
    if not flat:
        at.bad(key, "is empty", 'name at least one field; event = "*" matches every event')
    for path, value in flat.items():
        _field(at, key, path)
        patterns = value if isinstance(value, list) else [value]
        if not patterns or not all(isinstance(one, str) and len(one) <= MAX_PATTERN for one in patterns):
            at.bad(
                f"{key}.{path}",
                f"is no glob of at most {MAX_PATTERN} characters",
                'write "text" or ["one", "other"]',
            )
        globs[path] = tuple(patterns)
    return Matcher.of(globs)


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """``data.x = "…"`` is a table in TOML and ``"data.x" = "…"`` a dotted key: both mean the same."""
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [*table.items()]
    for path, value in waiting:
        if isinstance(value, dict) and value:
            waiting.extend((f"{path}.{key}", below) for key, below in value.items())
        else:
            flat[path] = value
    return flat


def _sinks(at: Place, table: Mapping[str, Any]) -> SinkSettings:
    settings: SinkSettings = at.decode(table, SinkSettings)
    for key in ("webhook", "alertmanager"):
        for url in getattr(settings, key):
            try:
                check_url(url)
            except ValueError as exc:
                at.bad(key, str(exc))
    return settings


def check_url(url: str) -> httpx.URL:
    """``url`` as a URL that can be posted to. Raises ValueError when it is none."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise ValueError(f"{url[:80]!r} is not a URL: {exc}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url[:80]!r} is not an http:// or https:// URL with a host")
    if parsed.port is not None and not 0 < parsed.port < 65536:  # httpx takes any number of five digits
        raise ValueError(f"{url[:80]!r} has a port that is not in 1 to 65535")
    return parsed
