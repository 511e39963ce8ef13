"""``failsoft codes``: the catalogue or a family of it, for a terminal, as JSON, or as docs/codes.md.

Exit status: 0; 2 for a code that is malformed or not in the catalogue.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protocol import Code, Family, catalogue
from protocol.catalogue import Entry

_PAGE = """# Codes

Every failure that reaches a caller carries one of these. A code is `FAMILY.REASON`; it is never renamed
and never reused. *Advice* is the default action, *outcome* what is known of the work when the code is
seen. Made from the catalogue by `make docs`.

Users add their own codes with `catalogue.register`, once, where they are imported by every process. Keep
those that were ever issued in a file, one a line, and call `catalogue.require(Path("codes.txt"))` after
the registrations: it refuses to start when one was renamed or removed. The built-in codes are held so by
`protocol/issued_codes.py`.
"""


def codes(
    code: Annotated[
        str | None, typer.Argument(help="One code (UPSTREAM.ABORTED) or a family (ENGINE).")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    markdown_output: Annotated[bool, typer.Option("--markdown", help="As the page docs/codes.md.")] = False,
) -> None:
    """List the codes, or those of a family, or tell all about one."""
    family = code.strip().upper() if code is not None else ""
    one = code is not None and family not in Family.__members__
    if one:
        entries = [_find(str(code))]
    else:
        entries = [entry for entry in catalogue if not family or entry.code.family == family]
    if markdown_output:
        typer.echo(markdown(), nl=False)
    elif json_output:
        found = [as_dict(entry) for entry in entries]
        typer.echo(json.dumps(found[0] if one else found, indent=2))
    elif one:
        for name, value in as_dict(entries[0]).items():
            typer.echo(f"{name:<10}{value}")
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("code", "advice", "outcome", "meaning"):
            table.add_column(column, no_wrap=column != "meaning")
        for entry in entries:
            table.add_row(str(entry.code), entry.advice, entry.outcome, entry.meaning)
        Console(highlight=False).print(table)


def as_dict(entry: Entry) -> dict[str, Any]:
    """An entry as plain data."""
    return {
        "code": str(entry.code),
        "meaning": entry.meaning,
        "advice": entry.advice,
        "outcome": entry.outcome,
        "runbook": entry.runbook,
    }


def markdown() -> str:
    """The page docs/codes.md, whole."""
    out = [_PAGE]
    for family in Family:
        entries = [entry for entry in catalogue if entry.code.family is family]
        if not entries:
            continue
        out.append(
            f"\n## {family}\n\n| code | meaning | advice | outcome | runbook |\n|---|---|---|---|---|\n"
        )
        for e in entries:
            cells = (f"`{e.code}`", e.meaning, e.advice, e.outcome, e.runbook)
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(out)


def _find(text: str) -> Entry:
    try:
        code = Code(text.strip().upper())
    except ValueError as exc:
        raise _refuse(text, str(exc)) from None
    if code not in catalogue:
        raise _refuse(text, f"{code} is not in the catalogue")
    return catalogue.entry(code)


def _refuse(text: str, what: str) -> typer.Exit:
    near = catalogue.nearest(text)
    hint = f"did you mean {' or '.join(near)}?" if near else "`failsoft codes` lists what there is"
    typer.echo(f"failsoft codes: {what}; {hint}", err=True)
    return typer.Exit(2)
