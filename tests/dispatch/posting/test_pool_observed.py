"""What can be seen of a pool from outside: spans, metrics, and a log that people can read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import pytest
import ray
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dispatch.posting import PosterPool, pool
from dispatch.posting.observe.metrics import Instrument, Metrics
from dispatch.posting.observe.tracing import Tracing
from dispatch.posting.posters import lane
from protocol import CodedError
from tests.support.fixtures import KEEP_TRYING, QUICK, MakePool
from tests.support.wait import until
from tests.support.witness import Witness

pytestmark = pytest.mark.timeout(120)


async def test_a_span_for_each_post(make_pool: MakePool, witness: Witness) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with make_pool(tracing=Tracing(provider.get_tracer("test"))) as pool:
        await pool.post(witness.url("ok", "token=secret"), {"prompt": "private"})
        with pytest.raises(CodedError):
            await pool.post(witness.url("status", "status=404"), {})
        gone = asyncio.create_task(pool.post(witness.url("hang"), {}, request_id="gone"))
        await until(lambda: witness.arrivals("gone") == 1)
        gone.cancel()
        await asyncio.wait({gone})
    spans = exporter.get_finished_spans()
    assert [dict(span.attributes or {}) for span in spans] == [
        {
            "url.full": f"{witness.base}/ok",
            "failsoft.attempts": 1,
            "http.response.status_code": 200,
        },
        {
            "url.full": f"{witness.base}/status",
            "failsoft.attempts": 1,
            "http.response.status_code": 404,
            "failsoft.code": "REQUEST.NOT_FOUND",
        },
        {"url.full": f"{witness.base}/hang", "failsoft.attempts": 1, "failsoft.code": "CANCEL.CALLER"},
    ]


Told = Counter[tuple[str, tuple[tuple[str, str], ...]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What pools publish, as Prometheus would show it: by name and labels."""
    told: Told = Counter()

    def record(instrument: Instrument) -> Any:
        def add(value: float, tags: dict[str, str]) -> None:
            key = instrument.name, tuple(sorted(tags.items()))
            told[key] = told[key] + value if instrument.kind == "counter" else value  # type: ignore[assignment]

        return add

    monkeypatch.setattr(pool, "Metrics", lambda: Metrics(make=record))
    monkeypatch.setattr(pool, "PUBLISH", 0.05)
    return told


async def test_metrics_are_published_while_it_runs_and_at_its_end(
    make_pool: MakePool, witness: Witness, told: Told
) -> None:
    posts = ("failsoft_pool_posts_total", (("code", ""), ("outcome", "succeeded"), ("pool", "pool")))
    serving = ("failsoft_pool_posters", (("pool", "pool"), ("state", "serving")))
    async with make_pool() as one:
        await one.post(witness.url("ok"), {})
        await until(lambda: told[posts] == 1 and told[serving] == 1)
        await one.post(witness.url("ok"), {})
    assert told[posts] == 2
    assert told[serving] == 0


async def test_two_pools_of_a_process_do_not_overwrite_each_other(
    make_pool: MakePool, witness: Witness, told: Told
) -> None:
    def in_flight(label: str) -> int:
        return told["failsoft_pool_in_flight", (("pool", label),)]

    async with make_pool() as first:
        hanging = asyncio.create_task(first.post(witness.url("hang"), {}))
        for _ in range(2):  # the second label is free again once its pool is closed
            async with make_pool():
                waiting = ("failsoft_pool_waiting", (("pool", "pool-2"),))
                del told[waiting]
                await until(lambda key=waiting: key in told)
                assert (in_flight("pool"), in_flight("pool-2")) == (1, 0)
        hanging.cancel()
        await asyncio.wait({hanging})
    assert {dict(labels)["pool"] for _, labels in told} == {"pool", "pool-2"}


async def test_without_a_sink_of_its_own_the_log_tells_a_thousand_alike_once(
    ray_local: None, witness: Witness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "failsoft"):
        async with PosterPool(32, 1, 30.0, health=QUICK, recreation=KEEP_TRYING) as one:
            bad = [one.post(witness.url("status", "status=400"), {}) for _ in range(300)]
            await asyncio.gather(*bad, return_exceptions=True)
    told = [json.loads(record.getMessage()) for record in caplog.records if record.name == "failsoft"]
    named = Counter(event["event"] for event in told)
    assert named["post.failed"] == 20
    assert sum(e["data"]["dropped"] for e in told if e["event"] == "events.dropped") == 280


async def test_large_payloads_go_by_reference_call_by_call(
    make_pool: MakePool, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[int] = []
    put = ray.put

    def counted(value: Any) -> Any:
        puts.append(len(value))
        return put(value)

    monkeypatch.setattr(lane.ray, "put", counted)
    async with make_pool(64) as one:
        await asyncio.gather(*(one.post(witness.url("ok"), {"text": "x" * 10_000}) for _ in range(64)))
        assert 1 <= len(puts) <= 16, "64 POSTs that are ready together travel in a few messages"
        assert sum(puts) >= 64 * 10_000
        before = len(puts)
        reply = await one.post(witness.url("ok"), {"text": "x" * 3_000_000})
        assert reply.data["bytes"] > 3_000_000
        assert len(puts) == before + 1
        await one.post(witness.url("ok"), {"text": "x" * 1000})
        assert len(puts) == before + 1
