"""Faults under a pool, beyond the deaths that tests/chaos brings: posters that hold the GIL or run out of
memory, nodes that come and go, a GCS and a raylet that are not there, calls and replies that are lost,
posters that never live, and owners that end without closing. The witness's counts are the judge.

What breaks Ray itself runs in a driver of its own, see `fault_drive`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from dispatch.posting import PosterPool, Reply
from dispatch.posting.posters.batching import MAX_CALLS
from dispatch.posting.posters.keeper import Recreation
from dispatch.processes import is_alive
from faults import Backoff
from protocol import CodedError, catalogue
from tests.dispatch.posting.posters.fault_drive import CONCURRENCY
from tests.dispatch.posting.test_pool_misuse import drive
from tests.support.cgroup import memory_cgroup_of
from tests.support.events import EventFile
from tests.support.fixtures import QUICK, MakePool
from tests.support.ray_side import actor_of, kill_poster, on_poster
from tests.support.signals import no_signal_ignored
from tests.support.wait import until, until_sync
from tests.support.witness import ROOT, Witness

pytestmark = pytest.mark.timeout(300)

BUDGET = QUICK.interval + (QUICK.interval + QUICK.timeout) * QUICK.strikes + 1.0
"""Seconds within which a poster that does not answer is known to be lost: its probes, and a slow machine."""


async def code_of(awaitable: Any) -> str:
    """The code that it raises, which the catalogue has; "" when it succeeds."""
    (outcome,) = await asyncio.gather(awaitable, return_exceptions=True)
    if not isinstance(outcome, BaseException):
        return ""
    assert isinstance(outcome, CodedError), repr(outcome)
    assert outcome.code in catalogue
    return str(outcome.code)


def judged(pool: PosterPool, witness: Witness, concurrency: int) -> None:
    """What holds at the end of each of these tests, whatever was hurt."""
    stats, counts = pool.stats(), witness.counts()
    assert stats.balanced
    assert stats.peak <= concurrency
    assert counts["peak"] <= concurrency
    assert (stats.in_flight, stats.occupied, counts["in_flight"]) == (0, 0, 0)


async def at_rest(pool: PosterPool, witness: Witness) -> None:
    await until(lambda: pool.stats().occupied == witness.counts()["in_flight"] == 0)


@contextlib.asynccontextmanager
async def eight_in_flight(
    make_pool: MakePool, witness: Witness
) -> AsyncIterator[tuple[PosterPool, asyncio.Future[list[Reply]]]]:
    """Two posters with eight POSTs, and their replies that are to come. What is done to one of the two ends
    in its replacement, and nothing else is lost."""
    async with make_pool(8, posters_per_node=2) as pool:
        url = witness.url("ok", "delay=1")
        replies = asyncio.gather(*(pool.post(url, {}, request_id=f"eight-{n}") for n in range(8)))
        await until(lambda: len(witness.counts()["arrived"]) == 8)
        yield pool, replies
        await until(lambda: pool.stats().recreated == 1, 40)
        await at_rest(pool, witness)
        judged(pool, witness, 8)
        arrived = witness.counts()["arrived"]
        assert set(arrived) == {f"eight-{n}" for n in range(8)}
        assert max(arrived.values()) <= 2


# ---- one poster


HOLDS_THE_GIL = {
    "sleep": "import ctypes; ctypes.PyDLL(None).sleep(60)",
    "regex": "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
}


@pytest.mark.parametrize("code", HOLDS_THE_GIL.values(), ids=list(HOLDS_THE_GIL))
async def test_a_poster_that_holds_the_gil_is_replaced_within_its_health_budget(
    make_pool: MakePool, witness: Witness, events: EventFile, code: str
) -> None:
    """Both of its loops are silent, and its process takes no notice of a polite end."""
    async with eight_in_flight(make_pool, witness) as (pool, replies):
        victim = pool.stats().posters[0]
        began = time.monotonic()
        on_poster(pool, code)
        await until(lambda: pool.stats().posters[0].state not in ("serving", "quarantined"), BUDGET + 2)
        await until(lambda: not is_alive(victim.pid, victim.create_time), 4)
        assert time.monotonic() - began < BUDGET + 4
        assert {reply.status for reply in await replies} == {200}
    died = events.named("poster.died")
    assert [(event["key"], event["data"]["confirmed_gone"]) for event in died] == [("poster/0", True)]
    assert died[0]["code"] == "ACTOR.WEDGED"


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    with memory_cgroup_of(96 * 2**20) as made:
        yield made


async def test_a_poster_that_the_kernel_kills_for_its_memory_is_replaced(
    make_pool: MakePool, witness: Witness, events: EventFile, small_cgroup: Path
) -> None:
    async with eight_in_flight(make_pool, witness) as (pool, replies):
        victim = pool.stats().posters[0]
        (small_cgroup / "cgroup.procs").write_text(str(victim.pid))
        on_poster(pool, "held = [bytearray(b'x' * 2**20) for _ in range(400)]")
        await until(lambda: not is_alive(victim.pid, victim.create_time), 20, "the kernel killed it")
        assert {reply.via for reply in await replies} == {"poster"}
    assert [event["key"] for event in events.named("poster.died")] == ["poster/0"]


async def test_what_was_not_sent_to_a_stopped_poster_goes_elsewhere_before_it_is_replaced(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    """It is stopped while it has as many calls as there may be; it is never replaced, and goes on later."""
    # Nor when its first answer tells of a heartbeat that is as old as its stop.
    health = dataclasses.replace(QUICK, strikes=1000, wedge_after=1000.0)
    async with make_pool(40, posters_per_node=2, health=health) as pool:
        victim = pool.stats().posters[0]
        kill_poster(pool, signal.SIGSTOP, "poster/0")
        try:
            url = witness.url("ok", "delay=1")
            tasks = []
            for n in range(40):
                tasks.append(asyncio.create_task(pool.post(url, {}, request_id=f"stop-{n}")))
                await asyncio.sleep(0.005)  # so that each goes with a call of its own
            await until(lambda: sum(task.done() for task in tasks) == 40 - MAX_CALLS)
            stats = pool.stats()
            assert [one.state for one in stats.posters] == ["quarantined", "serving"]
            assert [one.occupied for one in stats.posters] == [MAX_CALLS, 0]
            assert (stats.sent, stats.occupied, stats.succeeded) == (40, MAX_CALLS, 40 - MAX_CALLS)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        assert {reply.attempts for reply in await asyncio.gather(*tasks)} == {1}
        await at_rest(pool, witness)
        judged(pool, witness, 40)
        assert set(witness.counts()["arrived"].values()) == {1}
        assert (pool.stats().sent, pool.stats().retried, pool.stats().recreated) == (40, 0, 0)
    assert [event["key"] for event in events.named("poster.quarantined")] == ["poster/0"]


class Hurting(httpx.AsyncBaseTransport):
    """A transport whose exchanges end as their URL says, with what no transport should raise."""

    def __init__(self, connections: int) -> None:
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        how = request.url.params.get("hurt")
        if how == "memory":
            raise MemoryError
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "recursion":
            raise RecursionError
        if how == "unpicklable":
            raise CodedError("UPSTREAM.BAD_BODY", "a lambda is in it", {"what": lambda: None})
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_an_exchange_that_raises_whatever_ends_coded_and_wedges_no_poster(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        pool = make_pool(8, transport=Hurting, max_attempts=2, backoff=Backoff(0.01, 0.02))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    async with pool:
        pid = pool.stats().posters[0].pid
        for how, codes in {
            "memory": {"NODE.OUT_OF_MEMORY"},
            "cancelled": {"INTERNAL.BUG", "CANCEL.CALLER", "TIMEOUT.DEADLINE"},
            "recursion": {"INTERNAL.BUG", "UNKNOWN.EXCEPTION"},
            "unpicklable": {"UPSTREAM.BAD_BODY"},
        }.items():
            good = asyncio.create_task(pool.post(witness.url("ok", "delay=0.2"), {}))
            async with asyncio.timeout(10):  # long before the deadline: nothing waits for that
                assert await code_of(pool.post(witness.url("ok", f"hurt={how}"), {})) in codes, how
                assert (await good).via == "poster"
        await at_rest(pool, witness)
        judged(pool, witness, 8)
        assert [one.pid for one in pool.stats().posters] == [pid]
    assert events.named("poster.died", "poster.quarantined") == []


async def test_a_poster_killed_by_somebody_else_while_it_is_idle(
    make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    async with make_pool(8) as pool:
        ray.kill(actor_of(pool), no_restart=True)
        await until(lambda: pool.stats().recreated == 1, 40)
        assert await code_of(pool.post(witness.url("ok"), {}, idempotent=False)) == ""
        judged(pool, witness, 8)
    assert [event["code"] for event in events.named("poster.died")] == ["ACTOR.DIED"]


# ---- posters that never live


def refuse_in_a_worker(connections: int) -> httpx.AsyncBaseTransport:
    if os.environ.get("FAILSOFT_TEST_REFUSES"):
        raise CodedError("CONFIG.INVALID", "no such setting on this node")
    return httpx.AsyncHTTPTransport()


async def test_settings_that_no_poster_can_start_with_fail_the_start_at_once(
    make_pool: MakePool, events: EventFile
) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        pool = make_pool(
            8,
            posters_per_node=2,
            transport=refuse_in_a_worker,
            recreation=Recreation(Backoff(0.05, 0.1), budget=6),
            poster_options={"runtime_env": {"env_vars": {"FAILSOFT_TEST_REFUSES": "1"}}},
        )
        async with asyncio.timeout(40):
            with pytest.raises(CodedError) as caught:
                await pool.start()
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert caught.value.code == "CONFIG.INVALID"
    assert "no such setting on this node" in caught.value.detail
    assert Counter(event["key"] for event in events.named("poster.start_failed")) == {
        "poster/0": 1,
        "poster/1": 1,
    }
    assert [event["code"] for event in events.named("poster.abandoned")] == ["CONFIG.INVALID"] * 2
    assert pool.stats().occupied == 0


async def test_a_start_that_takes_too_long_says_so(make_pool: MakePool, events: EventFile) -> None:
    health = type(QUICK)(start_timeout=1.0)
    options = {"resources": {"unobtainium": 1}}
    recreation = Recreation(Backoff(0.05, 0.1), budget=1)
    async with make_pool(4, health=health, recreation=recreation, poster_options=options) as pool:
        await until(lambda: pool.stats().posters[0].state == "abandoned", 20)
    (abandoned,) = events.named("poster.abandoned")
    assert abandoned["code"] == "POOL.RECREATE_BUDGET"
    assert "did not start in 1 s" in abandoned["detail"]


def test_a_runtime_env_that_cannot_be_set_up_is_given_up(witness: Witness) -> None:
    told = drive("no_environment", witness.url("ok"))
    assert told["tried"] == told["later"] == [3, 3]  # the budget is 2 beyond the first, and then no more
    assert told["via"] == "local"
    assert told["abandoned"] == ["POOL.RECREATE_BUDGET"] * 2
    assert all("runtime" in detail and "pip" in detail for detail in told["details"])


# ---- the cluster


def check_load(told: dict[str, Any], witness: Witness) -> None:
    """The load went on all the while: nothing failed, the capacity was split exactly and never exceeded."""
    assert told["codes"] == {}
    assert told["good"] == told["submitted"] == told["succeeded"]
    assert told["unbalanced"] == 0
    assert told["shares"] == [CONCURRENCY]
    assert told["peak"] <= CONCURRENCY
    counts = witness.counts()
    assert counts["peak"] <= CONCURRENCY
    assert counts["in_flight"] == 0
    arrived = counts["arrived"]
    assert len(arrived) == told["good"]
    assert sum(arrived.values()) - len(arrived) <= told["retried"]  # a second arrival is a retry


def test_nodes_join_drain_and_die_under_load(witness: Witness) -> None:
    told = drive("nodes", witness.url("ok"), timeout=280)
    check_load(told, witness)
    assert told["joined"] == [3, 3, 3, 2]
    assert told["drained"] == [6, 5]
    assert told["drained_took_new_work"] == 0
    assert told["retried_by_the_drain"] == 0  # what was in flight there ended well
    assert told["killed"] == [6, 5]


def test_the_gcs_stops_and_is_started_anew_under_load(witness: Witness, tmp_path: Path) -> None:
    """Ray keeps the GCS's tables in Redis, or since 2.60 in a folder."""
    told = drive(
        "gcs",
        witness.url("ok"),
        timeout=280,
        RAY_gcs_storage="rocksdb",
        RAY_gcs_storage_path=str(tmp_path / "gcs"),
    )
    check_load(told, witness)
    for name, recreated in (("while_stopped", 0), ("while_dead", 1)):
        good, so_far = told[name]
        assert good > 50
        assert so_far == recreated  # the GCS's absence itself costs no poster
    assert told["recreated"] == 2
    assert told["states"] == ["serving", "serving"]
    for gap in ("stopped_gap_s", "dead_gap_s", "back_gap_s"):  # what waits for the GCS stands still longer
        assert told[gap] < 3, gap


def test_the_own_raylet_is_killed(witness: Witness) -> None:
    """Also with bodies for which Ray's object store would be used: after the raylet's end, that ends the
    process. What remains: a body that is being put there in the very moment in which the raylet dies."""
    told = drive("raylet", witness.url("ok"), timeout=280)
    assert told["ended_in_s"] < 25 + 5
    assert all(not code or code in catalogue for code in told["ended"])
    assert told["small"] == told["large"] == "local"
    assert told["close_s"] < 10
    assert told["left"] == [False, False]
    assert told["balanced"] is True
    counts = witness.counts()
    assert max(told["peak"], counts["peak"]) <= CONCURRENCY
    assert counts["in_flight"] == 0


def test_what_is_lost_on_the_way_is_not_done_twice(witness: Witness) -> None:
    """Calls that do not arrive, replies that do not come back: the poster lives, and does each POST once."""
    chances = {"req_failure_prob": 8, "resp_failure_prob": 8, "in_flight_failure_prob": 8}
    lost = {"CoreWorkerService.grpc_client.PushTask": {"num_failures": -1, **chances}}
    told = drive("lost", witness.url("ok"), "120", timeout=280, RAY_testing_rpc_failure=json.dumps(lost))
    assert told["done"] == {"poster": 120}
    assert told["failures"].get("ActorUnavailableError", 0) >= 2, told  # else nothing was lost
    assert (told["recreated"], told["retried"]) == (0, 0)
    counts = witness.counts()
    assert len(counts["arrived"]) == 120
    assert set(counts["arrived"].values()) == {1}
    assert max(told["peak"], counts["peak"]) <= CONCURRENCY


# ---- the owner ends


@pytest.mark.parametrize("how", ["raises", "SIGTERM", "SIGINT"])
def test_an_owner_that_ends_without_closing_leaves_nothing(witness: Witness, how: str) -> None:
    command = [sys.executable, "-m", "tests.dispatch.posting.posters.fault_drive", "owner"]
    with subprocess.Popen(
        [*command, witness.url("ok"), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=no_signal_ignored,
    ) as process:
        assert process.stdout is not None
        try:
            below = json.loads(next(line for line in process.stdout if line.startswith("[[")))
            if how != "raises":
                until_sync(lambda: witness.counts()["in_flight"] == CONCURRENCY)
                process.send_signal(getattr(signal, how))
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    if how == "raises":
        assert "ZeroDivisionError: the owner's own bug" in said
    assert any("Poster" in name for _, _, name in below)
    assert any("Eye" in name for _, _, name in below)

    def left() -> list[str]:
        return [name for pid, created, name in below if is_alive(pid, created)]

    until_sync(lambda: not left(), 60, "every process is gone")
    until_sync(lambda: witness.counts()["connections"] == 0)
