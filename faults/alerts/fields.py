"""Reading one event: where a field lies, its text, whether it matches, and how a summary shows it.

Everything in an event may be foreign text (a model's output ends up in ``detail``), so nothing here
formats, evaluates or prints it as anything but capped plain text.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

Event = Mapping[str, Any]

KEYS: Final = ("code", "detail", "event", "host", "id", "key", "level", "pid", "role", "run", "token", "ts")
"""The fixed keys of an event that hold one value; ``data`` holds an object, reached as ``data.x``."""

MAX_MATCHED: Final = 10_000
"""Most characters of a value that a pattern looks at: it bounds what a line of 1 MB costs each rule."""
MAX_SHOWN: Final = 300
"""Most characters of a value in a label or a summary."""
MAX_SUMMARY: Final = 1_000
"""Most characters of a rendered summary."""

_PATH: Final = re.compile(r"data(?:\.[A-Za-z0-9_-]{1,64}){1,8}\Z")
# Control characters (a terminal obeys them), bidirectional overrides (they reorder what a reader
# sees) and lone surrogates (no UTF-8, so no JSON body, can carry them).
_UNSHOWABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_path(path: str) -> bool:
    """Whether ``path`` names a field of an event: a fixed key, or ``data.`` and keys below it."""
    return path in KEYS or _PATH.match(path) is not None


def lookup(event: Event, path: str) -> object:
    """The value at ``path``, or None where there is none. A key of ``data`` that itself holds dots is
    found before the same dots are read as steps downwards."""
    if not path.startswith("data."):
        return event.get(path)
    node: object = event.get("data")
    rest = path[len("data.") :]
    if isinstance(node, Mapping) and rest in node:
        return node[rest]
    for step in rest.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(step)
    return node


def text_of(value: object) -> str | None:
    """A scalar as JSON would write it, None for null, objects and lists (no pattern matches those)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        try:
            return str(value)
        except ValueError:  # an integer of thousands of digits, which Python refuses to print
            return None
    return None


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A value as safe text for a person: one line, no control characters, at most ``limit``
    characters, empty for what has no text. A cut value ends in a digest of the whole, so that two
    long values stay two groups."""
    text = text_of(value)
    if text is None:
        return ""
    digest = ""
    if len(text) > limit:
        digest = "~" + hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=4).hexdigest()
        text = text[: limit - len(digest)]
    return _UNSHOWABLE.sub(" ", text) + digest


@dataclass(frozen=True, slots=True)
class Matcher:
    """Shell-style globs over fields: every field must match, by any one of its patterns. A missing
    or null field matches nothing, so ``code = "*"`` means "has a code"."""

    globs: tuple[tuple[str, tuple[str, ...]], ...]
    _compiled: tuple[tuple[str, re.Pattern[str]], ...]

    @classmethod
    def of(cls, globs: Mapping[str, tuple[str, ...]]) -> Matcher:
        """Compile ``{path: patterns}``; each path must satisfy `is_path`."""
        ordered = tuple(globs.items())
        compiled = tuple(
            (path, re.compile("|".join(fnmatch.translate(one) for one in patterns)))
            for path, patterns in ordered
        )
        return cls(ordered, compiled)

    def matches(self, event: Event) -> bool:
        """Whether ``event`` is one of those meant."""
        for path, pattern in self._compiled:
            text = text_of(lookup(event, path))
            if text is None or pattern.match(text[:MAX_MATCHED]) is None:
                return False
        return True

    def __str__(self) -> str:
        return " ".join(f"{path}={'|'.join(patterns)}" for path, patterns in self.globs)


@dataclass(frozen=True, slots=True)
class Template:
    """A summary such as ``{key} died: {detail}``.

    Only field names stand in the braces. It is never handed to ``str.format``, whose attribute and
    index access (``{detail.__class__}``) and widths (``{pid:>999999999}``) are no business of a
    rules file. A missing value shows as ``-``."""

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises ValueError, with the remedy, for unknown fields, conversions, widths and lone braces."""
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as exc:
            raise ValueError(f"{exc}; write {{{{ or }}}} for a literal brace") from None
        for _, path, spec, conversion in parsed:
            if path is None:
                continue
            if spec or conversion:
                raise ValueError(f"{{{path}}} has a width or a conversion; write only the field's name")
            if not is_path(path):
                raise ValueError(
                    f"{{{path}}} is no field of an event; use {', '.join(KEYS)} or data.x "
                    "(and {{ or }} for a literal brace)"
                )
        return cls(tuple((literal, path) for literal, path, _, _ in parsed))

    def render(self, event: Event) -> str:
        """The summary for ``event``, at most `MAX_SUMMARY` characters."""
        out: list[str] = []
        for literal, path in self.parts:
            out.append(literal)
            if path is not None:
                out.append(shown(lookup(event, path)) or "-")
        return shown("".join(out), MAX_SUMMARY)
