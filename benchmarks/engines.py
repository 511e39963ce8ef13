"""``python -m benchmarks.engines``: how soon a killed engine is replaced, and many engines started at once.

An engine of a fleet is ended by SIGKILL, again and again. Measured are the time until the fleet no longer
calls it ready, and the time until another one is routable and has answered; beside them, in turn with them,
what the engine needs by itself: from its spawn, with no fleet around it, to its first generation. Then
engines are started at once and restarted at once, and their ports and what they printed are looked at. A
broken limit ends the run with status 1.

An engine that lives for a second or two, ten times in a row, is what `EngineFleet` calls a crash loop. So
that it is the first pause that is measured and not the tenth, a life counts as a healthy one at once here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import ray
from rich.console import Console
from rich.table import Table

from dispatch.engines import EngineFleet, EngineSpec, EngineStatus, embedded_spec
from protocol import CodedError

KILLS: Final = 10
ENGINES: Final = 20
ROUNDS: Final = 3
WAIT: Final = 120.0
"""Seconds at most for anything to come true."""
STEP: Final = 0.005
MOST_UNNOTICED: Final = 1.0
MOST_ADDED: Final = 1.0
"""Seconds that a replacement may take beyond the engine's own start."""
BODY: Final = {"text": "One, two,", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


@dataclass(slots=True)
class Killed:
    """Seconds from a SIGKILL, of each kill; ``alone``: from a spawn to the first generation."""

    alone: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    routable: list[float] = field(default_factory=list)
    serving: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Started:
    """Seconds of each round until all engines were ready, and what went wrong in it."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def _spec(**fields: object) -> EngineSpec:
    return embedded_spec(token_rate=1000, start_timeout=WAIT, **fields)


async def _generates(client: httpx.AsyncClient, url: str) -> bool:
    try:
        reply = await client.post(f"{url}/generate", json=BODY, timeout=5.0)
    except httpx.TransportError:
        return False  # not bound yet
    return reply.status_code == 200


async def _alone(client: httpx.AsyncClient) -> float:
    """The engine's own start, with nobody around it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = _spec()
    began = time.perf_counter()
    child = await asyncio.create_subprocess_exec(*spec.argv({"port": port}), stdout=DEVNULL, stderr=DEVNULL)
    try:
        async with asyncio.timeout(WAIT):
            while not await _generates(client, spec.url(port)):  # noqa: ASYNC110 - has no event
                await asyncio.sleep(STEP)
        return time.perf_counter() - began
    finally:
        child.kill()
        await child.wait()


async def _kill(fleet: EngineFleet, client: httpx.AsyncClient, made: Killed) -> None:
    """One kill, and what came of it."""
    victim = fleet.engines()[0]
    times: dict[str, float] = {}
    back = asyncio.Event()

    def look(status: EngineStatus) -> None:
        if status.state != "ready":
            times.setdefault("noticed", time.perf_counter())
        elif status.pid != victim.pid:
            times.setdefault("routable", time.perf_counter())
            back.set()

    forget = fleet.on_change(look)
    began = time.perf_counter()
    os.kill(victim.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT):
        await back.wait()
        if not await _generates(client, fleet.engines()[0].url):
            raise CodedError("ENGINE.UNHEALTHY", "called routable, and does not generate")
    forget()
    made.serving.append(time.perf_counter() - began)
    made.noticed.append(times["noticed"] - began)
    made.routable.append(times["routable"] - began)


async def kills(number: int) -> Killed:
    """Kill an engine so often; in between, start one alone."""
    made = Killed()
    async with (
        httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)) as client,
        EngineFleet([_spec()], restart_budget=10 * number, healthy_run=0.001) as fleet,
    ):
        await fleet.wait_ready(WAIT)
        for _ in range(number):
            made.alone.append(await _alone(client))
            await _kill(fleet, client, made)
    return made


async def starts(engines: int, rounds: int, folder: Path) -> Started:
    """Start so many at once, and then all of them anew in each further round."""
    made = Started()
    began = time.perf_counter()
    async with EngineFleet([_spec(log_dir=str(folder)) for _ in range(engines)]) as fleet:
        for number in range(1, rounds + 1):
            if number > 1:
                began = time.perf_counter()
                await asyncio.gather(*(fleet.restart(one.key, WAIT) for one in fleet.engines()))
            ready = await fleet.wait_ready(WAIT)
            made.seconds.append(time.perf_counter() - began)
            ports = {one.url for one in ready}
            if len(ports) < engines:
                made.wrong.append(f"round {number}: {engines} engines on {len(ports)} ports")
            if fleet.restarts != engines * (number - 1):
                made.wrong.append(f"round {number}: {fleet.restarts} restarts in all")
    return made


def _taken(folder: Path) -> list[str]:
    """Ports that were taken: the supervisor tries others, and only the engine's own words tell of it."""
    logs = [log for log in folder.iterdir() if "already in use" in log.read_text()]
    return [f"a port was taken: {log.name}" for log in logs]


def _table(killed: Killed, started: Started, engines: int) -> Table:
    table = Table(title=f"an engine killed {len(killed.noticed)} times; {engines} engines started at once")
    for column in ("seconds", "median", "least", "most", "limit"):
        table.add_column(column, justify="left" if column == "seconds" else "right")

    def row(what: str, values: Sequence[float], limit: str = "") -> None:
        known = (statistics.median(values), min(values), max(values))
        table.add_row(what, *(f"{value:.3f}" for value in known), limit)

    most = statistics.median(killed.alone) + MOST_ADDED
    row("engine alone: spawn to first generation", killed.alone)
    row("SIGKILL to noticed", killed.noticed, f"< {MOST_UNNOTICED:g}")
    row("SIGKILL to a routable replacement", killed.routable, f"< {most:.3f}")
    row("SIGKILL to its first generation", killed.serving)
    row(f"{engines} started at once, until all are ready", started.seconds[:1])
    if started.seconds[1:]:
        row(f"{engines} restarted at once, {len(started.seconds) - 1} rounds", started.seconds[1:])
    collisions = sum("port" in text for text in started.wrong)
    table.add_row("port collisions", str(collisions), "", "", "0")
    return table


def main(number: int, engines: int, rounds: int) -> tuple[Table, list[str]]:
    """The table, and which limits are broken."""
    killed = asyncio.run(kills(number))
    with tempfile.TemporaryDirectory() as folder:
        started = asyncio.run(starts(engines, rounds, Path(folder)))
        started.wrong += _taken(Path(folder))
    broken = list(started.wrong)
    noticed, routable, alone = (
        statistics.median(times) for times in (killed.noticed, killed.routable, killed.alone)
    )
    if noticed >= MOST_UNNOTICED:
        broken.append(f"a killed engine is noticed after {noticed:.3f} s")
    if routable >= alone + MOST_ADDED:
        broken.append(f"it is replaced after {routable:.3f} s, and starts in {alone:.3f} s")
    return _table(killed, started, engines), broken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Engines: noticed, replaced, and started at once.")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--engines", type=int, default=ENGINES, help="started at once")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of starts at once; the first is the fleet's"
    )
    said = parser.parse_args()
    logging.getLogger("failsoft").setLevel(logging.CRITICAL)  # each kill is an event of its own
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    outcome, over = main(said.kills, said.engines, said.rounds)
    ray.shutdown()
    Console(width=110).print(outcome)
    for text in over:
        print(f"over the limit: {text}", file=sys.stderr)
    sys.exit(1 if over else 0)
