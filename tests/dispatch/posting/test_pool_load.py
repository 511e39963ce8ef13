"""The pool beside servers that are full, broken or killed by a request; the witness counts what arrives."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from dispatch.posting import PosterPool, Request, attempts
from dispatch.posting.load import LoadControl
from dispatch.posting.posters.keeper import Recreation
from dispatch.posting.transports.aiohttp_transport import AiohttpTransport
from faults import Backoff
from protocol import CodedError, mint
from protocol.carriers.http_reply import HEADER
from tests.support.events import EventFile
from tests.support.fixtures import MakePool
from tests.support.mortal import DEADLY, Mortal
from tests.support.ray_side import kill_poster
from tests.support.wait import until
from tests.support.witness import Witness

pytestmark = pytest.mark.timeout(150)
PROMPT = Backoff(0.01, 0.05)


async def outcome(call: Any) -> str:
    try:
        await call
    except CodedError as error:
        return str(error.code)
    return "ok"


# ---- how many at once


async def test_a_server_that_has_enough_gets_about_what_it_takes(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool(32, max_attempts=60, backoff=PROMPT) as pool:
        # So slow that a slow pool, too, has more than four there: else none would be refused.
        url = witness.url("limited", "capacity=4&delay=0.1")
        requests = (Request(url=url, payload={}) for _ in range(200))
        done = [one async for one in pool.post_many(requests)]
        assert all(one.reply for one in done)
        stats = pool.stats()
        assert stats.targets[0].limit < 16
        # Without a limit each of the 32 places would knock again and again while 4 are served: fifty
        # rounds, in each of which 28 are refused more than once.
        assert stats.retried_by_code["BACKPRESSURE.RATE_LIMITED"] < 800
        assert set(stats.retried_by_code) == {"BACKPRESSURE.RATE_LIMITED"}


async def test_a_retry_after_holds_everybody_back(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(8) as pool:
        url = witness.url("retry_after", "form=seconds&seconds=2")
        first = asyncio.create_task(pool.post(url, {}, request_id="first"))
        await until(lambda: pool.stats().targets and pool.stats().retried_by_code)
        await pool.post(witness.url("ok"), {}, request_id="other")
        await first
        times = witness.counts()["times"]
        assert times["other"][0] - times["first"][0] >= 1.9


# ---- servers that break


async def test_a_server_that_fails_again_and_again_is_left_alone_and_tried_by_one(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    load = LoadControl(eject_after=5, eject_first=2.0)
    async with make_pool(8, load=load) as pool:
        broken = witness.url("status", "status=500")
        for _ in range(5):
            began = time.monotonic()  # in the end: of the one that ejects it
            assert await outcome(pool.post(broken, {}, max_attempts=1)) == "UPSTREAM.SERVER_ERROR"
        assert pool.stats().targets[0].standing == "ejected"
        # A caller who knows another server hears of it at once, and the others wait for the trial.
        hasty = pool.post(broken, {}, retry_upstream=False, request_id="hasty")
        assert await outcome(hasty) == "UPSTREAM.EJECTED"
        assert witness.arrivals("hasty") == 0
        ids = [f"w{n}" for n in range(8)]
        await asyncio.gather(*(pool.post(witness.url("ok"), {}, request_id=id) for id in ids))
        assert time.monotonic() - began >= 2.0
        assert pool.stats().targets[0].standing == "serving"
    assert [event["key"] for event in events.named("target.ejected", "target.back")] == [witness.base] * 2


async def test_h3_what_describes_requests_ejects_nobody(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(8, load=LoadControl(eject_after=2)) as pool:
        for status in (400, 404, 413, 422, 429, 503):
            for _ in range(3):
                await outcome(pool.post(witness.url("status", f"status={status}"), {}, max_attempts=1))
        assert pool.stats().targets[0].standing == "serving"


async def test_a_fleet_that_dies_is_not_stormed(make_pool: MakePool, witness: Witness) -> None:
    load = LoadControl(retry_share=0.0, retry_floor=10.0, eject_after=1_000_000)
    async with make_pool(64, max_attempts=50, backoff=PROMPT, load=load) as pool:
        url = witness.url("status", "status=500")
        began = time.monotonic()
        requests = (Request(url=url, payload={}, deadline=4.0) for _ in range(64))
        codes = Counter([str(one.error.code) async for one in pool.post_many(requests) if one.error])
        seconds = time.monotonic() - began
        arrived = sum(witness.counts()["arrived"].values())
    # Each once, the burst, and what flows in; without a budget it would be 64 × 50.
    assert arrived <= 64 + 100 + 10 * seconds + 1
    assert sum(codes.values()) == 64
    assert set(codes) <= {"UPSTREAM.SERVER_ERROR", "TIMEOUT.DEADLINE"}


# ---- what kills


async def test_a_request_that_kills_its_server_ends_as_poison(make_pool: MakePool) -> None:
    load = LoadControl(eject_first=0.3, eject_most=0.5)
    async with Mortal() as server, make_pool(16, deadline=100.0, max_attempts=20, load=load) as pool:
        innocent = [
            asyncio.create_task(pool.post(server.url, {"seconds": 0.2}, request_id=f"i{n}"))
            for n in range(12)
        ]
        await until(lambda: pool.stats().sent == 12)
        with pytest.raises(CodedError) as caught:
            await pool.post(server.url, {DEADLY: True}, request_id="poison")
        assert caught.value.code == "REQUEST.POISON"
        assert caught.value.data["deaths"] == [server.url.removesuffix("/generate")] * 3
        replies = await asyncio.gather(*innocent)
        assert {reply.status for reply in replies} == {200}
        await until(lambda: server.deaths == 3)
        await pool.post(server.url, {}, request_id="afterwards")


class DeadlyTransport(httpx.AsyncBaseTransport):
    """A transport in which a certain request kills the whole process, as a bug in C code does."""

    def __init__(self, connections: int) -> None:
        self._inner = AiohttpTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.headers["x-request-id"] in ("poison", "slow poison"):
            if request.headers["x-request-id"] == "slow poison":
                await asyncio.sleep(0.5)
            os._exit(1)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.mark.parametrize("posters", [1, 2])
async def test_a_request_that_kills_posters_ends_as_poison_and_never_reaches_the_pools_process(
    make_pool: MakePool, witness: Witness, events: EventFile, posters: int
) -> None:
    options: dict[str, Any] = {"posters_per_node": posters, "max_attempts": 20, "deadline": 100.0}
    async with make_pool(8, transport=DeadlyTransport, **options) as pool:
        innocent = [
            asyncio.create_task(pool.post(witness.url("ok", "delay=0.3"), {}, request_id=f"i{n}"))
            for n in range(6)
        ]
        with pytest.raises(CodedError) as caught:
            await pool.post(witness.url("ok"), {}, request_id="poison")
        assert caught.value.code == "REQUEST.POISON"
        assert len(caught.value.data["deaths"]) == 3
        await asyncio.gather(*innocent)
        await until(lambda: pool.stats().recreated == 3, 60)
    assert len(events.named("poster.died")) == 3


async def test_what_waits_for_a_poster_keeps_nobody_from_its_server_and_hears_of_the_end(
    make_pool: MakePool, witness: Witness
) -> None:
    """All that was in flight when the last poster died waits for another one, which never comes."""
    pool = make_pool(8, recreation=Recreation(PROMPT, budget=0))
    await pool.start()
    tasks = [asyncio.create_task(pool.post(witness.url("hang"), {})) for _ in range(8)]
    await until(lambda: witness.counts()["in_flight"] == 8)
    kill_poster(pool)
    await until(lambda: pool.stats().posters[0].state == "abandoned")
    async with asyncio.timeout(attempts.PATIENCE / 2):
        assert (await pool.post(witness.url("ok"), {})).via == "local"
    await pool.close()
    assert [task.done() for task in tasks] == [True] * 8
    assert {await outcome(task) for task in tasks} == {"POOL.CLOSED"}


async def test_both_copies_of_a_hedged_poison_count_and_a_suspect_has_one(
    make_pool: MakePool, witness: Witness
) -> None:
    load = LoadControl(hedge_at=0.9, hedge_share=1.0)
    options: dict[str, Any] = {"posters_per_node": 2, "max_attempts": 20, "deadline": 100.0}
    async with make_pool(8, load=load, transport=DeadlyTransport, **options) as pool:
        for _ in range(40):
            await pool.post(witness.url("ok"), {})
        with pytest.raises(CodedError) as caught:
            await pool.post(witness.url("ok"), {}, request_id="slow poison")
        assert caught.value.code == "REQUEST.POISON"
        assert len(set(caught.value.data["deaths"])) == 3
        await until(lambda: pool.stats().recreated >= 3, 30)
        assert [one.generation for one in pool.stats().posters] in ([2, 3], [3, 2])


async def test_a_server_that_says_a_poster_died_gets_no_more_attempts_for_it(
    make_pool: MakePool, witness: Witness
) -> None:
    said = quote(mint("ACTOR.DIED"))
    async with make_pool(8, max_attempts=3, backoff=PROMPT) as pool:
        url = witness.url("status", f"status=500&h-{HEADER}={said}")
        assert await outcome(pool.post(url, {}, request_id="liar")) == "ACTOR.DIED"
        assert witness.arrivals("liar") == 3
        assert pool.stats().recreated == 0


# ---- hedging and fairness


async def test_what_takes_too_long_is_sent_a_second_time_and_the_first_good_reply_counts(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    load = LoadControl(hedge_at=0.9, hedge_share=0.2)
    async with make_pool(8, load=load) as pool:
        for _ in range(40):
            await pool.post(witness.url("ok"), {})
        reply = await pool.post(witness.url("stuck"), {}, request_id="slow")
        assert reply.status == 200
        assert witness.arrivals("slow") == 2
        await until(lambda: witness.counts()["disconnected"].get("slow") == 1)
        await pool.post(witness.url("ok"), {}, idempotent=False)
        await until(lambda: pool.stats().occupied == 0)
        hedged = pool.stats().hedged
        assert pool.stats().sent == 42 + hedged
    told = events.named("post.hedged")
    assert len(told) == hedged <= 42 * 0.2 + 1
    assert "slow" in [event["key"] for event in told]


async def test_what_is_not_idempotent_is_never_hedged(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(8, load=LoadControl(hedge_at=0.5, hedge_share=1.0)) as pool:
        for _ in range(40):
            await pool.post(witness.url("ok"), {})
        before = pool.stats().hedged
        call = pool.post(witness.url("stuck"), {}, idempotent=False, deadline=1.0, request_id="once")
        assert await outcome(call) == "TIMEOUT.DEADLINE"
        assert witness.arrivals("once") == 1
        assert pool.stats().hedged == before


async def test_ten_are_not_starved_by_ten_thousand(make_pool: MakePool, witness: Witness) -> None:
    url = witness.url("ok", "delay=0.02")

    async def many(pool: PosterPool, number: int) -> float:
        async for done in pool.post_many(Request(url=url, payload={}) for _ in range(number)):
            assert done.reply
        return time.monotonic()

    async with make_pool(4) as pool:
        greedy = asyncio.create_task(many(pool, 10_000))
        await until(lambda: pool.stats().succeeded >= 20)
        before = pool.stats().succeeded
        await many(pool, 10)
        # They took turns: about ten of the others were served meanwhile, not all that waited before.
        assert pool.stats().succeeded - before <= 40
        greedy.cancel()
        await asyncio.wait({greedy})
