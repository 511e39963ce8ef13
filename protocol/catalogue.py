"""The catalogue: every code with its meaning, its default advice and what an engineer does about it.

One table feeds the docs page, ``failsoft codes`` and ``failsoft explain``. Users add their own
codes with `Catalogue.register`; a code is registered once, for ever. Which ones were ever issued stands
in an append-only list (``protocol/issued_codes.py``; a user's own in a file of theirs), and
`Catalogue.require` refuses to start without one of them: logs, alert rules and dashboards still name it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from protocol.codes import Code, Family

Advice = Literal["retry_same", "retry_elsewhere", "wait", "recreate", "cancel", "give_up"]
Outcome = Literal["not_run", "unknown", "ran"]
STRICTNESS: Final[tuple[Advice, ...]] = (
    *("retry_same", "retry_elsewhere", "recreate", "wait", "cancel", "give_up"),
)
"""The advice from what allows the most to what allows the least: a group is named by its strictest leaf."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One code of the catalogue.

    ``advice`` is the default action, ``outcome`` what is known of the work when this code is
    seen (not run, unknown, ran), ``runbook`` two or three sentences for the person on call, ``where``
    the file and line that registered it."""

    code: Code
    meaning: str
    advice: Advice
    outcome: Outcome
    runbook: str
    where: str = field(default="", compare=False)


class Catalogue:
    """All registered codes of this process. `entry` falls back to the family for codes that other
    processes registered, so a code read from a log always has some entry."""

    def __init__(self, entries: tuple[Entry, ...] = ()) -> None:
        self._entries: dict[Code, Entry] = {}
        for entry in entries:
            self._add(entry)

    def register(
        self,
        reason: str,
        *,
        family: str,
        meaning: str,
        advice: Advice | None = None,
        outcome: Outcome = "unknown",
        runbook: str = "",
    ) -> Code:
        """Add ``family.reason`` and return it. ``advice`` defaults to the family's.

        Raises ValueError, saying what to do, when the code is malformed, its family does not exist, it
        is registered already, or meaning, advice or outcome are none."""
        code = Code(f"{family}.{reason}")
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        given = advice or _FAMILY_ADVICE[code.family]
        self._add(Entry(code, meaning, given, outcome, runbook or meaning, where))
        return code

    def require(self, issued: Iterable[str] | Path) -> None:
        """Make sure that every code that was ever issued is still registered: ``issued`` are the codes,
        or a text file with one a line (# begins a comment). To be called once all are registered.

        Raises ValueError when one is gone (renamed, most likely) or is no code; OSError when the file
        cannot be read."""
        for code, where in _issued(issued):
            if code not in self._entries:
                raise ValueError(self._gone(code, where))

    def nearest(self, text: str, count: int = 3) -> list[Code]:
        """The registered codes whose names are most like ``text``, which may be a reason alone; at most
        ``count``, and none where nothing is like it."""
        wanted = text.strip().upper()[:80]
        close = difflib.get_close_matches(wanted, self._entries, count, 0.7)
        by_reason: dict[str, list[Code]] = {}
        for code in self._entries:
            by_reason.setdefault(code.reason, []).append(code)
        for reason in difflib.get_close_matches(wanted.rpartition(".")[2], by_reason, count, 0.8):
            close += [code for code in by_reason[reason] if code not in close]
        return [Code(code) for code in close[:count]]

    def entry(self, code: Code | str) -> Entry:
        """The entry of ``code``, or one made from its family when it is not registered here."""
        code = Code(code)
        known = self._entries.get(code)
        if known is not None:
            return known
        return Entry(
            code,
            f"a code of family {code.family} that this process does not know",
            _FAMILY_ADVICE[code.family],
            "unknown",
            "The code was registered by another program or a later release: look it up there. Until then "
            f"it is treated as any other {code.family} failure.",
        )

    def __contains__(self, code: object) -> bool:
        return code in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries.values(), key=lambda e: (list(Family).index(e.code.family), e.code)))

    def __len__(self) -> int:
        return len(self._entries)

    def _add(self, entry: Entry) -> None:
        known = self._entries.get(entry.code)
        if known is not None:
            raise ValueError(
                f"{entry.code} is already registered: {known.meaning} ({known.where or 'place unknown'}); "
                f"{entry.where or 'the new one'} must take another name"
            )
        _check(entry)
        self._entries[entry.code] = entry

    def _gone(self, code: Code, where: str) -> str:
        near = self.nearest(code)
        instead = f" (the nearest that is there: {', '.join(near)})" if near else ""
        return (
            f"{where}{code} was issued and is gone from the catalogue{instead}. A code is never renamed or "
            "removed, for logs, alert rules and dashboards still name it: put its row back and let the new "
            "name stand beside it"
        )


def _check(entry: Entry) -> None:
    at = f" ({entry.where})" if entry.where else ""
    if not entry.meaning.strip() or "\n" in entry.meaning:
        raise ValueError(f"{entry.code} needs a meaning of one line{at}")
    for what, value, words in (
        ("advice", entry.advice, get_args(Advice)),
        ("outcome", entry.outcome, get_args(Outcome)),
    ):
        if value not in words:
            near = difflib.get_close_matches(str(value), words, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{entry.code}: there is no {what} {value!r}{at}; {meant}it is one of {', '.join(words)}"
            )


def _issued(issued: Iterable[str] | Path) -> Iterator[tuple[Code, str]]:
    """Each code, and where it stands, as the beginning of an error message."""
    if not isinstance(issued, Path):
        for text in issued:
            yield Code(text), ""
        return
    try:
        lines = issued.read_text("utf-8").splitlines()
    except UnicodeDecodeError as exc:
        raise ValueError(f"{issued}: a list of codes is text in UTF-8: {exc.reason}") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            yield Code(text), f"{issued}:{number}: "
        except ValueError as exc:
            raise ValueError(f"{issued}:{number}: {exc}") from None


_FAMILY_ADVICE: Final[dict[Family, Advice]] = {
    Family.TASK: "give_up",
    Family.ACTOR: "recreate",
    Family.NODE: "retry_elsewhere",
    Family.OBJECT: "give_up",
    Family.TIMEOUT: "give_up",
    Family.CANCEL: "cancel",
    Family.TRANSPORT: "retry_elsewhere",
    Family.UPSTREAM: "retry_elsewhere",
    Family.REQUEST: "give_up",
    Family.BACKPRESSURE: "wait",
    Family.POOL: "give_up",
    Family.ENGINE: "recreate",
    Family.WEIGHTS: "recreate",
    Family.QUEUE: "wait",
    Family.CONFIG: "give_up",
    Family.INTERNAL: "give_up",
    Family.UNKNOWN: "give_up",
}


def _builtin() -> Catalogue:
    # Imported here, for the table needs Entry from above.
    from protocol.builtin_codes import ENTRIES
    from protocol.issued_codes import ISSUED

    made = Catalogue(ENTRIES)
    made.require(ISSUED)
    return made


catalogue: Final = _builtin()
