"""What a person sees: a progress line while it runs, and a summary at the end."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import IO, Any, Self, cast

import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from chaos import Injury
from dispatch.posting.observe.stats import PoolStats
from dispatch.rollout import RolloutStats
from protocol import catalogue

EVERY: float = 5.0
"""Seconds between two lines of progress where there is no terminal."""


class Recovered(msgspec.Struct, frozen=True):
    """Something that was replaced: what, why, and in how many seconds from seeing it to serving."""

    key: str
    code: str
    seconds: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run's end, as it is printed and as summary.json keeps it. Times are seconds."""

    run: str
    exit: int
    asked: int
    completed: int
    failed: int
    retried: int
    lost: int
    unfinished: int
    skipped: int
    failed_by_code: dict[str, int]
    retried_by_code: dict[str, int]
    seconds: float
    posters_recreated: int
    engines_restarted: int
    recoveries: tuple[Recovered, ...]
    alerts: tuple[str, ...]
    injuries: tuple[str, ...]
    stopped_by: str
    outputs: dict[str, str]


class _Lasting:
    """A text file that takes everything, also once its reader, its terminal or the space on its disk is
    gone: then nothing of it is kept."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._end()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._end()

    def _end(self) -> None:
        # Not only this write: what stands in the file's buffer would fail again, at the latest at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)


def standard_output() -> Console:
    """Standard output for a run, which goes on when nobody can see it any more: a Console of its own
    would end the program at a broken pipe, and raise OSError for anything else."""
    file = cast("IO[str]", _Lasting(sys.stdout)) if sys.stdout is not None else None
    return Console(file=file, highlight=False, emoji=False)


def injury_text(injury: Injury) -> str:
    """One injury in words."""
    return f"{injury.signal} to {injury.key} (pid {injury.pid})"


def print_summary(console: Console, summary: Summary) -> None:
    """Print the summary as plain lines, the same on a terminal and in a log."""

    def line(label: str, text: str) -> None:
        console.print(Text(f"{label:<18}{text}"), soft_wrap=True)

    console.print()
    line("samples", f"asked {summary.asked} · completed {summary.completed} · failed {summary.failed}")
    if summary.unfinished:
        line("", f"{summary.unfinished} were not finished when the run was stopped")
    if summary.skipped:
        line("", f"{summary.skipped} were there already (--resume)")
    line("failed by code", _counts(summary.failed_by_code))
    for code in summary.failed_by_code:
        line("", f"{code}: {catalogue.entry(code).runbook}")
    line("retried", f"{summary.retried} ({_counts(summary.retried_by_code)})")
    line("injected", "; ".join(summary.injuries) or "nothing")
    line("posters", f"recreated {summary.posters_recreated}{_recoveries(summary, 'poster/')}")
    line("engines", f"restarted {summary.engines_restarted}{_recoveries(summary, 'engine/')}")
    for text in summary.alerts or ("no alert fired",):
        line("alerts", text)
    if summary.stopped_by:
        line("stopped by", summary.stopped_by)
    for label, path in summary.outputs.items():
        line(label, path)
    line(
        "result",
        f"lost {summary.lost}, posters recreated {summary.posters_recreated}, "
        f"engines restarted {summary.engines_restarted}, in {summary.seconds:.1f} s",
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{code} {n}" for code, n in sorted(counts.items(), key=lambda kv: -kv[1])) or "none"


def _recoveries(summary: Summary, prefix: str) -> str:
    own = [r for r in summary.recoveries if r.key.startswith(prefix)]
    if not own:
        return ""
    return " (" + ", ".join(f"{r.key} after {r.code}: {r.seconds:.1f} s" for r in own) + ")"


class Progressing:
    """The live display. Without a terminal, a line every `EVERY` seconds."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("[bold]samples"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task = self._progress.add_task("samples", total=max(total, 1), state="starting")
        self._live = (
            Live(self._progress, console=console, refresh_per_second=8) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line of news, above the bar."""
        self._console.print(Text(text), soft_wrap=True)

    def update(self, now: float, stats: RolloutStats, pool: PoolStats, ready: int, engines: int) -> None:
        """Show where things stand; ``now`` is any monotonic clock, in seconds."""
        retried = stats.retried + sum(pool.retried_by_code.values())
        serving = sum(1 for poster in pool.posters if poster.state == "serving")
        state = (
            f"failed {stats.failed} · retried {retried} · in flight {pool.occupied} · "
            f"posters {serving}/{len(pool.posters)} · engines {ready}/{engines}"
        )
        settled = stats.completed + stats.failed
        fields: dict[str, Any] = {"state": state}
        self._progress.update(self._task, completed=settled, **fields)
        if self._live is None and now - self._last_line >= EVERY:
            self._last_line = now
            total = self._progress.tasks[0].total or 0
            self._console.print(Text(f"{settled}/{total:.0f} settled · {state}"), soft_wrap=True)
