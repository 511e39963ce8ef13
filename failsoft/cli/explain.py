"""``failsoft explain``: from a pasted traceback, a log or an events file to what to do.

Exit status: 0 when a failure was recognised; 1 when none was; 2 when the input cannot be read (missing,
empty, binary, compressed, a directory).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from failsoft.reading import Refused, chunks, lines, opened
from failsoft.story import Failure, Story
from faults import Fault, classify_text
from faults.text_faults import MAX_SEARCH, plain
from protocol import Code, catalogue
from protocol.keys import Key, Keyring, load

MAX_LOOKED_AT: Final = 500_000
"""Most lines that are read closely: beyond, a log so full of failures has told enough."""
MAX_FOLLOWED: Final = 12
"""Most kinds of later failures that are listed."""
_COLOURS: Final = {"code": "bold red", "advice": "bold green"}
_WIDTH: Final = 10


def explain(
    source: Annotated[str, typer.Argument(help="A file, or - for what is piped or pasted in.")],
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    key: Annotated[
        Path | None, typer.Option(help="The run's key file, to verify signed tokens with.")
    ] = None,
) -> None:
    """Say what failed first, whose fault it is, what is known of the outcome, what to do, and what
    followed. SOURCE is a traceback, a log of any size, or a run's events.jsonl."""
    ring = _load(key) if key is not None else None
    try:
        told = explain_source(source, ring)
    except Refused as exc:
        raise _refuse(source, str(exc)) from None
    except FileNotFoundError:
        raise _refuse(source, "is not there; check the path, or pipe the text in and write -") from None
    except OSError as exc:
        raise _refuse(source, f"cannot be read: {exc.strerror}") from None
    if json_output:
        typer.echo(_printable(json.dumps(told, indent=2, ensure_ascii=False)))
    else:
        _print(told)
    raise typer.Exit(0 if told["recognised"] else 1)


def _load(path: Path) -> Keyring:
    try:
        return load(path)
    except FileNotFoundError:
        raise _refuse(str(path), "is not there; name the file that protocol.keys.save wrote") from None
    except OSError as exc:
        raise _refuse(str(path), f"cannot be read: {exc.strerror}") from None
    except ValueError as exc:  # it names the file and the remedy
        typer.echo(f"failsoft explain: {exc}", err=True)
        raise typer.Exit(2) from None


def explain_source(source: str, key: Key = None) -> dict[str, Any]:
    """What a traceback, a log or an events file tells, as the facts that are printed. ``source`` is a
    path, or - for stdin.

    Raises `Refused` for what is no text, OSError for what cannot be opened or read."""
    story, tail, looked_at, last = Story(key), _Tail(), 0, 0
    with opened(source) as (file, size):
        for number, line in lines(tail.pass_on(chunks(file, source, size)), lambda: story.open):
            story.feed(number, line)
            looked_at, last = looked_at + 1, number
            if looked_at == MAX_LOOKED_AT:
                break
    story.end()
    if tail.empty:
        raise Refused("is empty; paste a traceback, or name a log or an events file")
    told = _told(story, tail.kept.decode("utf-8", "replace"), key)
    if looked_at == MAX_LOOKED_AT:
        told["cut"] = f"only the input up to line {last} was looked at: it is full of failures"
    return told


class _Tail:
    """The end of the input, which is classified as one text when no line of it was recognised."""

    def __init__(self) -> None:
        self.kept = b""
        self.empty = True

    def pass_on(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.empty = self.empty and not piece.strip()
            self.kept = (self.kept + piece[-MAX_SEARCH:])[-MAX_SEARCH:]
            yield piece


def _told(story: Story, tail: str, key: Key) -> dict[str, Any]:
    first = story.first
    if first is not None:
        told = {"recognised": True, **_facts(first.fault), **_place(first), **_followed(story)}
        if story.events:
            told["events"] = story.events
        if story.unnamed is not None and story.unnamed.line < first.line:
            told["before"] = f"line {story.unnamed.line}: {_last_line(story.unnamed.fault.evidence)}"
    elif story.events:
        told = {
            "recognised": False,
            "events": story.events,
            "meaning": "no event carries a failure's code",
        }
    else:
        fault = classify_text(tail, key=key)
        told = {"recognised": fault.code.family != "UNKNOWN", **_facts(fault)}
        if story.unnamed is not None:
            told["line"] = story.unnamed.line
    if story.unverified:
        told["unread"] = (
            f"{story.unverified} tokens that could not be verified: damaged, or signed with a key that was "
            "not given (--key FILE)"
        )
    return told


def _place(first: Failure) -> dict[str, Any]:
    place: dict[str, Any] = {}
    if first.event is not None:
        place = {name: first.event[name] for name in ("event", "key", "ts")}
    elif first.at:
        place["at"] = first.at
    if first.source:
        place["source"] = first.source
    return {**place, "line": first.line}


def _followed(story: Story) -> dict[str, Any]:
    later = [
        {"what": kind.what, "count": kind.count, "line": kind.places[0][0], "at": kind.places[0][1]}
        for kind in story.followed[:MAX_FOLLOWED]
    ]
    return {"followed": {kind["what"]: kind["count"] for kind in later}, "later": later}


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


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _print(told: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for name, value in told.items():
        if name in ("recognised", "later"):
            continue
        if name == "followed":
            value = f"\n{'':<{_WIDTH}}".join(map(_later, told["later"])) or "nothing"
        line = Text()
        line.append(f"{name:<{_WIDTH}}", style="dim")
        line.append(_printable(str(value)), style=_COLOURS.get(name, ""))
        console.print(line, soft_wrap=True)
    if not told["recognised"]:
        console.print(
            "Nothing in it names a failure that failsoft knows. Paste the whole traceback, from its first "
            "line to the exception's own, or the run's events.jsonl.",
            soft_wrap=True,
        )


def _later(kind: dict[str, Any]) -> str:
    when = f", {kind['at']}" if kind["at"] else ""
    return f"{kind['what']} ×{kind['count']} (line {kind['line']}{when})"


def _printable(text: str) -> str:
    """``text`` as a terminal may get it: no control characters, and no lone surrogates, which JSON can
    hold and UTF-8 cannot."""
    return plain(text).encode("utf-8", "replace").decode("utf-8")


def _refuse(source: str, what: str) -> typer.Exit:
    name = "the input" if source == "-" else source
    typer.echo(f"failsoft explain: {name} {what}", err=True)
    return typer.Exit(2)
