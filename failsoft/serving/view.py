"""What a person sees of a running fleet: a line a change, a table, or JSON."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dispatch.engines.spec import EngineStatus
from failsoft.serving.control import Engine, FleetStatus
from protocol import Events

COLUMNS = (
    "engine",
    "name",
    "state",
    "stage",
    "url",
    "pid",
    "node",
    "restarts",
    "since",
    "age",
    "weights",
    "last failure",
)


class Printer:
    """Lines of a running service: text, or with ``json`` its events as JSON lines (and the text on
    ``errors``). A reader that has gone away does not end the engines: then nothing is printed."""

    def __init__(self, out: TextIO, errors: TextIO, *, json: bool) -> None:
        self._out, self._text, self._json = out, errors if json else out, json
        self._told: dict[str, tuple[object, ...]] = {}
        self.events = Events(self)

    def say(self, text: str) -> None:
        """One line of news."""
        _print(self._text, f"{time.strftime('%H:%M:%S')} {' '.join(text.split())}")

    def engine(self, status: EngineStatus, name: str) -> None:
        """One engine's news, if it is any."""
        news = (status.state, status.stage, status.restarts, status.code)
        if self._told.get(status.key) != news:
            self._told[status.key] = news
            self.say(line_of(Engine(**{f: getattr(status, f) for f in status.__struct_fields__}, name=name)))

    def _event(self, line: str) -> None:
        if self._json:
            _print(self._out, line)

    debug = info = warning = error = _event  # what a sink of events has


def line_of(engine: Engine) -> str:
    """One engine in a line."""
    parts = [engine.key]
    if engine.name and engine.name != engine.key:
        parts.append(f"({engine.name})")
    parts.append(engine.state)
    if engine.state == "starting":
        parts.append(f"stage {engine.stage}")
    elif engine.state not in ("dead", "stopping"):
        parts.append(f"at {engine.url}, pid {engine.pid} on {engine.node}")
        if engine.weight_version is not None:
            parts.append(f"weights {engine.weight_version}")
    if engine.held:
        parts.append(f"held: {engine.held}")
    if engine.restarts:
        parts.append(f"restarts {engine.restarts}")
    if engine.code:
        parts.append(f"last failure {_failure(engine)}")
    return " ".join(parts)


def show(console: Console, status: FleetStatus) -> None:
    """A fleet as it stands: a table on a terminal, plain lines elsewhere."""
    console.print(Text(_head(status)), soft_wrap=True)
    if console.is_terminal:
        console.print(table_of(status))
        return
    now = time.time()
    for engine in status.engines:
        console.print(Text(f"{line_of(engine)} since {_ago(now - engine.since)}"), soft_wrap=True)


def table_of(status: FleetStatus) -> Table:
    """The engines, a row each."""
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(
            column, overflow="fold", no_wrap=column in ("engine", "state", "pid", "since", "age")
        )
    now = time.time()
    for e in status.engines:
        style = "green" if e.state == "ready" else "red" if e.state == "dead" else "yellow"
        cells = (e.key, e.name, e.state, e.stage, e.url, str(e.pid or ""), e.node, str(e.restarts))
        age = _ago(now - e.create_time) if e.pid else ""
        more = (_ago(now - e.since), age, e.weight_version or "", _failure(e))
        table.add_row(*(Text(cell, style=style if cell == e.state else "") for cell in (*cells, *more)))
    return table


class Watching:
    """The engines while an order is carried out: a live table, or a line for each that changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, str] = {}
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, status: FleetStatus) -> None:
        if self._live is not None:
            self._live.update(table_of(status), refresh=True)
            return
        for engine in status.engines:
            line = line_of(engine)
            if self._told.setdefault(engine.key, line) != line:
                self._told[engine.key] = line
                self._console.print(Text(line), soft_wrap=True)


def _head(status: FleetStatus) -> str:
    ready = sum(engine.routable for engine in status.engines)
    where = f", Ray at {status.ray}" if status.ray else ""
    return (
        f"fleet {status.name} {status.state}: {ready} of {len(status.engines)} engines ready, "
        f"pid {status.pid}, for {_ago(time.time() - status.since)}{where}, {status.file}"
    )


def _failure(status: EngineStatus) -> str:
    return f"{status.code}: {' '.join(status.detail.split()):.200}" if status.code else ""


def _ago(seconds: float) -> str:
    """A length of time in two units at most."""
    whole = max(0, int(seconds))
    for size, unit, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {below}"
    return f"{whole} s"


def _print(out: TextIO, line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader is gone or the disk is full
        out.write(line + "\n")
        out.flush()
