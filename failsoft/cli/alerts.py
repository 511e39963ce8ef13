"""``failsoft alerts``: watch an events file by rules, and try rules out on an old one.

Exit status: 0 when all is well; 1 when ``run --once`` leaves an alert firing; 2 when a file or an
option is wrong; 130 after Ctrl-C (143 after SIGTERM), once what was waiting has been delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from faults.alerts import (
    AlertEngine,
    AlertWatcher,
    RuleFile,
    Sink,
    Terminal,
    build_sinks,
    default_rules,
    load_rules,
)
from faults.alerts.rules import Rule
from faults.alerts.tail import Tail, TailStats
from protocol import CodedError

app = typer.Typer(help="Watch a run's events file and tell what fires.", no_args_is_help=True)


@app.command()
def run(
    events: Annotated[Path, typer.Argument(help="The events file (JSON lines); it may appear later.")],
    rules: Annotated[Path | None, typer.Option(help="The rules file; default: those of the package.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Replay the file to its end; exit 1 when an alert is left firing.")
    ] = False,
    webhook: Annotated[list[str] | None, typer.Option(help="A URL to post changes to; repeatable.")] = None,
    alertmanager: Annotated[
        list[str] | None, typer.Option(help="An Alertmanager's base URL; repeatable.")
    ] = None,
) -> None:
    """Follow EVENTS from its beginning and deliver what fires and what resolves.

    The URLs add to those of the rules file. Without --once it goes on until Ctrl-C (exit 130).
    """
    try:
        told = load_rules(rules) if rules is not None else default_rules()
        sinks = build_sinks(
            told.sinks,
            webhook=webhook or (),
            alertmanager=alertmanager or (),
            terminal=Terminal(Console()),
        )
        status = asyncio.run(_run(events, told, sinks, once=once))
    except CodedError as exc:
        raise _fail(exc) from exc
    raise typer.Exit(status)


@app.command()
def check(
    rules: Annotated[Path, typer.Argument(help="The rules file to check.")],
    events: Annotated[
        Path | None, typer.Option(help="An events file: say how often each rule would have fired on it.")
    ] = None,
) -> None:
    """Check RULES and print one line a rule."""
    try:
        told = load_rules(rules)
        fired: Counter[str] = Counter()
        resolved: Counter[str] = Counter()
        stats = asyncio.run(_replay(events, told, fired, resolved)) if events is not None else None
    except CodedError as exc:
        raise _fail(exc) from exc
    for rule in told.rules:
        counts = f" | fired {fired[rule.name]} times, resolved {resolved[rule.name]}" if stats else ""
        typer.echo(_line(rule) + counts)
    if stats is not None and (skipped := stats.bad_lines + stats.long_lines):
        typer.echo(f"{events}: {skipped} lines were no events and were skipped", err=True)


async def _run(events: Path, rules: RuleFile, sinks: list[Sink], *, once: bool) -> int:
    # A replay may have a long queue to deliver, and nobody waits at its Ctrl-C.
    watcher = AlertWatcher(events, rules, sinks, follow=not once, close_deadline=30.0 if once else 5.0)
    loop = asyncio.get_running_loop()
    caught: list[int] = []

    def stop(signum: int) -> None:
        # The first one ends the watching and flushes; the handler is gone then, so the second one kills.
        caught.append(signum)
        loop.remove_signal_handler(signum)
        watcher.stop()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop, signum)
    with _logs_on_stderr():
        async with watcher:
            await watcher.wait()
    if watcher.error is not None:
        raise watcher.error
    if caught:
        return 128 + caught[0]
    if once:
        typer.echo(
            f"{watcher.stats.events} events: {watcher.fired} alerts fired, {len(watcher.firing)} left firing"
        )
        return 1 if watcher.firing else 0
    return 0


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(" ".join(record.getMessage().split()), err=True)


@contextlib.contextmanager
def _logs_on_stderr() -> Iterator[None]:
    """What is waited for, and warnings (skipped lines, lost deliveries), as one line each, however
    logging is set up. Errors are left out: they are raised, and told as every other wrong thing."""
    log, handler = logging.getLogger("faults.alerts"), _Stderr(logging.INFO)
    handler.addFilter(lambda record: record.levelno < logging.ERROR)
    before, log.propagate, level = log.propagate, False, log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = before


async def _replay(events: Path, rules: RuleFile, fired: Counter[str], resolved: Counter[str]) -> TailStats:
    engine = AlertEngine(rules.rules, clock=None)
    tail = Tail(events, follow=False)
    async for event in tail:
        for change in engine.feed(event):
            (fired if change.kind == "fired" else resolved)[change.alert.rule] += 1
    return tail.stats


def _line(rule: Rule) -> str:
    parts = [rule.name, rule.type, rule.severity, f"match {rule.match}"]
    if rule.type == "frequency":
        parts.append(f"{rule.count} within {rule.within:g} s")
    if rule.group_by:
        parts.append(f"by {','.join(rule.group_by)}")
    if rule.resolve is not None:
        parts.append(f"resolve {rule.resolve}")
    if rule.resolve_after is not None:
        parts.append(f"resolve after {rule.resolve_after:g} s")
    return " | ".join(parts)


def _one_line(error: CodedError) -> str:
    return " ".join(f"{error.code}: {error.detail}".split())


def _fail(error: CodedError) -> typer.Exit:
    typer.echo(_one_line(error), err=True)
    return typer.Exit(2)
