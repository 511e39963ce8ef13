"""The catalogue: every code with its meaning, its default advice and what an engineer does about it.

One table feeds the docs page, ``failsoft codes`` and ``failsoft explain``. Users add their own
codes with `catalogue.register`; a code is registered once, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from protocol.codes import Code, Family

Advice = Literal["retry_same", "retry_elsewhere", "wait", "recreate", "cancel", "give_up"]
Outcome = Literal["not_run", "unknown", "ran"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One code of the catalogue.

    ``advice`` is the default action, ``outcome`` what is known of the work when this code is
    seen (not run, unknown, ran), ``runbook`` two or three sentences for the person on call."""

    code: Code
    meaning: str
    advice: Advice
    outcome: Outcome
    runbook: str


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

        Raises ValueError when the code is malformed or already registered."""
        code = Code(f"{family}.{reason}")
        if not meaning.strip():
            raise ValueError(f"{code}: a code needs a one-line meaning")
        self._add(Entry(code, meaning, advice or _FAMILY_ADVICE[code.family], outcome, runbook or meaning))
        return code

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
        if entry.code in self._entries:
            raise ValueError(f"{entry.code} is already registered: {self._entries[entry.code].meaning}")
        if entry.advice not in get_args(Advice) or entry.outcome not in get_args(Outcome):
            raise ValueError(
                f"{entry.code}: advice {entry.advice!r} or outcome {entry.outcome!r} is not one of the known"
            )
        self._entries[entry.code] = entry


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

    return Catalogue(ENTRIES)


catalogue: Final = _builtin()
