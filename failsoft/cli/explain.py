"""``failsoft explain``: from a pasted traceback, a worker's log or an events file to what to do.

Exit status: 0 when a failure was recognised; 1 when none was; 2 when the input cannot be read (missing,
empty, binary).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.console import Console
from rich.text import Text

from faults import Fault, classify_text
from faults.meanings import meaning
from faults.text_faults import plain
from protocol import Code, catalogue
from protocol.events import KEYS

MAX_INPUT: Final = 4 * 2**20
"""Bytes that are looked at, from the end: the failure that ended a run is near the end of its log."""
MAX_EVENT_INPUT: Final = 64 * 2**20
"""Bytes of an events file that are looked at, from its beginning: the first failure explains the rest."""
MAX_FOLLOWED: Final = 12
_EVENTS: Final = re.compile(rb'\s*\{"ts":[0-9.eE+-]{1,40},"level":"[a-z]{1,16}","event":"')
"""How an events file begins; other logs in JSON, which begin with a time too, are read from the end."""
_COLOURS: Final = {"code": "bold red", "advice": "bold green"}


def explain(
    source: Annotated[str, typer.Argument(help="A file, or - for what is piped or pasted in.")],
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what failed, whose fault it is, what is known of the outcome, and what to do."""
    data, cut = _read(source)
    if not data.strip():
        raise _refuse(source, "is empty; paste a traceback, or name a log or an events file")
    if b"\0" in data[:4096]:
        raise _refuse(source, "is binary; a traceback, a log or an events file is text")
    text = data.decode("utf-8", "replace")
    events = _events(text)
    told = explain_events(events) if events else explain_text(text)
    if cut:
        told["cut"] = f"only {len(data)} bytes of the input were looked at"
    if json_output:
        typer.echo(_printable(json.dumps(told, indent=2, ensure_ascii=False)))
    else:
        _print(told)
    raise typer.Exit(0 if told["recognised"] else 1)


def explain_text(text: str) -> dict[str, Any]:
    """What a traceback or a log means, as the facts that are printed."""
    fault = classify_text(text)
    return {"recognised": fault.code.family != "UNKNOWN", **_facts(fault)}


def explain_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The first failure of an events file, and what followed from it."""
    failures = [e for e in events if e["level"] in ("warning", "error") and _known(e["code"])]
    if not failures:
        return {"recognised": False, "events": len(events), "meaning": "no event carries a failure's code"}
    first = failures[0]
    code = Code(first["code"])
    kind, blame, outcome = meaning(code)
    followed = Counter(f"{e['event']} {e['code']}" for e in failures[1:])
    return {
        "recognised": True,
        "code": str(code),
        "kind": kind.value,
        "blame": blame.value,
        "outcome": outcome.value,
        "trust": "structured",
        **_advice(code),
        "evidence": first["detail"],
        "event": first["event"],
        "key": first["key"],
        "ts": first["ts"],
        "events": len(events),
        "followed": dict(followed.most_common(MAX_FOLLOWED)),
    }


def _facts(fault: Fault) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "code": str(fault.code),
        "kind": fault.kind.value,
        "blame": fault.blame.value,
        "outcome": fault.outcome.value,
        "trust": fault.trust.name.lower(),
        **_advice(fault.code),
        "evidence": fault.evidence,
    }
    if fault.id:
        facts["id"] = fault.id
    if fault.status is not None:
        facts["status"] = fault.status
    return facts


def _advice(code: Code) -> dict[str, str]:
    entry = catalogue.entry(code)
    return {"advice": entry.advice, "meaning": entry.meaning, "runbook": entry.runbook}


def _known(code: object) -> bool:
    try:
        Code(str(code))
    except ValueError:
        return False
    return True


def _events(text: str) -> list[dict[str, Any]]:
    """The events, when the input is an events file: its first whole line says so."""
    found: list[dict[str, Any]] = []
    for line in text.split("\n"):  # not splitlines: a detail may hold U+2028
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and event.keys() >= set(KEYS):
            found.append(event)
        elif not found:
            return []
    return found


def _read(source: str) -> tuple[bytes, bool]:
    try:
        if source == "-":
            if sys.stdin is None:
                raise _refuse(source, "is closed; pipe a text in, or name a file")
            return _bounded(sys.stdin.buffer)
        with Path(source).open("rb") as file:
            return _bounded(file, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise _refuse(source, "is not there; check the path, or pipe the text in and write -") from None
    except OSError as exc:
        raise _refuse(source, f"cannot be read: {exc.strerror}") from None


def _bounded(file: BinaryIO, size: int = 0) -> tuple[bytes, bool]:
    """The beginning of an events file or the end of any other, and whether that is not all of it.
    ``size`` is 0 for a pipe, which has none."""
    kept, cut = file.read(4096), False
    if b"\0" in kept:
        return kept, False  # binary, and perhaps without an end
    if _EVENTS.match(kept):
        kept += file.read(MAX_EVENT_INPUT - len(kept))
        return kept, file.read(1) != b""
    if size > MAX_INPUT:
        file.seek(-MAX_INPUT, os.SEEK_END)
        return file.read(MAX_INPUT), True
    while chunk := file.read(1 << 20):
        kept += chunk
        if len(kept) > MAX_INPUT:
            kept, cut = kept[-MAX_INPUT:], True
    return kept, cut


def _print(told: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for name, value in told.items():
        if name == "recognised":
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{what} ×{n}" for what, n in value.items()) or "nothing"
        line = Text(f"{name:<10}", style="dim")
        line.append(_printable(str(value)), style=_COLOURS.get(name, ""))
        console.print(line, soft_wrap=True)
    if not told["recognised"]:
        console.print(
            "Nothing in it names a failure that failsoft knows. Paste the whole traceback, from its first "
            "line to the exception's own, or the run's events.jsonl.",
            soft_wrap=True,
        )


def _printable(text: str) -> str:
    """``text`` as a terminal may get it: no control characters, and no lone surrogates, which JSON can
    hold and UTF-8 cannot."""
    return plain(text).encode("utf-8", "replace").decode("utf-8")


def _refuse(source: str, what: str) -> typer.Exit:
    name = "the input" if source == "-" else source
    typer.echo(f"failsoft explain: {name} {what}", err=True)
    return typer.Exit(2)
