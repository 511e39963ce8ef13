"""The command line: one file a command."""

from __future__ import annotations

import io
import sys

import typer

from failsoft.cli import alerts, codes, doctor, engines, explain, rollout

app = typer.Typer(
    name="failsoft",
    help="Fault tolerance and an error protocol for RL rollouts on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a wrong flag gets a plain line, in a terminal and in a job's log
    add_completion=False,
)
app.command()(rollout.rollout)
app.command()(explain.explain)
app.command()(codes.codes)
app.command()(doctor.doctor)
app.add_typer(alerts.app, name="alerts")
app.add_typer(engines.app, name="engines")


def main() -> None:
    """The entry point of the ``failsoft`` command."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # What the locale's encoding lacks, a log's text above all, is written as stderr writes it.
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
