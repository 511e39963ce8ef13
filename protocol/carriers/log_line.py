"""Failures in the lines of a log: an event, or a token in any other text.

A line seldom arrives as it was written. A terminal colours it, Ray's driver puts its worker before it
(and counts its copies behind it), a container runtime or journald puts time and host before it, a log
shipper cuts it at some length. `strip` takes all of that away, `read_line` reads the failure that is
left. The shapes are those of Ray 2.60 (``print_worker_logs`` and ``LogDeduplicator`` in its source),
ECMA-48 terminal sequences, RFC 3164 syslog, Docker's json-file driver, the Kubernetes CRI log format, and
PyTorch's ranks (the excepthook of ``torch.distributed``, ``tail_log.py`` of its elastic agent), Slurm's
``srun --label`` and docker compose.

A log holds what any program printed, a policy's text included. So an event is believed as structured
data only when it ends with its own token, signed where this process has the run's key; and a token
that shows only once colours or wrappers are gone is a guess, for `protocol.defuse` could not see it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from protocol.codes import Code
from protocol.errors import trust_of
from protocol.events import KEYS
from protocol.keys import Key, held
from protocol.reading import FOREIGN, Reading
from protocol.safe import text_of
from protocol.token import Token, Trust, scan

MAX_LINE: Final = 1 << 20
"""Most characters of a line that are looked at: the head and the tail, half each."""

_NEEDED: Final = frozenset(KEYS) - {"token"}  # which events had not from the beginning
_LAYERS: Final = 6  # a container's JSON around journald's line around Ray's around a logger's: four

# CSI and OSC sequences (with their 8-bit forms) and the two-character escapes.
_TERMINAL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d\n]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[@-Z\\^_]"
)
_TIME: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
_SYSLOG: Final = r"[A-Z][a-z]{2} [ 0-9][0-9] [0-9]{2}:[0-9]{2}:[0-9]{2}"
_ZONE: Final = r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
_LEVEL: Final = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
# What may stand before a line, each anchored and bounded. Group "at" is a time, "by" who printed it.
_BEFORE = tuple(
    re.compile(pattern)
    for pattern in (
        # Ray's driver: (Actor pid=1), (repr(of=it) pid=1, ip=10.0.0.2), (raylet), (autoscaler +5s)
        r"\((?P<by>[^\n]{0,160}?\bpid=[0-9]{1,10}(?:, ip=[^()\s]{1,64})?"
        r"|(?:raylet|autoscaler|gcs_server)(?: \+[0-9hms]{1,12})?(?:, ip=[^()\s]{1,64})?)\) ?",
        # Kubernetes: 2026-11-30T07:06:05.351Z stderr F
        rf"(?P<at>{_TIME}{_ZONE}) (?P<by>stdout|stderr) [FP] ",
        # syslog and journald: Nov 30 06:59:02 host python[123]:
        rf"(?:<[0-9]{{1,3}}>)?(?P<at>{_SYSLOG}|{_TIME}{_ZONE}) "
        r"(?P<by>[^\s:]{1,255} [^\s:\[\]]{1,128}(?:\[[0-9]{1,10}\])?): ",
        # Ray's and plain Python loggers: 2026-11-30 07:06:05,351<tab>WARNING worker.py:307 --
        rf"(?P<at>{_TIME})\s{{1,4}}{_LEVEL} (?:\([^()\n]{{1,40}}\) )?[^\s:]{{1,120}}:[0-9]{{1,7}} -- ",
        rf"{_LEVEL}(?P<at> [0-9]{{2}}-[0-9]{{2}} [0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}}) \[[^\[\]\n]{{1,120}}\] ",
        rf"{_LEVEL}:[^\s:]{{1,120}}:",
        rf"{_LEVEL}(?:: ?|[\t ])",
        # PyTorch: what a rank did not catch, [rank0]: with a space; torchrun --tee, [default0]: without
        r"\[(?P<by>rank[0-9]{1,7})\]: ",
        r"\[(?P<by>[A-Za-z_][A-Za-z0-9_-]{0,40}[0-9])\]:",
        # srun --label, right-aligned; four spaces and a number are a line of source in a traceback
        r" {0,3}(?P<by>[0-9]{1,6}): ",
        # docker compose; the tree of an ExceptionGroup begins with spaces
        r"(?P<by>[A-Za-z0-9][A-Za-z0-9_.-]{0,80}-[0-9]{1,4}) {1,40}\| ",
    )
)
_REPEATED = re.compile(
    r" \[repeated ([0-9]{1,9})x across cluster\]"
    r"(?: \(Ray deduplicates logs by default\.[^\n]{0,400}\))?\s{0,8}\Z"
)
_STRING: Final = r'"(?:[^"\\\x00-\x1f]|\\.){0,300}"'
# How an event begins. Nothing foreign can stand so far left: key and detail come later.
_HEAD = re.compile(
    rf'\{{"ts":\s?[0-9.eE+-]{{1,40}},\s?"level":\s?"[a-z]{{1,16}}",\s?"event":\s?{_STRING},'
    r'\s?"code":\s?"([A-Z0-9_.]{3,60})"(?:,\s?"id":\s?"([0-9A-Za-z]{8})")?'
)
# Its end, also after json.dumps, repr, html.escape or urllib's quote have been at it.
_QUOTE: Final = r"""(?:\\{0,64}"|&quot;|&\#34;|%22|\\{1,64}u0022)"""
_OWN_BEFORE = re.compile(
    rf"(?:\}}|%7D)(?:,|%2C)(?:\s|%20)?{_QUOTE}token{_QUOTE}(?::|%3A)(?:\s|%20)?{_QUOTE}\Z", re.IGNORECASE
)
_OWN_AFTER = re.compile(
    rf"""{_QUOTE}(?:\}}|%7D)(?:[\\'"\s]|&\#x?27;|&quot;|%27|%22|%0A){{0,64}}\Z""", re.IGNORECASE
)
_OWN_LENGTH: Final = 256


class Line(NamedTuple):
    """A line without what stood around it: the ``text``; ``source``, who printed it (Ray's worker, a
    host's program, a container's stream; empty when nothing says so); ``at``, the time as it stood
    there; ``repeated``, for how many copies Ray says that the line stands, 0 where it says nothing."""

    text: str
    source: str = ""
    at: str = ""
    repeated: int = 0


def without_terminal(text: str) -> str:
    """``text`` without the sequences that a terminal obeys: colours, titles, links, cursor moves."""
    return _TERMINAL.sub("", text) if "\x1b" in text or "\x9b" in text or "\x9d" in text else text


def unwrap(line: str) -> Line:
    """``line`` without what a terminal, Ray, a logger or a container runtime put around it. Linear in
    its length; never raises."""
    text = without_terminal(line).rstrip("\r\n")
    source: list[str] = []
    at = ""
    for _ in range(_LAYERS):
        wrapped = _docker(text)
        if wrapped is not None:
            text = without_terminal(wrapped["log"]).rstrip("\r\n")
            source.append(str(wrapped.get("stream") or ""))
            at = at or str(wrapped.get("time") or "")
            continue
        found = next((match for match in (p.match(text) for p in _BEFORE) if match is not None), None)
        if found is None:
            break
        said = found.groupdict()
        source.append(said.get("by") or "")
        at = at or (said.get("at") or "").strip()
        text = text[found.end() :]
    repeated = 0
    start = text.rfind(" [repeated ")
    behind = _REPEATED.match(text, start) if start >= 0 else None
    if behind is not None:
        text, repeated = text[:start], int(behind.group(1))
    return Line(text, " ".join(part for part in source if part), at, repeated)


def strip(line: str) -> str:
    """The text alone of `unwrap`."""
    return unwrap(line).text


def event_of(line: str) -> dict[str, Any] | None:
    """The event that ``line`` is, as the mapping that it was written from; None when it is no event,
    or not a whole one. What stands around it does not matter. Never raises."""
    return _event(strip(line))


def read_line(line: str, *, key: Key = None) -> Reading:
    """Read the failure that a line of a log tells of. Never raises; linear in the line's length.

    A whole event gives all of it, as structured data (see above); of one that was cut at its tail the
    fixed head gives code and id, as a guess unless its token is still there; of one that was cut at its
    head the token that it ends with is read. Any other line gives its first token, the one that is
    believed most. An event that is quoted inside of a text is a text."""
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE // 2]}\n{line[-MAX_LINE // 2 :]}"
    visible = scan(line, key=key)
    text = strip(line)
    event = _event(text)
    if event is not None and isinstance(event["code"], str):
        found = _read_event(event, event["code"], visible, key)
        if found is not None:
            return found
    head = _HEAD.match(text) if event is None else None
    if head is not None:
        found = _read_head(head, visible)
        if found is not None:
            return found
    token, trust = _choose(visible, line), Trust.SIGNED
    if token is None and text != line:
        token, trust = _choose(scan(text, key=key), text), Trust.HEURISTIC
    if token is None:
        return Reading()
    trust = token.trust if token.trust is Trust.SIGNED else min(trust, token.trust)
    return Reading(token.code or FOREIGN, token.id, "", {}, trust, token.raw)


def _docker(text: str) -> dict[str, Any] | None:
    if not text.startswith('{"log":"'):
        return None
    found = _decoded(text)
    return found if found is not None and isinstance(found["log"], str) else None


def _event(text: str) -> dict[str, Any] | None:
    if not text.startswith('{"ts":'):
        return None
    found = _decoded(text)
    return found if found is not None and found.keys() >= _NEEDED else None


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        # Not msgspec, which refuses the lone surrogates that other programs write.
        found = json.loads(text)
    except (ValueError, RecursionError):  # cut, or never JSON
        return None
    return found if isinstance(found, dict) else None


def _read_event(event: Mapping[str, Any], named: str, visible: list[Token], key: Key) -> Reading | None:
    try:
        code = Code(named)
    except ValueError:  # a later release's family: its token carries it
        return None
    data = event["data"] if isinstance(event["data"], dict) else {}
    id, own = str(event["id"] or ""), str(event.get("token") or "").upper()
    token = next((t for t in visible if t.raw == own and t.code == code and t.id == id.upper()), None)
    if token is None:
        trust = Trust.HEURISTIC
    elif token.trust is Trust.SIGNED or not (key or (key is None and held())):
        trust = Trust.STRUCTURED
    else:  # this process could tell the run's own: this one isn't
        trust = token.trust
    raw = token.raw if token is not None else ""
    return Reading(code, id, text_of(event["detail"] or ""), data, min(trust, trust_of(data)), raw)


def _read_head(head: re.Match[str], visible: list[Token]) -> Reading | None:
    try:
        code = Code(head.group(1))
    except ValueError:
        return None
    id = head.group(2) or ""
    token = next((t for t in visible if t.code == code and t.id == id.upper()), None)
    if token is None:
        return Reading(code, id, trust=Trust.HEURISTIC)
    return Reading(code, id, trust=token.trust, raw=token.raw)


def _choose(tokens: list[Token], text: str) -> Token | None:
    if not tokens:
        return None
    most = max(token.trust for token in tokens)
    best = [token for token in tokens if token.trust is most]
    # An event that lost its head may quote other failures in its detail: its own token comes last.
    start, end = list(re.finditer(best[-1].raw, text, re.IGNORECASE))[-1].span()
    if (
        len(best) > 1
        and _OWN_AFTER.match(text, end) is not None
        and _OWN_BEFORE.search(text[max(0, start - _OWN_LENGTH) : start]) is not None
    ):
        return best[-1]
    return best[0]
