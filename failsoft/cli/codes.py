"""``failsoft codes``: the catalogue, for a terminal, as JSON, or as the page docs/codes.md.

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
seen. Made from the catalogue by `make docs`; users add their own with `catalogue.register`.
"""


def codes(
    code: Annotated[str | None, typer.Argument(help="One code, for instance UPSTREAM.ABORTED.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    markdown_output: Annotated[bool, typer.Option("--markdown", help="As the page docs/codes.md.")] = False,
) -> None:
    """List the codes, or tell all about one."""
    entries = [_find(code)] if code is not None else list(catalogue)
    if markdown_output:
        typer.echo(markdown(), nl=False)
    elif json_output:
        found = [as_dict(entry) for entry in entries]
        typer.echo(json.dumps(found[0] if code is not None else found, indent=2))
    elif code is not None:
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
        typer.echo(f"failsoft codes: {exc}", err=True)
        raise typer.Exit(2) from None
    if code not in catalogue:
        typer.echo(
            f"failsoft codes: {code} is not in the catalogue; `failsoft codes` lists what is", err=True
        )
        raise typer.Exit(2)
    return catalogue.entry(code)
