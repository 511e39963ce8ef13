"""The client: what it sends, what it does about leaks, and which transport it is over."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from dispatch.posting.transports import client as module
from dispatch.posting.transports.aiohttp_transport import AiohttpTransport
from dispatch.posting.transports.client import SENT, Client, check_transport, make_client
from dispatch.posting.transports.transport import exchange
from faults import classify
from faults.fault import Outcome
from protocol import CodedError
from tests.dispatch.posting.transports.server import Server, failure, item, ok
from tests.support.wait import until
from tests.support.witness import Witness


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with contextlib.aclosing(make_client(8)) as one:
        yield one


# ---- what is sent


async def test_what_is_sent_is_what_the_request_says(client: Client, server: Server) -> None:
    await exchange(client, item(server.url + "a%2Fb/%7e?q=%20+", b'{"n": 1}', **{"x-a": "b"}), 20.0)
    line, *lines = server.heads[0].decode().split("\r\n")
    assert line == "POST /a%2Fb/%7e?q=%20+ HTTP/1.1"
    headers = dict(one.lower().split(": ", 1) for one in lines if one)
    assert len(headers) == len([one for one in lines if one])
    assert headers == {
        "host": server.url[7:-1],
        **SENT,
        "x-a": "b",
        "x-request-id": "r",
        "content-length": "8",
    }


async def test_the_urls_user_is_sent_as_authorization(client: Client, server: Server) -> None:
    await exchange(client, item(server.url.replace("//", "//user:p%40ss@")), 20.0)
    assert b"basic dXNlcjpwQHNz".lower() in server.heads[0].lower()


async def test_cookies_are_not_kept(client: Client, server: Server) -> None:
    server.reply = lambda _: ok(b"{}", more="Set-Cookie: a=b\r\n")
    for _ in range(2):
        await exchange(client, item(server.url), 20.0)
    assert b"cookie" not in server.heads[1].lower()


async def test_a_host_that_cannot_be_resolved_is_the_requests_fault(client: Client) -> None:
    assert (await failure(client, f"http://{'x' * 70}.example/")).code == "REQUEST.INVALID"


# ---- a client that leaks


class Leaky(AiohttpTransport):
    """Says that it lost connections."""

    leaks = 0

    def lost(self, exchanges: int) -> int:
        return self.leaks


async def test_connections_that_belong_to_nothing_are_counted(client: Client, server: Server) -> None:
    server.reply = lambda number: None if number > 1 else ok(b"{}")
    await exchange(client, item(server.url), 20.0)
    assert client.leaked == 0  # kept for the next
    task = asyncio.create_task(exchange(client, item(server.url), 20.0))
    await until(lambda: len(server.requests) == 2)
    assert client.leaked == 0  # the exchange's own
    one = client._line.transport
    assert isinstance(one, AiohttpTransport)
    assert one.lost(0) == 1  # as it would be, were there no exchange
    task.cancel()
    await asyncio.wait({task})
    assert one.lost(0) == 0


async def test_an_idle_connection_that_was_forgotten_is_counted(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await exchange(client, item(server.url), 20.0)
    monkeypatch.setattr("dispatch.posting.transports.aiohttp_transport.FORGOTTEN", -1.0)
    assert client.leaked == 1


async def test_a_transport_that_leaks_is_replaced(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAK_LOOK", 0.0)
    monkeypatch.setattr(module, "LEAK_BOUND", 1000.0)
    monkeypatch.setattr(Leaky, "leaks", 1)
    made: list[Leaky] = []

    def make(connections: int) -> httpx.AsyncBaseTransport:
        made.append(Leaky())
        return made[-1]

    async with contextlib.aclosing(make_client(8, make)) as client:
        await exchange(client, item(server.url), 20.0)
        server.reply = lambda number: None if number == 2 else ok(b"{}")
        hanging = asyncio.create_task(exchange(client, item(server.url), 20.0))
        await until(lambda: len(server.requests) == 2)
        assert client.rebuilt == 0
        monkeypatch.setattr(module, "LEAK_BOUND", 0.0)  # as if so long had passed
        await exchange(client, item(server.url), 20.0)
        assert client.rebuilt == 1
        assert len(made) == 2
        assert not made[0]._session.closed  # type: ignore[union-attr]  # an exchange is still open on it
        hanging.cancel()
        await asyncio.wait({hanging})
        assert made[0]._session.closed  # type: ignore[union-attr]
        monkeypatch.setattr(Leaky, "leaks", 0)
        await exchange(client, item(server.url), 20.0)
        assert client.rebuilt == 1
    await until(lambda: not server.open)


async def test_a_pool_timeout_replaces_the_transport(server: Server) -> None:
    class Full(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.PoolTimeout("full")

    transports: list[httpx.AsyncBaseTransport] = [Full(), AiohttpTransport()]
    async with contextlib.aclosing(make_client(8, lambda connections: transports.pop(0))) as client:
        error = await failure(client, server.url)
        assert error.code == "TIMEOUT.POOL"
        assert classify(error).outcome is Outcome.NOT_RUN
        await exchange(client, item(server.url), 20.0)
        assert client.rebuilt == 1


# ---- the choice


async def test_a_factory_gets_the_number_of_connections() -> None:
    seen: list[int] = []

    def make(connections: int) -> httpx.AsyncBaseTransport:
        seen.append(connections)
        return httpx.MockTransport(lambda request: httpx.Response(200, json={"n": 1}))

    async with contextlib.aclosing(make_client(7, make)) as client:
        assert (await exchange(client, item("http://h/"), 20.0)).data == {"n": 1}
    assert seen == [7]


@pytest.mark.parametrize("value", ["curl", "", "AIOHTTP", 5, None])
def test_what_is_no_transport_is_refused(value: Any) -> None:
    with pytest.raises(CodedError) as caught:
        check_transport(value)
    assert caught.value.code == "CONFIG.INVALID"
    if isinstance(value, str):
        assert all(repr(name) in caught.value.detail for name in ("aiohttp", "httpx", "reqwest"))


def test_without_its_package_reqwest_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_transport("reqwest") == "reqwest"
    monkeypatch.setitem(sys.modules, "pyreqwest", None)
    with pytest.raises(CodedError) as caught:
        check_transport("reqwest")
    assert caught.value.code == "CONFIG.INVALID"
    assert "pip install 'failsoft[reqwest]'" in caught.value.detail


async def test_a_get(client: Client, witness: Witness) -> None:
    reply = await client.get(witness.url("ok"), headers={}, timeout=20.0)
    assert reply.status_code == 405
    assert reply.content
