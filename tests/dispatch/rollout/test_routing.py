"""Which engine a sample goes to, and what sets one aside."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.rollout.routing import Router, Target
from faults import Backoff, Fault, classify
from protocol import CodedError, Events
from tests.dispatch.rollout.standin import StandIn, engine
from tests.support.events import EventFile
from tests.support.wait import until

A, B, C = "http://a:1", "http://b:1", "http://c:1"
PROMPT = Backoff(0.05, 0.2)
LONG = Backoff(600.0, 600.0)


def fault(code: str) -> Fault:
    return classify(CodedError(code, "as seen in a test"))


def listed(*urls: str, events: Events | None = None, backoff: Backoff = LONG) -> Router:
    router = Router.static(urls, events or Events())
    router._backoff = backoff
    return router


async def picked(router: Router, *avoid: str, timeout: float = 20.0) -> Target:
    return await router.pick(avoid, timeout=timeout)


async def fail(router: Router, url: str, code: str, timeout: float = 20.0) -> None:
    """One request to ``url`` that ends with ``code``."""
    others = [t.url for t in router.targets if t.url != url]
    target = await picked(router, *others, timeout=timeout)
    assert target.url == url
    router.done(target, fault(code))


# ---- choosing


async def test_the_least_loaded_is_picked() -> None:
    router = listed(A, B, C)
    first = [await picked(router) for _ in range(6)]
    assert sorted(t.url for t in first) == [A, A, B, B, C, C]
    for target in first:
        if target.url == B:
            router.done(target, None)
    assert [(await picked(router)).url for _ in range(2)] == [B, B]


async def test_the_same_url_twice_is_one_engine() -> None:
    assert [t.url for t in listed(A, A, B).targets] == [A, B]


@given(st.lists(st.integers(-3, 0) | st.integers(1, 4), max_size=60))
def test_loads_differ_by_one_at_most(steps: list[int]) -> None:
    """However picks and ends interleave (positive: pick that often; else end the busiest), a pick
    never goes to an engine that has more under way than another."""

    async def run() -> None:
        router = listed(A, B, C)
        open_: list[Target] = []
        for step in steps:
            for _ in range(step):
                least = min(t.in_flight for t in router.targets)
                target = await picked(router)
                assert target.in_flight == least + 1
                open_.append(target)
            if step <= 0 and open_:
                router.done(open_.pop(abs(step) % len(open_)), None)
        assert sum(t.in_flight for t in router.targets) == len(open_)

    asyncio.run(run())


async def test_avoid_is_a_preference_and_no_ban() -> None:
    router = listed(A, B)
    assert {(await picked(router, A)).url for _ in range(4)} == {B}
    assert (await picked(router, A, B)).url == A  # the least loaded of what there is


# ---- setting aside

BROKEN = [
    "TRANSPORT.CONNECT",
    "TRANSPORT.DISCONNECTED",
    "TRANSPORT.PROTOCOL",
    "UPSTREAM.SERVER_ERROR",
    "UPSTREAM.BAD_GATEWAY",
    "TIMEOUT.CONNECT",
    "TIMEOUT.READ",
    "TIMEOUT.WRITE",
    "ENGINE.EXITED",
]
NOT_THE_ENGINE = [
    "REQUEST.REJECTED",
    "REQUEST.UNAUTHORIZED",
    "REQUEST.NOT_FOUND",
    "REQUEST.TOO_LARGE",
    "REQUEST.INVALID",
    "BACKPRESSURE.RATE_LIMITED",
    "BACKPRESSURE.OVERLOADED",
    "TIMEOUT.DEADLINE",
    "TIMEOUT.POOL",
    "CANCEL.CALLER",
    "UPSTREAM.BAD_BODY",
    "UPSTREAM.ABORTED",
    "POOL.CLOSED",
    "POOL.NO_POSTER",
    "ACTOR.DIED",  # a poster's death says nothing about the engine that it was talking to
    "ACTOR.UNAVAILABLE",
    "ACTOR.WEDGED",
    "NODE.DIED",
    "NODE.OUT_OF_MEMORY",
    "TASK.WORKER_CRASHED",
]


@pytest.mark.parametrize("code", BROKEN)
async def test_a_broken_engine_gets_no_new_work(code: str) -> None:
    router = listed(A, B)
    await fail(router, A, code)
    assert {(await picked(router)).url for _ in range(5)} == {B}


@pytest.mark.parametrize("code", NOT_THE_ENGINE)
async def test_what_is_not_the_engines_fault_never_sets_it_aside(code: str) -> None:
    """H3: a stream of oversized prompts must not eject an engine; nor must its being full."""
    router = listed(A)
    for _ in range(50):
        await fail(router, A, code, timeout=0.0)
    assert (await picked(router, timeout=0.0)).url == A


async def test_aside_and_back(tmp_path: Path) -> None:
    """Set aside for a time that doubles with each failure in a row, and tried again after it."""
    file = EventFile(tmp_path / "events.jsonl")
    with Events.to_file(file.path, run="t", role="t") as events:
        router = listed(A, events=events, backoff=PROMPT)
        for _ in range(4):
            await fail(router, A, "TRANSPORT.CONNECT")  # picking waits until it is back
        router.done(await picked(router), None)
        await fail(router, A, "TRANSPORT.CONNECT")
    told = file.named("engine.aside")
    assert [e["detail"].split(" s:")[0] for e in told] == [
        f"no new work for {s}" for s in ("0.05", "0.1", "0.2", "0.2", "0.05")
    ]
    assert {(e["key"], e["code"], e["data"]["url"]) for e in told} == {("engine/0", "TRANSPORT.CONNECT", A)}


async def test_one_death_counts_once() -> None:
    """All that was under way at an engine fails together: it is one failure and not a row of them."""
    router = listed(A, B)
    under_way = [await picked(router, B) for _ in range(20)]
    for target in under_way:
        router.done(target, fault("TRANSPORT.DISCONNECTED"))
    assert router.targets[0].failures == 1
    assert router.targets[0].in_flight == 0


async def test_an_end_without_a_verdict_does_not_clear_it() -> None:
    """A request that was cancelled at an engine says nothing of its health."""
    router = listed(A, backoff=PROMPT)
    await fail(router, A, "TRANSPORT.CONNECT")
    await fail(router, A, "CANCEL.CALLER")
    assert router.targets[0].failures == 1


# ---- when there is none


async def test_no_engine_after_the_timeout() -> None:
    router = listed(A, B)
    await fail(router, A, "TRANSPORT.CONNECT")
    await fail(router, B, "TRANSPORT.CONNECT")
    with pytest.raises(CodedError) as caught:
        await picked(router, timeout=0.05)
    assert caught.value.code == "UPSTREAM.NO_ENGINE"
    assert A in caught.value.detail
    assert B in caught.value.detail
    assert classify(caught.value).code == "UPSTREAM.NO_ENGINE"


async def test_no_engine_at_all() -> None:
    for router in (Router.follow(StandIn(), Events()), listed()):
        with pytest.raises(CodedError, match="none is ready") as caught:
            await picked(router, timeout=0.02)
        assert caught.value.code == "UPSTREAM.NO_ENGINE"


async def test_a_cancelled_wait_takes_nothing() -> None:
    router = listed(A)
    await fail(router, A, "TRANSPORT.CONNECT")
    waiting = asyncio.create_task(picked(router))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert router.targets[0].in_flight == 0


# ---- following a fleet


async def test_only_ready_engines_are_routable() -> None:
    states = ["starting", "ready", "suspect", "quarantined", "stopping", "dead"]
    fleet = StandIn(*(engine(n, f"http://e{n}:1", state) for n, state in enumerate(states)))
    router = Router.follow(fleet, Events())
    assert [t.url for t in router.targets] == ["http://e1:1"]


@pytest.mark.parametrize("state", ["suspect", "quarantined", "stopping", "dead"])
async def test_what_is_no_longer_ready_is_unroutable_at_once(state: str) -> None:
    fleet = StandIn(engine(0, A), engine(1, B))
    router = Router.follow(fleet, Events())
    on_its_way = await picked(router, B)
    fleet.becomes(engine(0, A, state))
    assert {(await picked(router)).url for _ in range(5)} == {B}
    router.done(on_its_way, fault("TRANSPORT.DISCONNECTED"))  # its end may come later than the news


async def test_a_new_life_on_another_port() -> None:
    fleet = StandIn(engine(0, A))
    router = Router.follow(fleet, Events())
    await fail(router, A, "TRANSPORT.DISCONNECTED")
    fleet.becomes(engine(0, "", "starting"))
    fleet.becomes(engine(0, B))
    target = await picked(router, timeout=0.0)
    assert (target.url, target.failures) == (B, 0)


async def test_a_new_life_on_the_same_port_starts_clean() -> None:
    fleet = StandIn(engine(0, A))
    router = Router.follow(fleet, Events())
    router._backoff = LONG
    await fail(router, A, "TRANSPORT.DISCONNECTED")
    fleet.becomes(engine(0, A, "dead"))
    fleet.becomes(engine(0, A))
    assert (await picked(router, timeout=0.0)).failures == 0


async def test_the_weight_version_follows_and_load_is_kept() -> None:
    fleet = StandIn(engine(0, A, version="v1"))
    router = Router.follow(fleet, Events())
    target = await picked(router)
    assert target.weight_version == "v1"
    fleet.becomes(engine(0, A, version="v2"))
    assert [(t.weight_version, t.in_flight) for t in router.targets] == [("v2", 1)]


async def test_a_waiting_pick_is_woken() -> None:
    fleet = StandIn(engine(0, A, "starting"))
    router = Router.follow(fleet, Events())
    waiting = [asyncio.create_task(picked(router, timeout=600.0)) for _ in range(5)]
    await asyncio.sleep(0)
    fleet.becomes(engine(0, A, "quarantined"))
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    fleet.becomes(engine(0, A))
    async with asyncio.timeout(20.0):
        assert {t.url for t in await asyncio.gather(*waiting)} == {A}
    assert router.targets[0].in_flight == 5


async def test_a_pick_that_waits_for_one_aside_is_woken_by_another() -> None:
    fleet = StandIn(engine(0, A), engine(1, B, "starting"))
    router = Router.follow(fleet, Events())
    router._backoff = LONG
    await fail(router, A, "TRANSPORT.DISCONNECTED")
    waiting = asyncio.create_task(picked(router, timeout=600.0))
    await asyncio.sleep(0)
    fleet.becomes(engine(1, B))
    async with asyncio.timeout(20.0):
        assert (await waiting).url == B


async def test_what_breaks_is_reported_to_the_fleet() -> None:
    fleet = StandIn(engine(0, A))
    router = Router.follow(fleet, Events())
    for code in ("REQUEST.REJECTED", "BACKPRESSURE.OVERLOADED", "ACTOR.DIED", "UPSTREAM.SERVER_ERROR"):
        await fail(router, A, code)
    assert fleet.reports == [(A, "UPSTREAM.SERVER_ERROR")]


async def test_close_stops_following() -> None:
    fleet = StandIn(engine(0, A))
    router = Router.follow(fleet, Events())
    assert fleet.followers == 1
    router.close()
    router.close()
    assert fleet.followers == 0
    fleet.becomes(engine(0, A, "dead"))
    await until(lambda: [t.url for t in router.targets] == [A], what="nothing changes any more")
