"""The transport over aiohttp: what its exceptions become, and what becomes of each connection."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.http import HttpProcessingError

from dispatch.posting.transports.aiohttp_transport import mapped
from dispatch.posting.transports.client import Client, make_client
from dispatch.posting.transports.transport import exchange
from faults import classify
from faults.fault import Outcome
from protocol import CodedError
from tests.dispatch.posting.transports.server import Server, failure, hang_up, item, ok, reset
from tests.support.wait import until
from tests.support.witness import Witness

KEY = ConnectionKey("h", 80, False, True, None, None, None)
INFO: Any = aiohttp.RequestInfo(
    aiohttp.typedefs.URL("http://h/"), "POST", {}, aiohttp.typedefs.URL("http://h/")
)  # type: ignore[arg-type]

# ---- exceptions


def made(kind: type[BaseException]) -> BaseException:
    """An exception of ``kind``, whatever its constructor asks for."""
    if issubclass(kind, aiohttp.ClientResponseError):
        return kind(INFO, ())
    if issubclass(kind, aiohttp.ServerFingerprintMismatch):
        return kind(b"a", b"b", "h", 80)
    if kind is aiohttp.client_exceptions.UnixClientConnectorError:
        return kind("/s", KEY, OSError(111, "refused"))
    if issubclass(kind, aiohttp.ClientConnectorError):
        return kind(KEY, OSError(111, "refused"))
    return kind("text")


EXPORTED = sorted(
    {
        one
        for module in (aiohttp, aiohttp.client_exceptions)
        for one in vars(module).values()
        if inspect.isclass(one)
        and issubclass(one, BaseException)
        and one.__module__.startswith("aiohttp.client")
    },
    key=lambda kind: kind.__name__,
)
NEVER_SENT = {
    "ClientConnectorError",
    "ClientConnectorDNSError",
    "ClientConnectorSSLError",
    "ClientConnectorCertificateError",
    "ClientSSLError",
    "UnixClientConnectorError",
    "ClientProxyConnectionError",
    "ClientHttpProxyError",
    "ConnectionTimeoutError",
    "ServerFingerprintMismatch",
    "InvalidURL",
    "InvalidUrlClientError",
    "NonHttpUrlClientError",
}


def test_there_are_exceptions_to_map() -> None:
    assert len(EXPORTED) > 25
    assert {kind.__name__ for kind in EXPORTED} >= NEVER_SENT


@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
def test_each_of_aiohttps_exceptions_has_its_httpx_one(kind: type[BaseException]) -> None:
    one = mapped(made(kind))
    assert type(one).__module__ == "httpx"
    fault = classify(one)
    never_sent = kind.__name__ in NEVER_SENT
    assert fault.outcome is (Outcome.NOT_RUN if never_sent else Outcome.UNKNOWN), (type(one), fault.code)
    assert fault.code.family in ("TRANSPORT", "TIMEOUT", "REQUEST")
    if isinstance(one, httpx.ConnectTimeout | httpx.ConnectError | httpx.PoolTimeout):
        assert never_sent


@pytest.mark.parametrize("exc", [TimeoutError(), OSError(104, "reset"), HttpProcessingError(message="bad")])
def test_what_is_not_aiohttps_own_may_have_run(exc: Exception) -> None:
    assert classify(mapped(exc)).outcome is Outcome.UNKNOWN


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with contextlib.aclosing(make_client(8)) as one:
        yield one


# ---- what becomes of a connection


async def test_a_good_replys_connection_is_used_again(client: Client, server: Server) -> None:
    for _ in range(5):
        await exchange(client, item(server.url), 20.0)
    assert server.requests == [1] * 5


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable"])
@pytest.mark.parametrize("body", [b"{}", b"x" * 3000, b"x" * 100_000])
async def test_a_5xx_replys_connection_is_not(
    client: Client, server: Server, status: str, body: bytes
) -> None:
    server.reply = lambda _: ok(body, status)
    for _ in range(3):
        await failure(client, server.url)
    assert server.requests == [1, 2, 3]
    await until(lambda: not server.open)


async def test_a_4xx_replys_connection_is_used_again(client: Client, server: Server) -> None:
    server.reply = lambda _: ok(b"no", "422 Unprocessable Entity")
    for _ in range(3):
        await failure(client, server.url)
    assert server.requests == [1, 1, 1]


async def test_a_reply_that_is_not_read_to_its_end_closes_its_connection(
    client: Client, server: Server
) -> None:
    server.reply = lambda _: ok(b"x" * 5_000_000, "400 Bad Request")
    for _ in range(3):
        await failure(client, server.url)
    assert server.requests == [1, 2, 3]
    await until(lambda: not server.open)


async def test_an_idle_connection_is_closed_after_keepalive(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.posting.transports.aiohttp_transport.KEEPALIVE", 0.2)
    await exchange(client, item(server.url), 20.0)
    await asyncio.sleep(0.3)
    await exchange(client, item(server.url), 20.0)
    assert server.requests == [1, 2]
    await until(lambda: not server.open, timeout=10)


async def test_a_reset_is_not_the_end_of_a_body_without_a_length(client: Client, server: Server) -> None:
    server.reply = lambda _: b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"whole": true}'
    server.close = hang_up
    assert (await exchange(client, item(server.url), 20.0)).data == {"whole": True}

    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        reset(writer)

    server.close = late
    assert (await failure(client, server.url)).code == "UPSTREAM.TRUNCATED"


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Type: x\r\n"]
)
async def test_a_head_that_is_cut(client: Client, server: Server, reply: bytes) -> None:
    server.reply = lambda _: reply
    server.close = hang_up
    error = await failure(client, server.url)
    assert error.code == "TRANSPORT.DISCONNECTED"
    assert classify(error).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("body", [b"zz\r\nno size\r\n", b"5\r\n[1,2]\r\n"])
async def test_a_chunked_body_that_is_broken_or_cut(client: Client, server: Server, body: bytes) -> None:
    server.reply = lambda _: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    server.close = hang_up
    assert (await failure(client, server.url)).code in ("UPSTREAM.TRUNCATED", "TRANSPORT.DISCONNECTED")


async def test_bytes_beyond_the_body_spoil_the_connection(client: Client, server: Server) -> None:
    server.reply = lambda _: ok(b"{}") + b"stray"
    for _ in range(2):
        with contextlib.suppress(CodedError):
            await exchange(client, item(server.url), 20.0)
    assert server.requests == [1, 2]


# ---- cancellation


def sockets() -> int:
    """How many sockets this process has open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="counts sockets in /proc")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("again", [1, 5])
async def test_however_often_it_is_cancelled_no_connection_stays(
    client: Client, witness: Witness, host: str, again: int
) -> None:
    # localhost has two addresses, of which one refuses: aiohttp tries both.
    chance = random.Random(17)
    url = witness.url("slow", "every=0.001").replace("127.0.0.1", host)
    await failure(client, url, 0.2)
    before = sockets()
    for _ in range(150):
        task = asyncio.create_task(exchange(client, item(url), 50.0))
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.001, 0.003)))
        for _ in range(again):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
    await until(lambda: sockets() <= before, what="no socket is left over")
    await until(lambda: witness.counts()["connections"] == 0)
    assert client.leaked == 0


async def test_a_request_that_the_server_never_reads_leaves_no_connection(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody reads
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        before = sockets()
        assert (await failure(client, url, 0.5, b'"' + b"x" * 40_000_000 + b'"')).code == "TIMEOUT.DEADLINE"
        await until(lambda: sockets() <= before)
