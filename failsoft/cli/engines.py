"""``failsoft engines``: a file's engines as a service, and asking it.

Exit status of ``up``: 0 stopped in order; 1 every engine was given up, or one could not be stopped; 2 the
file is wrong, the fleet runs already, or Ray does not start. Of ``status``: 0 all engines are ready; 1 not
all. Of ``drain``, ``restart`` and ``down``: 0 done; 1 it failed. Of these four: 2 an argument is wrong; 3
nobody runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from failsoft.serving import LONGEST
from protocol import CodedError

if TYPE_CHECKING:
    from failsoft.serving.asking import Asking
    from failsoft.serving.control import FleetStatus
    from failsoft.serving.view import Watching

app = typer.Typer(help="Run a file's engines as a service, and ask it.", no_args_is_help=True)

Which = Annotated[
    str | None, typer.Argument(help="The fleet's name or its file; default: the one that runs.")
]
Key = Annotated[str, typer.Argument(help="The engine's key or name, as `status` tells them.")]
Fleet = Annotated[
    str | None, typer.Option("--fleet", help="The fleet's name or its file; default: the one that runs.")
]
NOBODY = 3


@app.command()
def up(
    file: Annotated[Path, typer.Argument(help="The engines file (TOML); see examples/engines.toml.")],
    json_output: Annotated[
        bool, typer.Option("--json", help="Events as JSON lines on stdout, text on stderr.")
    ] = False,
) -> None:
    """Start the engines of FILE and keep them until TERM or Ctrl-C.

    It stays in the foreground, a line for each change. In the background: `systemd-run --user failsoft
    engines up FILE`, or `nohup failsoft engines up FILE > engines.log &`. The first signal stops the
    engines in order, a second one kills them.
    """
    # Ray is loaded by these, and not at the top: `failsoft --help` and a bad file answer at once.
    from dispatch.engines.config import read_engines

    try:
        told = read_engines(file)
        from failsoft.serving.service import Service
        from failsoft.serving.view import Printer

        code = asyncio.run(Service(told, Printer(sys.stdout, sys.stderr, json=json_output)).run())
    except CodedError as error:
        raise _refuse("up", error) from None
    except KeyboardInterrupt:  # before the service had its handlers: nothing runs yet
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def status(
    which: Which = None,
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Tell how the engines stand."""

    async def ask(fleet: Asking) -> int:
        from failsoft.serving.view import show

        found = await fleet.status()
        if json_output:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            show(_console(), found)
        return 0 if found.whole else 1

    _ask("status", which, ask)


@app.command()
def drain(
    key: Key,
    fleet: Fleet = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=LONGEST, help="Seconds to wait until it is down; default: its deadlines added up."
        ),
    ] = None,
) -> None:
    """Take one engine out of the routing, let it finish what it has, and stop it for good."""
    _order("drain", fleet, lambda asking, watch: asking.drain(key, timeout, watch))


@app.command()
def restart(
    key: Key,
    fleet: Fleet = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=LONGEST, help="Seconds to wait until it is ready; default: its deadlines added up."
        ),
    ] = None,
) -> None:
    """Give one engine a new life, once it has finished what it has; also one that was drained or given up."""
    _order("restart", fleet, lambda asking, watch: asking.restart(key, timeout, watch))


@app.command()
def down(
    which: Which = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.0, max=LONGEST, help="Kill engines that are still there after so many seconds."),
    ] = None,
) -> None:
    """Stop all engines and the service; returns when they are gone."""

    async def order(fleet: Asking) -> int:
        from failsoft.serving.view import Watching

        with Watching(_console()) as watch:
            left = await fleet.down(timeout, watch)
        for failure in left.failures:
            typer.echo(f"failsoft engines down: {' '.join(failure.split())}", err=True)
        if not left.failures:
            typer.echo(f"fleet {left.name} is down")
        return 1 if left.failures else 0

    _ask("down", which, order)


def _order(
    command: str, which: str | None, give: Callable[[Asking, Watching], Awaitable[FleetStatus]]
) -> None:
    """Give an order for one engine, show what goes on meanwhile, and how the fleet stands then."""

    async def order(asking: Asking) -> int:
        from failsoft.serving.view import Watching, show

        with Watching(_console()) as watch:
            left = await give(asking, watch)
        show(_console(), left)
        return 0

    _ask(command, which, order)


def _ask(command: str, which: str | None, ask: Callable[[Asking], Awaitable[int]]) -> None:
    from failsoft.serving.asking import Asking, NobodyRuns, find

    async def asked() -> int:
        async with Asking(find(which)) as fleet:
            return await ask(fleet)

    try:
        code = asyncio.run(asked())
    except NobodyRuns as nobody:
        typer.echo(f"failsoft engines {command}: {nobody}", err=True)
        raise typer.Exit(NOBODY) from None
    except CodedError as error:
        raise _refuse(command, error) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _refuse(command: str, error: CodedError) -> typer.Exit:
    detail = " ".join(error.detail.split()) or str(error.code)
    typer.echo(f"failsoft engines {command}: {detail}", err=True)
    return typer.Exit(2 if error.code.family in ("CONFIG", "REQUEST") else 1)


def _console() -> Console:
    return Console(highlight=False, emoji=False)
