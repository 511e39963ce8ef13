from __future__ import annotations

import httpx
import pytest

from dispatch.engines import EngineSpec
from dispatch.engines.health.load import Load, read_load


@pytest.mark.parametrize("page", ["<html>", "vllm:num_requests_running", "\xff"])
@pytest.mark.parametrize("count", ["+Inf", "NaN", "-"])
async def test_a_page_that_says_nothing(page: str, count: str) -> None:
    """Whatever it is, it must not end the checks: an engine that nobody checks is replaced."""
    reply = httpx.MockTransport(lambda request: httpx.Response(200, text=f"{page} {count}\n"))
    async with httpx.AsyncClient(transport=reply) as client:
        spec = EngineSpec(command=("serve", "{port}"))
        assert await read_load(client, spec, "http://engine", 5.0) == Load()
