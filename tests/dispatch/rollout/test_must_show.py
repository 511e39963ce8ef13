"""What an engine does badly under HTTP 200 is never a sample, and what it refuses is asked for once.

Real engines on real sockets, each made to misbehave, asked through real posters.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from dispatch.engines.dialect import Api
from dispatch.posting import PosterPool
from dispatch.rollout import Failure, Prompt, RolloutClient, Router, Sample, Sampling
from faults import Backoff
from protocol import Events
from tests.dispatch.rollout.conftest import Engines

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Bad(NamedTuple):
    """A way to end a request under HTTP 200 that is no sample."""

    kind: str
    api: Api
    stream: bool
    code: str


BADS = [
    *(
        Bad("abort", api, stream, "UPSTREAM.ABORTED")
        for api in ("sglang", "openai")
        for stream in (False, True)
    ),  # type: ignore[arg-type]
    *(Bad("stream_error", api, True, "UPSTREAM.STREAM_ERROR") for api in ("sglang", "openai")),  # type: ignore[arg-type]
    *(Bad("stream_cut", api, True, "UPSTREAM.TRUNCATED") for api in ("sglang", "openai")),  # type: ignore[arg-type]
    *(Bad("cut_body", api, False, "UPSTREAM.TRUNCATED") for api in ("sglang", "openai")),  # type: ignore[arg-type]
]


def _name(bad: Bad) -> str:
    return f"{bad.kind}-{bad.api}-{'stream' if bad.stream else 'plain'}"


every_bad = pytest.mark.parametrize("bad", BADS, ids=_name)


def prompts(count: int, text: str = "The harbour") -> list[Prompt]:
    return [Prompt(f"{text[:3]}{n}", f"{text} {n}", None, {}) for n in range(count)]


def made(pool: PosterPool, *urls: str, **more: Any) -> RolloutClient:
    options = {
        "n": 2,
        "sampling": Sampling(16),
        "deadline": 30.0,
        "backoff": Backoff(0.01, 0.05),
        "run": secrets.token_hex(4),
        "model": "m" if more.get("api") == "openai" else "",
    }
    return RolloutClient(pool, Router.static(urls, Events()), **{**options, **more})


async def everything(client: RolloutClient, asked: Iterable[Prompt]) -> list[Sample | Failure]:
    return [one async for one in client.samples(asked)]


def arrived(*engines: Any) -> Counter[str]:
    """How often each id has come to any of the engines, which is their word and not ours."""
    return sum((Counter(engine.counts()["arrived"]) for engine in engines), Counter())


# ---- (5) a bad end under 200


@every_bad
async def test_one_of_two_engines_is_bad_for_ever(bad: Bad, pool: PosterPool, engines: Engines) -> None:
    """Every sample comes, and each from the other engine."""
    broken, whole = engines(0), engines(1)
    broken.faults(bad.kind, times=None)
    client = made(pool, broken.url, whole.url, api=bad.api, stream=bad.stream)
    results = await everything(client, prompts(5))
    assert len(results) == 10
    for one in results:
        assert isinstance(one, Sample), one
        assert one.engine == whole.url
        assert one.finish_reason in ("stop", "length")
    stats = client.stats()
    assert stats.retried_by_code.keys() == {bad.code}
    assert stats.retried_by_code[bad.code] >= 1
    assert (stats.completed, stats.failed) == (10, 0)


@every_bad
async def test_the_only_engine_is_bad_some_times(bad: Bad, pool: PosterPool, engines: Engines) -> None:
    """There is no other to go to, so it goes there again; each bad end costs exactly one retry."""
    engine = engines(0)
    engine.faults(bad.kind, times=4)
    client = made(pool, engine.url, api=bad.api, stream=bad.stream)
    before = arrived(engine)
    results = await everything(client, prompts(3))
    assert all(isinstance(one, Sample) for one in results)
    assert client.stats().retried_by_code == {bad.code: 4}
    assert sum(one.attempts for one in results) == 6 + 4
    assert (arrived(engine) - before) == {one.request_id: one.attempts for one in results}


@every_bad
async def test_every_engine_is_bad_for_ever(bad: Bad, pool: PosterPool, engines: Engines) -> None:
    """No sample, however often it is tried: a failure that keeps its name."""
    pair = engines(0), engines(1)
    for engine in pair:
        engine.faults(bad.kind, times=None)
    client = made(pool, *(e.url for e in pair), api=bad.api, stream=bad.stream, max_attempts=3)
    before = arrived(*pair)
    results = await everything(client, prompts(2))
    assert len(results) == 4
    for one in results:
        assert isinstance(one, Failure), one
        assert one.code == bad.code
        assert one.attempts == 3
    assert (arrived(*pair) - before) == {one.request_id: 3 for one in results}
    stats = client.stats()
    assert (stats.completed, stats.failed, stats.failed_by_code) == (0, 4, {bad.code: 4})
    assert stats.retried_by_code == {bad.code: 8}


# ---- (6) refused, and asked to wait


@pytest.mark.parametrize("api", ["sglang", "openai"])
async def test_a_refused_prompt_is_sent_once_a_sample(api: Api, pool: PosterPool, engines: Engines) -> None:
    """All engines answer 400 to one prompt: it is asked for once a sample at one of them, no engine is
    set aside for it, and everything else is done."""
    pair = engines(0), engines(1)
    for engine in pair:
        engine.faults("status", status=400, times=None, contains="Poisoned")
    client = made(pool, *(e.url for e in pair), n=4, api=api)
    before = arrived(*pair)
    asked = [*prompts(2), *prompts(1, "Poisoned"), *prompts(4, "Another one")]
    results = await everything(client, asked)
    refused = [one for one in results if isinstance(one, Failure)]
    assert {(f.prompt_id, f.code, f.attempts) for f in refused} == {("Poi0", "REQUEST.REJECTED", 1)}
    assert sorted(f.index for f in refused) == [0, 1, 2, 3]
    assert len(results) == 4 * len(asked)
    counted = arrived(*pair) - before
    assert {counted[f.request_id] for f in refused} == {1}
    assert counted == {one.request_id: 1 for one in results}
    stats = client.stats()
    assert (stats.completed, stats.failed, stats.retried) == (24, 4, 0)
    assert all(target.failures == 0 for target in client._router.targets)


@pytest.mark.parametrize("api", ["sglang", "openai"])
async def test_a_full_engine_is_waited_for(api: Api, pool: PosterPool, engines: Engines) -> None:
    """429 with Retry-After: nothing fails, nobody asks again sooner, the engine stays in use."""
    engine = engines(0)
    engine.faults("status", status=429, headers={"Retry-After": "1"}, times=2)
    client = made(pool, engine.url, api=api)
    results = await everything(client, prompts(3))
    assert all(isinstance(one, Sample) for one in results)
    assert client.stats().retried_by_code == {"BACKPRESSURE.RATE_LIMITED": 2}
    waited = [one for one in results if one.attempts > 1]
    assert waited
    assert all(one.seconds >= 1.0 * (one.attempts - 1) for one in waited)
    assert client._router.targets[0].failures == 0
