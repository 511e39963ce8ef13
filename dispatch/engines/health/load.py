"""Load: how much an engine has under way and whether it moves, from its own counters.

Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/) under ``metrics_path``. What is
read of it is what moves with each step of a generation, not what is counted when a request ends:
llama.cpp's ``tokens_predicted_total`` and SGLang's ``generation_tokens_total`` stand still for as long as one
long request runs. A count of 0 under way proves nothing: vLLM's API server repeats what a frozen EngineCore
said last.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dispatch.engines.spec import EngineSpec

_STEPS: Final = frozenset({
    "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    "sglang:realtime_tokens_total",
    "llamacpp:n_decode_total", "llamacpp:prompt_tokens_total",
    "failsoft:generation_tokens_total",
})  # fmt: skip
_UNDER_WAY: Final = frozenset({
    "vllm:num_requests_running", "vllm:num_requests_waiting",
    "sglang:num_running_reqs", "sglang:num_queue_reqs",
    "llamacpp:requests_processing", "llamacpp:requests_deferred",
    "failsoft:num_requests_running", "failsoft:num_requests_waiting",
})  # fmt: skip
_MOST: Final = 4 * 1024 * 1024
"""Bytes of metrics that are read; vLLM's are about 100 kB."""


@dataclass(frozen=True, slots=True)
class Load:
    """``steps`` only ever grows while the engine generates; ``under_way`` is how many requests it has,
    running or queued. Each None where the engine does not say."""

    steps: float | None = None
    under_way: int | None = None

    def moved_since(self, before: Load) -> bool:
        """Whether it has generated anything in between."""
        return self.steps is not None and before.steps is not None and self.steps > before.steps


async def read_load(client: httpx.AsyncClient, spec: EngineSpec, url: str, timeout: float) -> Load:
    """What the engine at ``url`` says of itself, within ``timeout`` seconds; nothing where it has no such
    page, does not answer, or answers with something else. Never raises for the engine's doing: whether it
    is healthy is asked elsewhere."""
    if not spec.metrics_path:
        return Load()
    try:
        async with asyncio.timeout(timeout):
            text = await _page(client, url + spec.metrics_path)
        return _parsed(text)
    except (TimeoutError, httpx.HTTPError, ValueError, OverflowError):  # the last: a count of +Inf
        return Load()


async def _page(client: httpx.AsyncClient, url: str) -> str:
    async with client.stream("GET", url) as reply:
        if reply.status_code != 200:
            raise ValueError(f"{url} answered {reply.status_code}")
        read = bytearray()
        async for chunk in reply.aiter_bytes():
            read += chunk
            if len(read) > _MOST:
                raise ValueError(f"{url} is longer than {_MOST} bytes")
    return read.decode("utf-8", "replace")


def _parsed(text: str) -> Load:
    steps: float | None = None
    under_way: float | None = None
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _STEPS:
                steps = (steps or 0.0) + sample.value
            elif sample.name in _UNDER_WAY:
                under_way = (under_way or 0.0) + sample.value
    return Load(steps, None if under_way is None else round(under_way))
