"""``failsoft doctor``: what will make the next start fail, and how to mend it.

Exit status: 0 nothing above a note; 1 something is; 2 the engines file is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from protocol import CodedError

STYLES = {"note": "dim", "warning": "yellow", "error": "bold red"}


def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="An engines file: its ports, its folders and its Ray as well.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="End orphaned engine processes and remove their directories.")
    ] = False,
    ray_address: Annotated[
        str, typer.Option(help="The Ray to look at, HOST:PORT; default: the one that Ray itself finds.")
    ] = "",
) -> None:
    """Look for what engines left behind, limits that are too low and versions that do not fit."""
    # Here and not at the top: other commands do not need what the checks load.
    from dispatch.engines.config import read_engines
    from failsoft.doctor.checks import CHECKS
    from failsoft.doctor.examine import examine
    from failsoft.doctor.finding import Examined

    try:
        told = read_engines(file) if file is not None else None
    except CodedError as error:
        typer.echo(f"failsoft doctor: {' '.join(error.detail.split())}", err=True)
        raise typer.Exit(2) from None
    findings = examine(CHECKS, Examined(file=told, ray=ray_address, mend=fix))
    if json_output:
        document = {"checks": [check.name for check in CHECKS], "findings": findings}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        console = Console(highlight=False, emoji=False)
        for check in CHECKS:
            found = [finding for finding in findings if finding.check == check.name]
            if not found:
                console.print(Text(f"{check.name:<10}ok"))
            for finding in found:
                line = Text(f"{check.name:<10}")
                line.append(finding.severity, STYLES[finding.severity])
                line.append(f"  {finding.what}" + (f"  [{finding.where}]" if finding.where else ""))
                console.print(line, soft_wrap=True)
                if finding.fix:
                    console.print(Text(f"{'':<10}fix: {finding.fix}"), soft_wrap=True)
    raise typer.Exit(1 if any(finding.severity != "note" for finding in findings) else 0)
