"""What the tests of all transports share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from dispatch.posting.transports.client import Client, Name, make_client
from tests.dispatch.posting.transports.server import Server


@pytest.fixture(params=["aiohttp", "httpx", "reqwest"])
def name(request: pytest.FixtureRequest) -> Name:
    return request.param


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    async with await asyncio.start_server(one.serve, "127.0.0.1", 0) as running:
        one.url = f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}/"
        yield one


@pytest.fixture
async def client(name: Name) -> AsyncIterator[Client]:
    async with contextlib.aclosing(make_client(8, name)) as one:
        yield one
