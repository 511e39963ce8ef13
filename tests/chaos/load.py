"""Continuous load on a pool, watched while it runs and judged afterwards."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

from dispatch.posting import PosterPool, Request
from dispatch.posting.pool import Done
from tests.chaos.tally import Tally
from tests.support.events import EventFile
from tests.support.wait import until
from tests.support.witness import Witness

SEED = 20260
SAMPLE = 0.01
"""Seconds at most from one look at the pool to the next."""


class Load:
    """``async with Load(...) as load``: posts until it is left or ``stop`` is called; `verify` judges.

    Every request has an id of its own and succeeds if nothing breaks it, so afterwards submitted must be
    succeeded, and every second arrival must be a retry that the events name."""

    def __init__(self, pool: PosterPool, witness: Witness, events: EventFile, concurrency: int) -> None:
        self.pool = pool
        self.witness = witness
        self.events = events
        self.concurrency = concurrency
        self.done: list[Done] = []
        self.via: Counter[str] = Counter()
        self._submitted = 0
        self._extra = 0
        self._stop = asyncio.Event()
        self._rng = random.Random(SEED)

    async def __aenter__(self) -> Load:
        self._posting = asyncio.create_task(self._post())
        self._watching = asyncio.create_task(self._watch(self._posting))
        await self.more(100)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        await asyncio.gather(self._posting, self._watching)

    async def more(self, number: int, timeout: float = 60.0) -> None:
        """Wait until so many more have succeeded."""
        goal = len(self.done) + number
        await until(lambda: len(self.done) >= goal or self._posting.done(), timeout, f"{number} more replies")

    def extra(self, cancelled: int) -> None:
        """So many posts beside the load were submitted and cancelled by the test."""
        self._extra += cancelled

    async def replaced(self, tally: Tally, victims: list[tuple[int, float]], timeout: float = 45.0) -> None:
        """Wait until every victim is gone for good and as many posters as before serve."""
        for pid, created in victims:
            await until(lambda pid=pid, created=created: tally.gone(pid, created), timeout, f"{pid} gone")
        old = {pid for pid, _ in victims}

        def whole() -> bool:
            posters = self.pool.stats().posters
            return all(one.state == "serving" and one.pid not in old for one in posters)

        await until(whole, timeout, "the posters are replaced")

    async def verify(self, least: int, expected: int = 0) -> None:
        """The load has ended: nothing lost, nothing sent twice unseen, never above the ceiling."""
        assert self._posting.done()
        assert self._watching.done()
        try:
            await until(lambda: self.pool.stats().occupied == 0, 30, "all places are back")
        except AssertionError as exc:
            exc.add_note(str(self.pool.stats()))
            raise
        await until(lambda: self.witness.counts()["in_flight"] == 0, 30, "nothing is in flight")
        stats, counts = self.pool.stats(), self.witness.counts()
        failed = Counter(str(done.error.code) for done in self.done if done.error is not None)
        assert stats.balanced
        assert self._submitted == len(self.done) == stats.succeeded + stats.failed
        assert stats.submitted == self._submitted + self._extra
        assert stats.cancelled == self._extra
        assert stats.failed == sum(failed.values()) == expected, failed
        assert stats.submitted >= least
        assert stats.peak <= self.concurrency
        assert counts["peak"] <= self.concurrency
        assert sum(id.startswith("load-") for id in counts["arrived"]) == self._submitted - expected
        retries = self.events.retries()
        unseen = {
            id: n for id, n in counts["arrived"].items() if n - 1 > retries.get(id, 0)
        }  # arrivals beyond the first that no event names
        assert unseen == {}
        assert sum(retries.values()) == stats.retried

    async def _requests(self) -> AsyncIterator[Request]:
        while not self._stop.is_set():
            self._submitted += 1
            delay = self._rng.choice([0, 0.005, 0.02, 0.05])
            yield Request(
                url=self.witness.url("ok", f"delay={delay}"), payload={"n": self._submitted},
                request_id=f"load-{self._submitted}", deadline=60.0,
            )  # fmt: skip

    async def _post(self) -> None:
        async for done in self.pool.post_many(self._requests()):
            self.done.append(done)
            if done.reply is not None:
                self.via[done.reply.via] += 1

    async def _watch(self, posting: asyncio.Task[None]) -> None:
        while not posting.done():
            stats = self.pool.stats()
            assert stats.balanced
            assert stats.occupied <= self.concurrency
            assert sum(one.share for one in stats.posters) in (0, self.concurrency)
            await asyncio.wait({posting}, timeout=SAMPLE)
