"""The long run: pools under every fault at once, judged all the while.

Each `Site` is a pool with callers and a server of its own. Traffic comes in rounds; between two of them all
comes to rest and every request of the round is set against what really arrived and what the pool wrote down,
so that a run of any length remembers one round only. Faults are drawn from the seed and hit at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispatch.posting import PosterPool
from dispatch.processes import same_process
from protocol import CodedError, catalogue
from tests.chaos.injuries import INJURIES, process
from tests.chaos.tally import Tally
from tests.support.ray_side import kill_poster, on_poster
from tests.support.wait import until
from tests.support.witness import Witness

SAMPLE = 0.01
"""Seconds at most from one look at a pool to the next."""
CALLERS = 3
WORKERS = 12
"""How many POSTs each caller has under way."""
IDLE = 0.05
"""Seconds at most that a worker waits before its next POST."""
GAP = 2.0
"""Seconds at most from one fault to the next."""
STORM = 16
REST = 60.0
"""Seconds within which all must have come to rest after a round."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of POST. ``paths``: what the server may be asked to do. ``troubled``: at the name of it that
    fails now and then, so that what the pool thinks of one does not stop the other. ``codes``: how it may
    fail; None for any code that says what went wrong. ``reply``: whether a reply is possible at all."""

    weight: int
    paths: tuple[str, ...]
    troubled: bool = False
    idempotent: bool = True
    deadline: float = 60.0
    codes: frozenset[str] | None = None
    reply: bool = True


FAST = ("ok", "ok?delay=0.005", "ok?delay=0.02", "ok?delay=0.05")
BUSY = (
    "retry_after?seconds=0.05&status=429",
    "retry_after?seconds=0.05&status=503",
    "limited?capacity=8&delay=0.02",
)
BROKEN = (
    *("flaky?how=status", "flaky?how=cut", "flaky?how=close", "flaky?how=close&abort=1"),
    *("flaky?how=status&fails=3", "flaky?how=cut&fails=9"),
)
WRONG = tuple(f"status?status={status}" for status in (400, 401, 404, 413, 422))
# Three deaths with one request in flight end it, and here they may well have another cause.
POISON = frozenset({"REQUEST.POISON"})
REFUSALS = frozenset({"REQUEST.REJECTED", "REQUEST.UNAUTHORIZED", "REQUEST.NOT_FOUND", "REQUEST.TOO_LARGE"})
KINDS = {
    "ok": Kind(12, FAST, codes=POISON),
    "once": Kind(6, FAST, idempotent=False, codes=POISON | {"REQUEST.OUTCOME_UNKNOWN"}),
    "wrong": Kind(2, WRONG, codes=POISON | REFUSALS, reply=False),
    "busy": Kind(2, BUSY, troubled=True, deadline=20.0),
    "busy once": Kind(2, BUSY, troubled=True, deadline=20.0, idempotent=False),
    "broken": Kind(2, BROKEN, troubled=True, deadline=20.0),
    "broken once": Kind(1, BROKEN, troubled=True, deadline=20.0, idempotent=False),
    "late": Kind(1, ("hang",), deadline=0.5, reply=False),
    "late once": Kind(1, ("hang",), deadline=0.5, idempotent=False, reply=False),
    "storm": Kind(0, ("hang",), deadline=20.0, reply=False),
}
CANCELLED = "cancelled"


class Verdicts:
    """What was found wrong, the first of it in words."""

    def __init__(self) -> None:
        self.number = 0
        self.said: list[str] = []

    def wrong(self, text: str) -> None:
        self.number += 1
        if len(self.said) < 20:
            self.said.append(text)


@dataclass(slots=True)
class Sent:
    """One POST of this round. ``outcome``: "" after a reply, otherwise the code, or `CANCELLED`; None
    before its end."""

    kind: str
    outcome: str | None = None


@dataclass(slots=True)
class Own:
    """The test's own accounting, in the words of `PoolStats`."""

    submitted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0


class Site:
    """One pool under load. ``events`` is the file that the pool writes to."""

    def __init__(
        self,
        name: str,
        pool: PosterPool,
        witness: Witness,
        events: Path,
        concurrency: int,
        seed: int,
        verdicts: Verdicts,
    ) -> None:
        self.name = name
        self.pool = pool
        self.witness = witness
        self.own = Own()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.posters: set[tuple[int, float]] = set()
        self.arrivals = 0
        self._events = events
        self._read = 0  # how far the events were read
        self._concurrency = concurrency
        self._verdicts = verdicts
        self._sent: dict[str, Sent] = {}
        self._number = 0
        self._rngs = [random.Random(f"{seed}/{name}/{n}") for n in range(CALLERS * WORKERS)]

    async def traffic(self, stop: asyncio.Event) -> None:
        """Load from all callers until ``stop`` is set, watched all the while."""
        workers = asyncio.gather(*(self._work(n % CALLERS, rng, stop) for n, rng in enumerate(self._rngs)))
        while not workers.done():
            self._look()
            await asyncio.wait({workers}, timeout=SAMPLE)
        workers.result()

    async def storm(self, rng: random.Random) -> None:
        """Many POSTs that would take for ever, each cancelled a moment later."""

        async def cancelled(after: float) -> None:
            task = asyncio.create_task(self._post("storm", rng, "storm"))
            await asyncio.wait({task}, timeout=after)
            task.cancel()
            await asyncio.wait({task})

        await asyncio.gather(*(cancelled(rng.uniform(0.0, 0.5)) for _ in range(STORM)))

    async def rest(self) -> None:
        """The traffic has ended: wait until nothing of it is left anywhere, and judge the round."""
        try:
            await until(lambda: self.pool.stats().occupied == 0, REST, f"{self.name}: all places are back")
        except AssertionError as exc:
            exc.add_note(str(self.pool.stats()))
            raise
        async with asyncio.timeout(REST):
            counts = await asyncio.to_thread(self.witness.counts)
            while counts["in_flight"]:  # each look takes a while, so this does not spin
                counts = await asyncio.to_thread(self.witness.counts)
        self._look()
        if counts["peak"] > self._concurrency:
            self._wrong(f"the server saw {counts['peak']} at once")
        self._judge(counts["arrived"], self._reasons())
        self.arrivals += sum(counts["arrived"].values())
        self._sent.clear()
        await asyncio.to_thread(self.witness.reset)

    def _wrong(self, text: str) -> None:
        self._verdicts.wrong(f"{self.name}: {text}")

    async def _work(self, caller: int, rng: random.Random, stop: asyncio.Event) -> None:
        names = list(KINDS)
        weights = [KINDS[name].weight for name in names]
        while not stop.is_set():
            await self._post(rng.choices(names, weights)[0], rng, f"{self.name} {caller}")
            await asyncio.sleep(rng.uniform(0.0, IDLE))

    async def _post(self, name: str, rng: random.Random, caller: str) -> None:
        kind = KINDS[name]
        self._number += 1
        id = f"{self.name}-{self._number}"
        sent = self._sent[id] = Sent(name)
        host = "localhost" if kind.troubled else "127.0.0.1"
        url = f"http://{host}:{self.witness.port}/{rng.choice(kind.paths)}"
        payload = {"n": self._number, "text": "x" * rng.randint(0, 2000)}
        self.own.submitted += 1
        try:
            await self.pool.post(
                url, payload, deadline=kind.deadline, idempotent=kind.idempotent, request_id=id, caller=caller
            )
        except asyncio.CancelledError:
            self.own.cancelled += 1
            sent.outcome = CANCELLED
            raise
        except CodedError as error:
            self.own.failed += 1
            sent.outcome = str(error.code)
        else:
            self.own.succeeded += 1
            sent.outcome = ""

    def _look(self) -> None:
        """What must be true at every moment."""
        stats, own = self.pool.stats(), self.own
        if not stats.balanced:
            self._wrong(f"the accounting does not hold: {stats}")
        counted = Own(stats.submitted, stats.succeeded, stats.failed, stats.cancelled)
        if counted != own:
            self._wrong(f"the pool counts {counted}, its callers {own}")
        if max(stats.occupied, stats.peak) > self._concurrency:
            self._wrong(f"{stats.occupied} places are taken, {stats.peak} were")
        if (shares := sum(one.share for one in stats.posters)) not in (0, self._concurrency):
            self._wrong(f"the shares sum to {shares}")
        self.posters |= {(one.pid, one.create_time) for one in stats.posters if one.pid}

    def _reasons(self) -> dict[str, list[tuple[str, str]]]:
        """Why ids were sent again in this round: event and code, by id."""
        with self._events.open("rb") as lines:
            lines.seek(self._read)
            new = lines.read()
        self._read += len(new)
        out: dict[str, list[tuple[str, str]]] = {}
        for line in new.splitlines():
            event: dict[str, Any] = json.loads(line)
            if event["event"] in ("post.retried", "post.hedged"):
                out.setdefault(event["key"], []).append((event["event"], event["code"] or ""))
        return out

    def _judge(self, arrived: dict[str, int], reasons: dict[str, list[tuple[str, str]]]) -> None:
        for id in arrived.keys() - self._sent.keys():
            self._wrong(f"{id} arrived and was not sent in this round")
        for id, sent in self._sent.items():
            kind, outcome = KINDS[sent.kind], sent.outcome
            times, why = arrived.get(id, 0), reasons.get(id, [])
            if outcome is None:
                self._wrong(f"{id} ({sent.kind}) never ended")
                continue
            self.outcomes[sent.kind, outcome or "replies"] += 1
            if times - 1 > len(why):
                self._wrong(f"{id} ({sent.kind}, {outcome!r}) arrived {times} times, for {why}")
            if outcome == "" and (times == 0 or not kind.reply):
                self._wrong(f"{id} ({sent.kind}) has a reply and arrived {times} times")
            if outcome not in ("", CANCELLED) and not _may_end_as(outcome, kind):
                self._wrong(f"{id} ({sent.kind}) failed as {outcome}")
            if not kind.idempotent and not all(_did_not_run(event, code) for event, code in why):
                self._wrong(f"{id} ({sent.kind}) is not idempotent, and was sent again for {why}")
            # A refused request arrives once, unless a poster died before it could bring the refusal back.
            if sent.kind == "wrong" and any(code.startswith("REQUEST.") for _, code in why):
                self._wrong(f"{id} was refused, and sent again for {why}")


def _may_end_as(code: str, kind: Kind) -> bool:
    if code not in catalogue or code.startswith(("INTERNAL.", "UNKNOWN.")):
        return False
    return kind.codes is None or code in kind.codes


def _did_not_run(event: str, code: str) -> bool:
    return event == "post.retried" and catalogue.entry(code).outcome == "not_run"


@dataclass(slots=True)
class Faults:
    """Hits the sites, as the seed says. ``hits`` counts what really hit somebody."""

    sites: list[Site]
    rng: random.Random
    tally: Tally
    hits: Counter[str] = field(default_factory=Counter)
    _victims: dict[Site, list[tuple[int, float]]] = field(default_factory=dict)
    _under_way: set[asyncio.Future[Any]] = field(default_factory=set)

    async def strike(self, stop: asyncio.Event) -> None:
        """One fault after the other until ``stop`` is set; some come while the last is being mended."""
        names = [*INJURIES, "pause", "short block", "all", "storm", "storm"]
        while not stop.is_set():
            site, name = self.rng.choice(self.sites), self.rng.choice(names)
            with contextlib.suppress(LookupError):  # nobody there to be hit
                await self._hit(site, name)
                self.hits[name] += 1
            if self.rng.random() < 0.5:
                await self.mended(site)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.uniform(0.0, GAP)):
                    await stop.wait()

    async def mended(self, site: Site) -> None:
        """Wait until every victim is gone for good and all posters of the site serve."""
        for pid, created in self._victims.pop(site, []):
            await until(lambda pid=pid, created=created: self.tally.gone(pid, created), REST, f"{pid} gone")

        def whole() -> bool:
            return all(one.state == "serving" for one in site.pool.stats().posters)

        await until(whole, REST, f"{site.name}: all posters serve")

    async def over(self) -> None:
        """All sites are whole again, and nothing is under way that could still hit one."""
        for site in self.sites:
            await self.mended(site)
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=REST)
        assert not any(not one.done() for one in self._under_way)
        self._under_way.clear()

    async def _hit(self, site: Site, name: str) -> None:
        pool = site.pool
        if name == "storm":
            await site.storm(self.rng)
            return
        serving = [n for n, one in enumerate(pool.stats().posters) if one.state == "serving"]
        if name == "all":
            for index in serving:
                self._lethal(site, index, lambda pool, index: kill_poster(pool, key=f"poster/{index}"))
            return
        index = self.rng.choice(serving) if serving else -1
        if index < 0:
            raise LookupError(name)
        if name == "pause":
            await self._pause(pool, index)
        elif name == "short block":
            self._under_way.add(on_poster(pool, "import time; time.sleep(0.8)", index))
        else:
            self._lethal(site, index, INJURIES[name])

    def _lethal(self, site: Site, index: int, injury: Callable[[PosterPool, int], object]) -> None:
        victim = process(site.pool, index)
        done = injury(site.pool, index)
        self._victims.setdefault(site, []).append(victim)
        if isinstance(done, asyncio.Future):
            self._under_way.add(done)

    async def _pause(self, pool: PosterPool, index: int) -> None:
        """Stopped, and going on: sometimes before anybody has seen it, sometimes when it was given up."""
        pid, created = process(pool, index)
        kill_poster(pool, signal.SIGSTOP, f"poster/{index}")
        await asyncio.sleep(self.rng.uniform(0.1, 2.5))
        if same_process(pid, created) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
