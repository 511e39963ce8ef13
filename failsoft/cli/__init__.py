"""The command line: one file a command."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Final

import typer

from failsoft.cli import alerts, codes, doctor, engines, explain, rollout

__all__ = ["app", "main"]

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


_UNWRITABLE: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""How a write to standard output fails: nobody reads it, a full disk, a limit, a broken one."""


def main() -> None:
    """The entry point of the ``failsoft`` command."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # What the locale's encoding lacks, a log's text above all, is written as stderr writes it.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # what is still to be written would fail where nobody can tell of it
    except OSError as exc:
        if exc.errno not in _UNWRITABLE or exc.filename is not None:
            raise
        # So that the interpreter does not try once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if exc.errno != errno.EPIPE:  # its reader, as head, has seen enough
            print(f"failsoft: the output cannot be written: {exc.strerror}", file=sys.stderr)
        sys.exit(1)
