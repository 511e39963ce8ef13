"""n samples for each prompt, through real posters, from real engines: each one accounted for."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dispatch.posting import PosterPool
from dispatch.rollout import Failure, Group, Prompt, RolloutClient, Router, Sample, Sampling
from faults import Backoff
from protocol import CodedError, Events
from tests.dispatch.embedded.engine_under_test import EngineUnderTest
from tests.dispatch.rollout.conftest import CONCURRENCY, Engines
from tests.dispatch.rollout.standin import StandIn, engine
from tests.support.events import EventFile
from tests.support.mortal import DEADLY, Mortal
from tests.support.wait import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT = Sampling(8)


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{n}", text, "42", {"n": n}) for n, text in enumerate(texts)]


def made(pool: PosterPool, *urls: str, **more: Any) -> RolloutClient:
    options = {
        "n": 3,
        "sampling": SHORT,
        "deadline": 30.0,
        "backoff": Backoff(0.01, 0.1),
        "concurrency": CONCURRENCY,
        "run": secrets.token_hex(4),
    }
    router = more.pop("router", None) or Router.static(urls, Events())
    return RolloutClient(pool, router, **{**options, **more})


async def everything(client: RolloutClient, asked: Iterable[Prompt], **more: Any) -> list[Sample | Failure]:
    return [one async for one in client.samples(asked, **more)]


def keys(results: Iterable[Sample | Failure]) -> list[tuple[str, int]]:
    return sorted((one.prompt_id, one.index) for one in results)


# ---- what comes


async def test_n_samples_a_prompt(pool: PosterPool, engines: Engines) -> None:
    urls = [engines(0).url, engines(1).url]
    client = made(pool, *urls)
    results = await everything(client, prompts("The harbour", "At noon", "The ship"))
    assert keys(results) == [(f"p{p}", i) for p in range(3) for i in range(3)]
    for one in results:
        assert isinstance(one, Sample)
        assert one.text
        assert one.finish_reason in ("stop", "length")
        assert (one.answer, one.metadata) == ("42", {"n": int(one.prompt_id[1:])})
        assert one.completion_tokens > 0
        assert (one.attempts, one.via) == (1, "poster")
        assert one.request_id == client.request_id(one.prompt_id, one.index)
        msgspec.json.encode(one)
    assert {one.engine for one in results if isinstance(one, Sample)} == set(urls)
    stats = client.stats()
    assert (stats.asked, stats.completed, stats.failed, stats.retried) == (9, 9, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["sglang", "openai"])
async def test_both_dialects(api: Any, stream: bool, pool: PosterPool, shared: EngineUnderTest) -> None:
    client = made(pool, shared.url, api=api, stream=stream, model="m", sampling=Sampling(8, seed=1))
    results = await everything(client, prompts("The harbour"))
    assert keys(results) == [("p0", 0), ("p0", 1), ("p0", 2)]
    assert all(isinstance(one, Sample) and one.text for one in results)


async def test_completion_order(pool: PosterPool, shared: EngineUnderTest) -> None:
    """What is slow holds nobody up, and comes when it is done."""
    shared.faults("hang", times=3, contains="slow")
    order = []
    async for one in made(pool, shared.url).samples(prompts("slow one", "quick", "quick too")):
        order.append(one.prompt_id)
        if len(order) == 6:
            assert "p0" not in order
            shared.clear_faults()
    assert order[6:] == ["p0"] * 3


async def test_prompts_are_drawn_as_capacity_allows(pool: PosterPool, shared: EngineUnderTest) -> None:
    drawn = 0

    def endless() -> Iterator[Prompt]:
        nonlocal drawn
        while True:
            drawn += 1
            yield Prompt(f"p{drawn}", "The harbour", None, {})

    seen = 0
    async with aclosing(made(pool, shared.url, n=1).samples(endless())) as stream:
        async for _ in stream:
            seen += 1
            assert drawn <= seen + 2 * CONCURRENCY
            if seen == 50:
                break


async def test_skip(pool: PosterPool, shared: EngineUnderTest) -> None:
    client = made(pool, shared.url)
    skip = {("p0", 1), ("p1", 0), ("p1", 1), ("p1", 2), ("elsewhere", 7)}
    results = await everything(client, prompts("a", "b", "c"), skip=skip)
    assert keys(results) == [("p0", 0), ("p0", 2), ("p2", 0), ("p2", 1), ("p2", 2)]
    assert client.stats().asked == 5


# ---- groups


async def test_groups_come_when_they_are_whole(pool: PosterPool, shared: EngineUnderTest) -> None:
    shared.faults("hang", times=1, contains="slow")
    order: list[Group] = []
    async for group in made(pool, shared.url).groups(prompts("slow", "quick", "quick too")):
        order.append(group)
        if len(order) == 2:
            shared.clear_faults()
    assert sorted(g.prompt.id for g in order[:2]) == ["p1", "p2"]
    assert order[2].prompt.id == "p0"
    for group in order:
        assert [s.index for s in group.samples] == [0, 1, 2]
        assert group.failures == ()


async def test_a_partial_group_keeps_what_came(pool: PosterPool, shared: EngineUnderTest) -> None:
    shared.faults("status", status=400, times=1, contains="half bad")
    groups = {g.prompt.id: g async for g in made(pool, shared.url).groups(prompts("half bad", "good"))}
    bad = groups["p0"]
    assert len(bad.samples) == 2
    assert [f.code for f in bad.failures] == ["REQUEST.REJECTED"]
    assert {s.index for s in bad.samples} | {f.index for f in bad.failures} == {0, 1, 2}
    assert len(groups["p1"].samples) == 3


async def test_a_group_of_failures_is_still_a_group(pool: PosterPool, shared: EngineUnderTest) -> None:
    shared.faults("status", status=400, times=None)
    (group,) = [g async for g in made(pool, shared.url).groups(prompts("bad"))]
    assert group.samples == ()
    assert len(group.failures) == 3


# ---- versions


async def test_the_version_is_the_one_at_dispatch(pool: PosterPool, engines: Engines, tmp_path: Path) -> None:
    """W9: the engine is paused, updated and continued while it generates. What it says at the end is
    the new version; the sample was asked for under the old one."""
    slow = engines(0, "--token-rate", "30", "--weight-version", "v1")
    fleet = StandIn(engine(0, slow.url, version="v1"))
    # With this seed all 24 tokens come: a text that ended by itself at the fourth could be missed below.
    sampling = Sampling(24, seed=1)
    client = made(pool, router=Router.follow(fleet, Events()), n=1, sampling=sampling)
    first = asyncio.create_task(everything(client, prompts("The harbour")))
    await until(lambda: slow.loads()["num_running"] == 1, what="it generates")
    weights = tmp_path / "weights.txt"
    weights.write_text("The harbour was quiet and the ships lay still in the grey water of the bay. " * 40)
    slow.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
    update = {"model_path": str(weights), "weight_version": "v2", "flush_cache": False}
    slow.post("/update_weights_from_disk", update).raise_for_status()
    assert not first.done()
    fleet.becomes(engine(0, slow.url, version="v2"))
    slow.post("/continue_generation").raise_for_status()
    (old,) = await first
    (new,) = await everything(client, prompts("The harbour"))
    assert isinstance(old, Sample)
    assert isinstance(new, Sample)
    assert (old.weight_version, new.weight_version) == ("v1", "v2")


async def test_what_waited_for_its_place_carries_the_version_with_which_it_went(
    pool: PosterPool, engines: Engines
) -> None:
    slow = engines(0, "--token-rate", "30", "--weight-version", "v1")
    fleet = StandIn(engine(0, slow.url, version="v1"))
    more = 3
    client = made(pool, router=Router.follow(fleet, Events()), n=CONCURRENCY + more, sampling=Sampling(24))
    asked = asyncio.create_task(everything(client, prompts("The harbour")))
    await until(lambda: pool.stats().waiting == more, what="the others wait for a place")
    fleet.becomes(engine(0, slow.url, state="suspect", version="v1"))
    fleet.becomes(engine(0, slow.url, version="v2"))
    came = Counter(one.weight_version for one in await asked if isinstance(one, Sample))
    assert came == {"v1": CONCURRENCY, "v2": more}


async def test_a_retry_carries_the_version_of_its_own_dispatch(
    pool: PosterPool, shared: EngineUnderTest
) -> None:
    """The attempt that succeeded counts: the one before it left no token in the sample."""
    fleet = StandIn(engine(0, shared.url, version="v1"))
    shared.faults("abort", times=1)
    client = made(pool, router=Router.follow(fleet, Events()), n=1, backoff=Backoff(1.0, 1.0))
    asked = asyncio.create_task(everything(client, prompts("The harbour")))
    await until(lambda: client.stats().retried == 1, what="the abort was seen")
    fleet.becomes(engine(0, shared.url, version="v2"))
    (one,) = await asked
    assert isinstance(one, Sample)
    assert (one.attempts, one.weight_version) == (2, "v2")


async def test_where_nothing_is_known_the_engine_is_believed(
    pool: PosterPool, shared: EngineUnderTest
) -> None:
    (one,) = await everything(made(pool, shared.url, n=1), prompts("The harbour"))
    assert isinstance(one, Sample)
    assert one.weight_version == "default"


# ---- identity


async def test_every_attempt_has_the_same_id(
    pool: PosterPool, shared: EngineUnderTest, tmp_path: Path
) -> None:
    """The witness is the engine: one id arrives three times, and the next sample's only once."""
    file = EventFile(tmp_path / "events.jsonl")
    shared.faults("status", status=500, times=2)
    before = Counter(shared.counts()["arrived"])
    with Events.to_file(file.path, run="t", role="t") as events:
        client = made(pool, shared.url, n=1, run="same-id", events=events)
        (one,) = await everything(client, prompts("The harbour"))
        (two,) = await everything(client, [Prompt("other", "The harbour", None, {})])
    assert isinstance(one, Sample)
    assert one.attempts == 3
    arrived = Counter(shared.counts()["arrived"]) - before
    assert arrived == {one.request_id: 3, two.request_id: 1}
    retried = file.named("sample.retried")
    assert [e["data"]["request_id"] for e in retried] == [one.request_id] * 2
    assert {(e["key"], e["code"]) for e in retried} == {("p0/0", "UPSTREAM.SERVER_ERROR")}


async def test_ids_are_the_same_in_another_process_of_the_run(pool: PosterPool) -> None:
    one, two = made(pool, run="a"), made(pool, run="a")
    assert one.request_id("p", 1) == two.request_id("p", 1)
    ids = {one.request_id("p", 1), one.request_id("p", 2), one.request_id("q", 1)}
    assert len(ids | {made(pool, run="b").request_id("p", 1)}) == 4


async def test_seeds_make_a_run_reproducible(pool: PosterPool, engines: Engines) -> None:
    """The same seed gives the same texts, whichever engine and attempt; each sample has its own."""

    async def texts(seed: int) -> dict[tuple[str, int], str]:
        client = made(pool, engines(0).url, engines(1).url, sampling=Sampling(16, seed=seed))
        results = await everything(client, prompts("The harbour", "The harbour "))
        return {(s.prompt_id, s.index): s.text for s in results if isinstance(s, Sample)}

    first = await texts(7)
    engines(0).faults("status", status=500, times=2)
    assert await texts(7) == first
    assert len(first) == 6
    assert len(set(first.values())) > 3
    assert await texts(8) != first


# ---- failures


async def test_a_deadline_is_a_failure_with_its_name(pool: PosterPool, shared: EngineUnderTest) -> None:
    shared.faults("hang", times=None)
    client = made(pool, shared.url, n=2, deadline=0.4)
    results = await everything(client, prompts("The harbour"))
    for one in results:
        assert isinstance(one, Failure)
        assert one.code == "TIMEOUT.DEADLINE"
        assert one.attempts == 1
        assert one.seconds >= 0.4
        assert one.error_id
        assert one.detail
        msgspec.json.encode(one)
    assert client.stats().failed_by_code == {"TIMEOUT.DEADLINE": 2}


async def test_no_engine_is_a_failure_with_its_name(pool: PosterPool, tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    with Events.to_file(file.path, run="t", role="t") as events:
        router = Router.follow(StandIn(), events)
        client = made(pool, router=router, n=2, deadline=0.3, events=events)
        results = await everything(client, prompts("a"))
    assert [one.code for one in results if isinstance(one, Failure)] == ["UPSTREAM.NO_ENGINE"] * 2
    assert [one.attempts for one in results] == [0, 0]  # nothing was sent
    told = file.named("sample.failed")
    assert sorted(e["key"] for e in told) == ["p0/0", "p0/1"]
    assert {e["code"] for e in told} == {"UPSTREAM.NO_ENGINE"}


async def test_an_engine_that_is_gone_is_left_for_another(pool: PosterPool, engines: Engines) -> None:
    with EngineUnderTest.start() as gone:
        url = gone.url
    client = made(pool, url, engines(1).url)
    results = await everything(client, prompts("a", "b", "c"))
    assert {one.engine for one in results if isinstance(one, Sample)} == {engines(1).url}
    assert len(results) == 9
    assert client.stats().retried_by_code.keys() == {"TRANSPORT.CONNECT"}


async def test_a_reply_that_cannot_be_encoded_costs_one_sample(
    pool: PosterPool, shared: EngineUnderTest
) -> None:
    """Half of a surrogate pair in an error under 200: a failure with its name, and no end of the run."""
    shared.faults("status", status=200, times=None, contains="odd", body='{"error": "\\ud800"}')
    client = made(pool, shared.url, n=1, max_attempts=2)
    results = await everything(client, prompts("odd", "good"))
    assert {one.prompt_id: isinstance(one, Sample) for one in results} == {"p0": False, "p1": True}
    assert client.stats().failed_by_code == {"UPSTREAM.STREAM_ERROR": 1}


async def test_a_source_that_fails_leaves_nothing_under_way(
    pool: PosterPool, shared: EngineUnderTest
) -> None:
    shared.faults("hang", times=None)

    def source() -> Iterator[Prompt]:
        yield from prompts("a", "b")
        raise RuntimeError("the disk with the prompts is gone")

    client = made(pool, shared.url)
    with pytest.raises(RuntimeError, match="the disk with the prompts"):
        await everything(client, source())
    assert client.stats().in_flight == 0


@pytest.mark.parametrize("name", ["n", "max_attempts", "concurrency"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
async def test_settings_that_cannot_work(name: str, value: Any, pool: PosterPool) -> None:
    with pytest.raises(CodedError, match=name) as caught:
        made(pool, **{name: value})
    assert caught.value.code == "CONFIG.INVALID"


# ---- leaving


@pytest.mark.parametrize("which", ["samples", "groups"])
async def test_leaving_the_loop_leaves_nothing_in_flight(
    which: str, pool: PosterPool, shared: EngineUnderTest
) -> None:
    shared.faults("hang", times=None, contains="slow")
    client = made(pool, shared.url)
    stream: Any = getattr(client, which)(prompts("quick", "slow", "slow too"))
    async with aclosing(stream):
        async for _ in stream:
            break
    stats = client.stats()
    assert (stats.in_flight, stats.lost, stats.failed) == (0, 0, 0)
    await until(lambda: shared.counts()["in_flight"] == 0, what="the engine has been left alone")
    await until(lambda: pool.stats().occupied == 0, what="the places are free again")


@pytest.mark.parametrize("which", ["samples", "groups"])
async def test_cancelling_the_loop_leaves_nothing_in_flight(
    which: str, pool: PosterPool, shared: EngineUnderTest
) -> None:
    shared.faults("hang", times=None)
    client = made(pool, shared.url)

    async def loop() -> None:
        async for _ in getattr(client, which)(prompts("a", "b", "c")):
            raise AssertionError("a hung engine gave a sample")

    task = asyncio.create_task(loop())
    await until(lambda: shared.counts()["in_flight"] == CONCURRENCY, what="all places are taken")
    assert client.stats().in_flight == 9
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    stats = client.stats()
    assert (stats.asked, stats.in_flight, stats.completed, stats.failed) == (0, 0, 0, 0)
    await until(lambda: shared.counts()["in_flight"] == 0, what="the engine has been left alone")
    await until(lambda: pool.stats().occupied == 0, what="the places are free again")
    assert all(t.in_flight == 0 for t in client._router.targets)


async def test_what_was_left_can_be_asked_for_again(pool: PosterPool, shared: EngineUnderTest) -> None:
    """The ids of a run are the same each time: an id that was cancelled before must not be refused."""
    shared.faults("hang", times=None)
    client = made(pool, shared.url, run="the same")
    asked = asyncio.create_task(everything(client, prompts("a", "b")))
    await until(lambda: shared.counts()["in_flight"] == 6, what="all are under way")
    asked.cancel()
    await asyncio.wait({asked})
    await until(lambda: pool.stats().occupied == 0, what="all have stopped")
    shared.clear_faults()
    again = await everything(made(pool, shared.url, run="the same"), prompts("a", "b"))
    assert [one for one in again if isinstance(one, Failure)] == []


# ---- accounting


async def test_the_accounting_holds_at_every_instant(pool: PosterPool, engines: Engines) -> None:
    """Looked at on every turn of the loop, while engines answer 400, 500, 429 and abort."""
    for number in (0, 1):
        engines(number).faults("status", status=500, times=5)
        engines(number).faults("abort", times=5)
        engines(number).faults("status", status=400, times=3)
        engines(number).faults("status", status=429, headers={"Retry-After": "0.1"}, times=3)
    client = made(pool, engines(0).url, engines(1).url, n=4, max_attempts=12)
    looks = 0

    async def look() -> None:
        nonlocal looks
        while True:
            stats = client.stats()
            assert stats.asked == stats.completed + stats.failed + stats.in_flight
            assert stats.lost == 0
            assert sum(stats.failed_by_code.values()) == stats.failed
            looks += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(look())
    # Enough that neither engine has done all by the time that the other one's ejection is over.
    count = 60
    results = await everything(client, prompts(*(f"The harbour {n}" for n in range(count))))
    watching.cancel()
    await asyncio.wait({watching})
    assert watching.cancelled(), "no look found the sums wrong"
    assert looks > 20
    stats = client.stats()
    assert (stats.asked, stats.in_flight) == (4 * count, 0)
    assert keys(results) == [(f"p{p}", i) for p in sorted(range(count), key=str) for i in range(4)]
    assert stats.completed == sum(isinstance(one, Sample) for one in results)
    assert stats.failed_by_code == {"REQUEST.REJECTED": 6}
    assert stats.retried_by_code["UPSTREAM.ABORTED"] == 10
    assert stats.retried_by_code["BACKPRESSURE.RATE_LIMITED"] == 6
    sent = sum(one.attempts for one in results)
    assert sent == stats.asked + stats.retried


# ---- what kills


@pytest.mark.timeout(150)
async def test_a_prompt_that_kills_engine_after_engine_ends_as_poison(pool: PosterPool) -> None:
    """As with SGLang behind a router's retries, where one bad token id took down every worker."""
    async with Mortal() as one, Mortal() as other:
        # As many attempts, and as long, as engines need that start slowly: only deaths end the deadly one.
        options = {"n": 2, "max_attempts": 200, "backoff": Backoff(0.2, 0.5), "deadline": 100.0}
        client = made(pool, one.base, other.base, **options)
        results = await everything(client, prompts("harmless", DEADLY, "harmless too"))
        failures = [result for result in results if isinstance(result, Failure)]
        assert {(one.prompt_id, one.code) for one in failures} == {("p1", "REQUEST.POISON")}
        assert keys(results) == [(f"p{n}", index) for n in range(3) for index in range(2)]
        deaths = one.deaths + other.deaths
        assert deaths <= 2 * 3
