"""The pool on a real Ray: what comes back, what is counted, and what is never sent twice."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from dispatch.posting import PosterPool, Request
from dispatch.posting.pool import AHEAD
from dispatch.posting.posters.keeper import Recreation
from dispatch.posting.posters.lane import Health
from dispatch.processes import same_process
from faults import Backoff
from protocol import CodedError
from tests.support.events import EventFile
from tests.support.fixtures import QUICK, MakePool
from tests.support.ray_side import kill_poster, on_poster
from tests.support.wait import until
from tests.support.witness import ROOT, Witness

pytestmark = pytest.mark.timeout(120)


async def code_from(awaitable: Any) -> str:
    with pytest.raises(CodedError) as caught:
        await awaitable
    assert caught.value.detail
    return str(caught.value.code)


async def settled(pool: PosterPool, witness: Witness) -> None:
    """Nothing is in flight any more, on either side."""
    try:
        await until(lambda: pool.stats().occupied == 0 and witness.counts()["in_flight"] == 0)
    except AssertionError as exc:
        counts = witness.counts()
        ended = Counter(counts["finished"]) + Counter(counts["disconnected"])
        still = list(Counter(counts["arrived"]) - ended)
        exc.add_note(f"{pool.stats()}, at the server: {still}")
        raise
    assert pool.stats().balanced


# ---- replies


async def test_a_reply(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        reply = await pool.post(witness.url("echo"), {"n": 1}, request_id="one", headers={"X-Extra": "yes"})
        assert json.loads(reply.data["body"]) == {"n": 1}
        assert ["x-extra", "yes"] in reply.data["headers"]
        assert (reply.status, reply.via, reply.attempts, reply.request_id) == (200, "poster", 1, "one")
        assert reply.headers["content-type"].startswith("application/json")
        assert reply.seconds > 0
        assert (await pool.post(witness.url("ok"), None)).request_id
        stats = pool.stats()
        assert (stats.submitted, stats.succeeded, stats.sent, stats.retried) == (2, 2, 2, 0)
        assert stats.balanced
        assert [poster.state for poster in stats.posters] == ["serving"]


async def test_bad_input_is_refused_and_not_counted(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        url = witness.url("ok")
        for awaitable in (
            pool.post("engine:80/x", {}),
            pool.post(url, {1, 2}),
            pool.post(url, float("nan")),
            pool.post(url, {}, deadline=-1),
            pool.post(url, {}, headers={"a": "b\nc"}),
            pool.post(url, {}, request_id=""),
            pool.post(url, {}, max_attempts=0),
            pool.post(url, {}, max_attempts="3"),  # type: ignore[arg-type]
        ):
            assert await code_from(awaitable) == "REQUEST.INVALID"
        assert pool.stats().submitted == 0
        assert witness.counts()["arrived"] == {}


async def test_misuse_is_named(make_pool: MakePool, witness: Witness) -> None:
    pool = make_pool()
    url = witness.url("ok")
    assert await code_from(pool.post(url, {})) == "POOL.MISUSE"
    with pytest.raises(CodedError, match=r"POOL\.MISUSE"):
        await anext(pool.post_many([]))
    async with pool:
        assert await code_from(pool.start()) == "POOL.MISUSE"
        foreign = await asyncio.to_thread(lambda: asyncio.run(code_from(pool.post(url, {}))))
        assert foreign == "POOL.MISUSE"
        await pool.post(url, {})
    assert await code_from(pool.post(url, {})) == "POOL.CLOSED"
    assert await code_from(pool.start()) == "POOL.MISUSE"
    await pool.close()


async def test_fewer_places_than_posters_is_refused(make_pool: MakePool) -> None:
    assert await code_from(make_pool(2, posters_per_node=3).start()) == "CONFIG.INVALID"


def test_ray_has_to_be_initialised() -> None:
    script = """
import asyncio
from dispatch import PosterPool
from protocol import CodedError
async def main():
    try:
        async with PosterPool(4):
            pass
    except CodedError as error:
        print(error.code, error.detail)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("POOL.MISUSE")
    assert "ray.init()" in done.stdout


# ---- post_many


async def test_post_many_yields_in_completion_order(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(4) as pool:
        delays = [2.0, 0.0, 1.0]
        requests = [Request(url=witness.url("ok", f"delay={delay}"), payload={}) for delay in delays]
        requests.append(Request(url="nonsense", payload={}))
        done = [one async for one in pool.post_many(requests)]
        assert [one.request for one in done if one.reply] == [requests[1], requests[2], requests[0]]
        assert [str(one.error.code) for one in done if one.error] == ["REQUEST.INVALID"]
        assert {id(one.request) for one in done} == {id(one) for one in requests}


async def test_post_many_draws_no_more_than_it_can_use(make_pool: MakePool, witness: Witness) -> None:
    drawn = finished = 0

    def endless() -> Iterator[Request]:
        nonlocal drawn
        while True:
            drawn += 1
            yield Request(url=witness.url("ok"), payload={})

    async with make_pool(4) as pool:
        async with aclosing(pool.post_many(endless())) as results:
            async for done in results:
                assert done.reply
                finished += 1
                assert drawn - finished <= AHEAD * 4
                if finished == 100:
                    break
        await settled(pool, witness)
        assert pool.stats().cancelled <= AHEAD * 4


async def test_post_many_gives_results_while_its_source_waits(make_pool: MakePool, witness: Witness) -> None:
    first = asyncio.Event()

    async def source() -> AsyncIterator[Request]:
        yield Request(url=witness.url("ok"), payload={}, request_id="first")
        await first.wait()  # the second request depends on the first one's reply
        yield Request(url=witness.url("ok"), payload={}, request_id="second")

    ids = []
    async with make_pool() as pool, asyncio.timeout(20):
        async for done in pool.post_many(source()):
            assert done.reply
            ids.append(done.reply.request_id)
            first.set()
    assert ids == ["first", "second"]


async def test_leaving_post_many_early_cancels_and_closes_the_source(
    make_pool: MakePool, witness: Witness
) -> None:
    closed = asyncio.Event()

    async def source() -> AsyncIterator[Request]:
        try:
            yield Request(url=witness.url("ok"), payload={})
            for _ in range(3):
                yield Request(url=witness.url("hang"), payload={})
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with make_pool() as pool:
        async with aclosing(pool.post_many(source())) as results:
            async for _ in results:
                await until(lambda: witness.counts()["in_flight"] == 3)
                break
        await asyncio.wait_for(closed.wait(), 10)
        await settled(pool, witness)
        assert pool.stats().cancelled == 3
        assert sum(witness.counts()["disconnected"].values()) == 3


async def test_a_source_that_raises_is_the_callers_error(make_pool: MakePool, witness: Witness) -> None:
    def source() -> Iterator[Request]:
        yield Request(url=witness.url("hang"), payload={})
        raise ZeroDivisionError

    async with make_pool() as pool:
        with pytest.raises(ZeroDivisionError):
            async for _ in pool.post_many(source()):
                pass
        await settled(pool, witness)


# ---- how often something is sent


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_4xx_is_sent_exactly_once(
    make_pool: MakePool, witness: Witness, events: EventFile, status: int
) -> None:
    async with make_pool() as pool:
        with pytest.raises(CodedError) as caught:
            await pool.post(witness.url("status", f"status={status}"), {}, request_id="bad")
        assert caught.value.code.family == "REQUEST"
        assert caught.value.data["status"] == status
        assert witness.arrivals("bad") == 1
        assert pool.stats().failed_by_code == {str(caught.value.code): 1}
    assert [event["key"] for event in events.named("post.failed")] == ["bad"]
    assert events.retries() == {}


async def test_h3_a_stream_of_4xx_costs_no_poster_and_no_place(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    async with make_pool(8) as pool:
        before = pool.stats().posters
        bad = (Request(url=witness.url("status", "status=400"), payload={}) for _ in range(300))
        assert {str(done.error.code) async for done in pool.post_many(bad) if done.error} == {
            "REQUEST.REJECTED"
        }
        assert (await pool.post(witness.url("ok"), {})).via == "poster"
        stats = pool.stats()
        assert (stats.failed, stats.sent, stats.recreated) == (300, 301, 0)
        assert [one.pid for one in stats.posters] == [one.pid for one in before]
    assert events.named("poster.quarantined", "poster.died") == []


async def test_h2_retries_are_bounded_and_each_one_is_seen(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    async with make_pool(max_attempts=3, backoff=Backoff(0.01, 0.05)) as pool:
        assert (
            await code_from(pool.post(witness.url("close"), {}, request_id="h2")) == "TRANSPORT.DISCONNECTED"
        )
        assert witness.arrivals("h2") == 3
        stats = pool.stats()
        assert (stats.sent, stats.retried, stats.retried_by_code) == (3, 2, {"TRANSPORT.DISCONNECTED": 2})
    assert events.retries() == {"h2": 2}
    assert [event["data"]["attempt"] for event in events.named("post.retried", "post.failed")] == [1, 2, 3]


@pytest.mark.parametrize("how", ["status", "close", "cut", "html", "early", "sse"])
async def test_a_passing_failure_is_retried(make_pool: MakePool, witness: Witness, how: str) -> None:
    async with make_pool(backoff=Backoff(0.01, 0.05)) as pool:
        url = witness.url("flaky", f"fails=2&how={how}&end=error")
        reply = await pool.post(url, {}, request_id="flaky")
        arrived = witness.arrivals("flaky")
        assert reply.attempts == arrived
        assert arrived == (1 if how == "early" else 3)


async def test_retry_upstream_false_leaves_the_server_to_the_caller(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool() as pool:
        call = pool.post(witness.url("status", "status=500"), {}, request_id="r", retry_upstream=False)
        assert await code_from(call) == "UPSTREAM.SERVER_ERROR"
        assert witness.arrivals("r") == 1


@pytest.mark.parametrize(("form", "least"), [("seconds", 1.9), ("date", 0.9), ("nonsense", 0.0)])
async def test_h6_a_429_waits_as_it_is_told(
    make_pool: MakePool, witness: Witness, form: str, least: float
) -> None:
    async with make_pool() as pool:
        url = witness.url("retry_after", f"form={form}&seconds=2")
        reply = await pool.post(url, {}, request_id="busy")
        assert reply.attempts == 2
        first, second = witness.counts()["times"]["busy"]
        assert second - first >= least


async def test_a_wait_that_outlasts_the_deadline_is_not_begun(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool, asyncio.timeout(20):
        url = witness.url("retry_after", "seconds=200")
        assert await code_from(pool.post(url, {}, deadline=100)) == "BACKPRESSURE.RATE_LIMITED"


async def test_what_is_not_idempotent_is_sent_once_when_its_poster_dies(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool() as pool:
        url = witness.url("hang")
        once = asyncio.create_task(pool.post(url, {}, idempotent=False, request_id="once"))
        await until(lambda: witness.arrivals("once") == 1)
        kill_poster(pool)
        assert await code_from(once) == "REQUEST.OUTCOME_UNKNOWN"
        await settled(pool, witness)
        assert witness.arrivals("once") == 1
        assert pool.stats().retried == 0


@pytest.mark.parametrize("how", ["close", "cut", "status"])
async def test_what_is_not_idempotent_is_sent_once_when_the_server_fails(
    make_pool: MakePool, witness: Witness, how: str
) -> None:
    async with make_pool() as pool:
        call = pool.post(witness.url(how), {}, idempotent=False, request_id="once")
        assert await code_from(call) == "REQUEST.OUTCOME_UNKNOWN"
        assert witness.arrivals("once") == 1


async def test_what_is_not_idempotent_is_sent_again_when_it_did_not_run(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool() as pool:
        url = witness.url("retry_after", "seconds=0")
        reply = await pool.post(url, {}, idempotent=False, request_id="again")
        assert (reply.attempts, witness.arrivals("again")) == (2, 2)


# ---- deadlines and cancellation


async def test_a_deadline_counts_the_time_in_the_queue(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(1) as pool:
        busy = asyncio.create_task(pool.post(witness.url("hang"), {}, request_id="busy"))
        await until(lambda: witness.arrivals("busy") == 1)
        with pytest.raises(CodedError) as caught:
            await pool.post(witness.url("ok"), {}, deadline=0.5, request_id="queued")
        assert caught.value.code == "TIMEOUT.DEADLINE"
        assert "waited" in caught.value.detail
        assert witness.arrivals("queued") == 0
        busy.cancel()
        await asyncio.wait({busy})
        await settled(pool, witness)


async def test_a_deadline_that_passes_at_the_server(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(1) as pool:
        for how in ("hang", "slow"):
            call = pool.post(witness.url(how), {}, deadline=0.7, request_id=how)
            assert await code_from(call) == "TIMEOUT.DEADLINE"
            await until(lambda how=how: witness.counts()["disconnected"].get(how) == 1)
            assert witness.arrivals(how) == 1
        assert (await pool.post(witness.url("ok"), {})).via == "poster"
        assert pool.stats().failed_by_code == {"TIMEOUT.DEADLINE": 2}


async def test_a_cancelled_call_ends_at_the_server_and_gives_its_place_back(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool(1) as pool:
        for number in range(3):
            task = asyncio.create_task(pool.post(witness.url("hang"), {}, request_id=f"c{number}"))
            await until(lambda number=number: witness.arrivals(f"c{number}") == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda number=number: witness.counts()["disconnected"].get(f"c{number}") == 1)
            assert (await pool.post(witness.url("ok"), {})).status == 200
        stats = pool.stats()
        assert (stats.cancelled, stats.succeeded, stats.in_flight) == (3, 3, 0)
        assert witness.counts()["peak"] == 1


async def test_l1_a_call_cancelled_before_it_started_never_arrives(
    make_pool: MakePool, witness: Witness, tmp_path: Path
) -> None:
    async with make_pool(16, health=dataclasses.replace(QUICK, wedge_after=60.0)) as pool:
        # The poster's loop is held up, so that the calls below queue behind it, until a second after the last
        # of them was cancelled.
        flag, cancelled = tmp_path / "blocked", tmp_path / "cancelled"
        held_up = f"while not os.path.exists({str(cancelled)!r}): time.sleep(0.01)"
        code = f"import os, time; open({str(flag)!r}, 'w').close()\n{held_up}\ntime.sleep(1.0)"
        blocked = on_poster(pool, code)
        await until(flag.exists)
        tasks = [
            asyncio.create_task(pool.post(witness.url("ok"), {}, request_id=f"l1-{n}")) for n in range(16)
        ]
        await until(lambda: pool.stats().sent == 16)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        cancelled.touch()
        await blocked
        await settled(pool, witness)
        # Two round trips later whatever was going to start has started.
        for _ in range(2):
            await pool.post(witness.url("ok"), {}, request_id="after")
        assert set(witness.counts()["arrived"]) == {"after"}
        assert pool.stats().recreated == 0


async def test_l3_a_call_on_a_poster_killed_a_moment_ago_ends_in_time(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool() as pool:
        for number in range(3):
            kill_poster(pool)
            async with asyncio.timeout(30):
                reply = await pool.post(witness.url("ok"), {}, request_id=f"l3-{number}")
            assert reply.status == 200
            await until(lambda number=number: pool.stats().recreated == number + 1, 40)


async def test_l4_long_calls_do_not_starve_the_probes(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    health = Health(interval=0.1, timeout=4.0, strikes=2, wedge_after=4.0)  # shorter than the calls
    async with make_pool(32, health=health) as pool:
        pid = pool.stats().posters[0].pid
        tasks = [asyncio.create_task(pool.post(witness.url("ok", "delay=5"), {})) for _ in range(64)]
        await until(lambda: pool.stats().waiting == 32)
        assert witness.counts()["peak"] <= 32
        assert len(await asyncio.gather(*tasks)) == 64
        assert witness.counts()["peak"] == 32
        assert [one.pid for one in pool.stats().posters] == [pid]
    assert events.named("poster.died", "poster.quarantined") == []


async def test_l5_no_call_takes_a_thread(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(64, posters_per_node=2) as pool:
        await asyncio.gather(*(pool.post(witness.url("ok"), {}) for _ in range(4)))
        before = threading.active_count()
        most = before
        tasks = [asyncio.create_task(pool.post(witness.url("ok", "delay=3"), {})) for _ in range(64)]
        while not all(task.done() for task in tasks):
            most = max(most, threading.active_count())
            await asyncio.sleep(0.02)
        assert witness.counts()["peak"] == 64
        assert most <= before + 2


async def test_a_storm_of_timeouts_and_cancellations_never_exceeds_the_ceiling(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool(12, posters_per_node=2) as pool:
        tasks = []
        for number in range(300):
            behaviour, deadline = [("hang", 0.3), ("ok", 20.0), ("slow", 0.2), ("hang", 20.0)][number % 4]
            call = pool.post(
                witness.url(behaviour), {}, deadline=deadline, request_id=f"{behaviour}-{number}"
            )
            tasks.append(asyncio.create_task(call))
        async with asyncio.timeout(60):
            while not all(task.done() for task in tasks):
                for task in tasks[3::4]:  # those that hang, a while after they were sent
                    if not task.done() and pool.stats().occupied >= 6:
                        task.cancel()
                        break
                assert pool.stats().balanced
                await asyncio.sleep(0.02)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        codes = {str(one.code) for one in outcomes if isinstance(one, CodedError)}
        assert codes <= {"TIMEOUT.DEADLINE"}
        await settled(pool, witness)
        assert witness.counts()["peak"] <= 12
        assert pool.stats().peak <= 12
        assert pool.stats().submitted == 300
        assert pool.stats().failed + pool.stats().cancelled + pool.stats().succeeded == 300
        assert pool.stats().recreated == 0


# ---- the end


async def test_close_with_work_in_flight(make_pool: MakePool, witness: Witness, events: EventFile) -> None:
    pool = make_pool(8, posters_per_node=2)
    await pool.start()
    pids = [(one.pid, one.create_time) for one in pool.stats().posters]
    tasks = [asyncio.create_task(pool.post(witness.url("hang"), {})) for _ in range(20)]
    tasks += [asyncio.create_task(pool.post(witness.url("retry_after", "seconds=25"), {})) for _ in range(2)]
    await until(lambda: witness.counts()["in_flight"] == 8)
    await pool.close()
    codes = {await code_from(task) for task in tasks}
    assert codes == {"POOL.CLOSED"}
    assert [same_process(pid, created) for pid, created in pids] == [None, None]
    await until(lambda: witness.counts()["in_flight"] == witness.counts()["connections"] == 0)
    stats = pool.stats()
    assert stats.balanced
    assert (stats.in_flight, stats.occupied, stats.failed) == (0, 0, 22)
    assert len(events.named("pool.closed")) == 1


async def test_close_while_a_poster_is_stopped(make_pool: MakePool, witness: Witness) -> None:
    pool = make_pool(4)
    await pool.start()
    poster = pool.stats().posters[0]
    task = asyncio.create_task(pool.post(witness.url("hang"), {}))
    await until(lambda: witness.counts()["in_flight"] == 1)
    psutil.Process(poster.pid).suspend()
    async with asyncio.timeout(30):
        await pool.close()
    assert await code_from(task) == "POOL.CLOSED"
    assert same_process(poster.pid, poster.create_time) is None
    await until(lambda: witness.counts()["connections"] == 0)


async def test_close_during_the_start(make_pool: MakePool) -> None:
    pool = make_pool(4, posters_per_node=2)
    starting = asyncio.create_task(pool.start())
    await until(lambda: any(one.generation for one in pool.stats().posters))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(one.state == "dead" for one in pool.stats().posters)


# ---- posters that never start

BROKEN = [
    {
        "runtime_env": {
            "env_vars": {"PYTHONPATH": "/nonexistent"},
            "worker_process_setup_hook": "no.such.hook",
        }
    },
    {"resources": {"unobtainium": 1}},
    {"bogus_option": 1},
    {"num_cpus": "two"},
]


@pytest.mark.parametrize("options", BROKEN, ids=["import-error", "resource", "unknown-option", "bad-type"])
async def test_a_poster_that_cannot_start_gives_up_and_the_pool_serves_locally(
    make_pool: MakePool, witness: Witness, events: EventFile, options: dict[str, Any], tmp_path: Path
) -> None:
    if "runtime_env" in options:
        (tmp_path / "httpx.py").write_text("raise ImportError('httpx is broken here')\n")
        options = {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}}
    health = Health(**{**{f: getattr(QUICK, f) for f in QUICK.__slots__}, "start_timeout": 3.0})
    recreation = Recreation(Backoff(0.05, 0.1), budget=1)
    async with asyncio.timeout(60):
        async with make_pool(4, health=health, recreation=recreation, poster_options=options) as pool:
            reply = await pool.post(witness.url("ok"), {})
            assert reply.via == "local"
            await until(lambda: [one.state for one in pool.stats().posters] == ["abandoned"], 30)
            assert (await pool.post(witness.url("ok"), {})).via == "local"
            assert pool.stats().local == 2
    abandoned = events.named("poster.abandoned")
    assert [event["code"] for event in abandoned] == ["POOL.RECREATE_BUDGET"]
    assert "first:" in abandoned[0]["detail"]
    assert len(events.named("poster.start_failed")) == 2
    assert len(events.named("pool.local")) == 1


async def test_without_local_service_the_deadline_names_the_missing_posters(
    make_pool: MakePool, witness: Witness
) -> None:
    health = Health(start_timeout=2.0)
    options = {"resources": {"unobtainium": 1}}
    async with make_pool(4, health=health, local_fallback=False, poster_options=options) as pool:
        assert await code_from(pool.post(witness.url("ok"), {}, deadline=1.0)) == "POOL.NO_POSTER"
        assert witness.counts()["arrived"] == {}


async def test_the_local_client_accounts_cancels_and_closes_like_a_poster(
    make_pool: MakePool, witness: Witness
) -> None:
    health = Health(start_timeout=2.0)
    pool = make_pool(4, health=health, poster_options={"resources": {"unobtainium": 1}})
    await pool.start()
    task = asyncio.create_task(pool.post(witness.url("hang"), {}, request_id="gone"))
    await until(lambda: witness.arrivals("gone") == 1)
    task.cancel()
    await asyncio.wait({task})
    await until(lambda: witness.counts()["disconnected"].get("gone") == 1)
    assert await code_from(pool.post(witness.url("hang"), {}, deadline=0.5)) == "TIMEOUT.DEADLINE"
    tasks = [asyncio.create_task(pool.post(witness.url("hang"), {})) for _ in range(10)]
    await until(lambda: witness.counts()["in_flight"] == 4)
    await pool.close()
    assert {await code_from(task) for task in tasks} == {"POOL.CLOSED"}
    await until(lambda: witness.counts()["connections"] == 0)
    assert (witness.counts()["peak"], pool.stats().occupied) == (4, 0)
    assert pool.stats().balanced


# ---- events


async def test_no_payload_and_no_header_gets_into_the_events(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    async with make_pool(max_attempts=2, backoff=Backoff(0.01, 0.02)) as pool:
        for how in ("status", "close", "html", "repeats", "repeats?status=500", "ok"):
            with pytest.raises(CodedError) if how != "ok" else nullcontext():
                await pool.post(
                    witness.url(how),
                    {"prompt": "PROMPT-TEXT"},
                    headers={"authorization": "Bearer HEADER-TEXT"},
                )
    text = events.path.read_text()
    assert len(events.all()) >= 7  # each of which has the fixed keys
    assert "PROMPT-TEXT" not in text
    assert "HEADER-TEXT" not in text
    assert "Field required" in text, "why a server refuses does"
