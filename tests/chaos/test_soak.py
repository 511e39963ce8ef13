"""Everything at once, for as long as FAILSOFT_SOAK_SECONDS says (600 by default), from a printed seed, which
FAILSOFT_SOAK_SEED gives again. The seed decides what is sent and what is hit, not how long either takes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dispatch.posting.load import LoadControl
from dispatch.posting.posters.keeper import Recreation
from dispatch.processes import is_alive
from faults import Backoff
from tests.chaos.soak import Faults, Site, Verdicts
from tests.chaos.tally import Tally
from tests.support.events import EventFile
from tests.support.fixtures import MakePool
from tests.support.wait import until
from tests.support.witness import Witness

SECONDS = float(os.environ.get("FAILSOFT_SOAK_SECONDS", "600"))
ROUND = 15.0
JUDGED_FROM = 180.0
"""Seconds of a run from which what grew is judged; in a shorter one all of it is still warming up."""
MOST_GROWTH = 0.10
MORE_DESCRIPTORS = 8
# A server that fails is tried again soon, and a poster replaced soon however often it dies: the more happens.
LOAD = LoadControl(eject_first=0.2, eject_most=2.0)
SOON = Recreation(Backoff(0.1, 1.0), budget=100_000)


def actors() -> dict[int, str]:
    """What runs as an actor below this process, by pid; Ray's own agents look the same."""
    out: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = "".join(child.cmdline()[:1])
            if title.startswith("ray::") and not title.startswith("ray::IDLE"):
                out[child.pid] = title
    return out


def sockets(*ports: int) -> int:
    """How many connections to these ports this process has."""
    return sum(bool(one.raddr) and one.raddr.port in ports for one in psutil.Process().net_connections())


def grown(values: list[float]) -> tuple[float, float]:
    """The medians of the first third and of the last."""
    third = max(len(values) // 3, 1)
    return statistics.median(values[:third]), statistics.median(values[-third:])


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS + 300)
async def test_soak(
    make_pool: MakePool, witness: Witness, events: EventFile, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("FAILSOFT_SOAK_SEED", time.time_ns() % 1_000_000))
    again = f"again: FAILSOFT_SOAK_SECONDS={SECONDS:g} FAILSOFT_SOAK_SEED={seed} make soak"

    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    say(f"\nsoak: {SECONDS:g} s, seed {seed}")
    verdicts = Verdicts()
    try:
        with Witness() as other:
            await soak(seed, make_pool, (witness, other), events.path, tally, verdicts, say)
    finally:
        for text in verdicts.said:
            say(f"violation: {text}")
        say(f"violations: {verdicts.number}\n{again}")
    assert verdicts.number == 0


async def soak(
    seed: int,
    make_pool: MakePool,
    witnesses: tuple[Witness, Witness],
    events: Path,
    tally: Tally,
    verdicts: Verdicts,
    say: Callable[[str], None],
) -> None:
    hedged = dataclasses.replace(LOAD, hedge_at=0.95)
    tasks, agents = set(asyncio.all_tasks()), actors()
    memory: list[float] = []
    descriptors: list[float] = []
    me = psutil.Process()
    async with (
        make_pool(32, 3, recreation=SOON, load=hedged) as first,
        make_pool(16, 2, recreation=SOON, load=LOAD, local_fallback=False) as second,
    ):
        sites = [
            Site("a", first, witnesses[0], events, 32, seed, verdicts),
            Site("b", second, witnesses[1], events, 16, seed, verdicts),
        ]
        faults = Faults(sites, random.Random(seed), tally)
        end = time.monotonic() + SECONDS
        while (left := end - time.monotonic()) > 0:
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(min(ROUND, left), stop.set)
            await asyncio.gather(faults.strike(stop), *(site.traffic(stop) for site in sites))
            await faults.over()
            await asyncio.gather(*(site.rest() for site in sites))
            gc.collect()
            memory.append(me.memory_info().rss / 2**20)
            descriptors.append(me.num_fds())
            say(
                f"round {len(memory)}: {sum(site.own.submitted for site in sites)} POSTs, {tally.killed} "
                f"posters killed, {memory[-1]:.0f} MiB, {descriptors[-1]:.0f} descriptors, "
                f"{verdicts.number} violations"
            )
        hedges = first.stats().hedged
    for site in sites:
        await nothing_left(site, agents, verdicts)
    if left_over := asyncio.all_tasks() - tasks:
        verdicts.wrong(f"tasks are left: {left_over}")
    for what, values, most in (
        ("MiB", memory, 1.0 + MOST_GROWTH),
        ("descriptors", descriptors, 1.0 + MORE_DESCRIPTORS / descriptors[0]),
    ):
        before, after = grown(values)
        say(f"{what} of the driver, first third and last: {before:.1f}, {after:.1f}")
        if SECONDS >= JUDGED_FROM and after > most * before:
            verdicts.wrong(f"{what} grew from {before:.1f} to {after:.1f}")
    say(f"hit: {dict(faults.hits.most_common())}; {hedges} hedges")
    for site in sites:
        for (kind, outcome), number in sorted(site.outcomes.items()):
            say(f"{site.name}: {kind:12} {outcome:28} {number}")


async def nothing_left(site: Site, agents: dict[int, str], verdicts: Verdicts) -> None:
    """The pool is closed: no process and no connection of it is left."""
    await until(lambda: not any(is_alive(*one) for one in site.posters), 20.0, "every poster is gone")
    try:
        await until(lambda: not actors().keys() - agents, 20.0)
    except AssertionError:
        verdicts.wrong(f"{site.name}: actors are left: {actors()}, before there were {agents}")
    if sockets(site.witness.port):
        verdicts.wrong(f"{site.name}: this process still has connections to the server")
    connections = (await asyncio.to_thread(site.witness.counts))["connections"]
    if connections:
        verdicts.wrong(f"{site.name}: the server still has {connections} connections")
