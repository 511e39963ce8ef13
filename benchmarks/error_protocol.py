"""``make bench``: what the error protocol costs, beside the plain Python operation, in one run.

Medians of interleaved rounds. The ratio carries over to another machine; the limits in microseconds are
the project's own, and a broken one ends the run with status 1.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ray.exceptions import RayTaskError
from rich.console import Console
from rich.table import Table

from faults import classify
from protocol import CodedError, coded, defuse, scan

ROUNDS = 15


class Row(NamedTuple):
    """An operation beside the plain one; ``limit`` in microseconds, ``number`` of calls a round."""

    name: str
    ours: Callable[[], Any]
    beside: str
    plain: Callable[[], Any]
    limit: float
    number: int = 2000
    difference: bool = False  # whether the limit holds for what ours adds, not for the whole


def _raise(n: int) -> None:
    if n:
        _raise(n - 1)
    raise ConnectionResetError(104, "Connection reset by peer")


def _caught(deep: int = 0) -> Exception:
    try:
        _raise(deep)
    except ConnectionResetError as exc:
        return exc
    raise AssertionError


def _deep() -> BaseException:
    """An exception as it arrives through three hops: a RayTaskError around a RayTaskError around one."""
    inner: Exception = _caught()
    for hop in range(3):
        text = "".join(traceback.format_exception(_caught(40)))
        inner = RayTaskError(f"hop{hop}", text, inner)
    return inner.as_instanceof_cause()


@coded
def _decorated(n: int) -> int:
    return n


def _bare(n: int) -> int:
    return n


@coded
async def _decorated_coroutine(n: int) -> int:
    return n


async def _bare_coroutine(n: int) -> int:
    return n


def _drive(coroutine: Callable[[int], Any]) -> None:
    try:
        coroutine(1).send(None)
    except StopIteration:
        return


def rows() -> list[Row]:
    """What is measured."""
    direct, deep, named = _caught(), _deep(), CodedError("ENGINE.EXITED", "signal 9")
    report = "".join(traceback.format_exception(_caught(60)))
    megabyte = (report * (2**20 // len(report) + 1))[: 2**20]
    near = "".join(f"FS1.A.B.{n:08}.ABCDEFG0 " for n in range(10 * 2**20 // 26))  # each another one
    frames = "format_exception_only"
    return [
        Row("classify a direct exception", lambda: classify(direct), "raise and catch it", _caught, 10),
        Row(
            "classify a deep RayTaskError",
            lambda: classify(deep),
            frames,
            lambda: traceback.format_exception_only(deep),
            50,
        ),
        Row("classify a CodedError", lambda: classify(named), "raise and catch", _caught, 10),
        Row(
            "create a CodedError",
            lambda: CodedError("ENGINE.EXITED", "signal 9", {"pid": 1}),
            "create a ValueError",
            lambda: ValueError("signal 9", {"pid": 1}),
            15,
        ),
        Row(
            "scan 1 MB of tracebacks",
            lambda: scan(megabyte),
            "lower() of it",
            lambda: megabyte.lower(),
            3000,
            5,
        ),
        Row(
            "defuse 1 MB of tracebacks",
            lambda: defuse(megabyte),
            "lower() of it",
            lambda: megabyte.lower(),
            3000,
            5,
        ),
        Row(
            "scan 10 MB of near-tokens",
            lambda: scan(near),
            "lower() of it",
            lambda: near.lower(),
            1_000_000,
            1,
        ),
        Row(
            "a @coded call adds",
            lambda: _decorated(1),
            "the bare call",
            lambda: _bare(1),
            2,
            difference=True,
        ),
        Row(
            "a @coded coroutine adds",
            lambda: _drive(_decorated_coroutine),
            "the bare coroutine",
            lambda: _drive(_bare_coroutine),
            2,
            difference=True,
        ),
    ]


def _time(call: Callable[[], Any], number: int) -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - began) / number * 1e6


def main() -> int:
    """Print the table; 1 when a limit is broken."""
    logging.getLogger("ray.exceptions").setLevel(logging.ERROR)  # it warns of each dual it cannot make
    table = Table(title=f"the error protocol, medians of {ROUNDS} interleaved rounds, microseconds")
    for column in ("operation", "ours", "limit", "plain operation", "plain", "ratio"):
        table.add_column(column, justify="left" if "operation" in column else "right", no_wrap=True)
    broken = []
    for row in rows():
        ours, plain = [], []
        for _ in range(ROUNDS):
            ours.append(_time(row.ours, row.number))
            plain.append(_time(row.plain, row.number))
        cost, beside = statistics.median(ours), statistics.median(plain)
        ratio = cost / beside
        if row.difference:
            cost = statistics.median(a - b for a, b in zip(ours, plain, strict=True))
        if cost > row.limit:
            broken.append(row.name)
        table.add_row(row.name, f"{cost:.2f}", f"{row.limit:g}", row.beside, f"{beside:.2f}", f"{ratio:.1f}")
    Console(width=120).print(table)
    if broken:
        print(f"over the limit: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
