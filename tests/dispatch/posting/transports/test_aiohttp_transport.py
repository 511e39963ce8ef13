"""The transport over aiohttp: what its exceptions become, and what becomes of each connection."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.http import HttpProcessingError

from dispatch.posting.request import Item
from dispatch.posting.transports import transport
from dispatch.posting.transports.aiohttp_transport import AiohttpTransport, mapped
from dispatch.posting.transports.transport import Client, check_transport, exchange, make_client
from faults import classify
from faults.fault import Outcome
from protocol import CodedError
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


# ---- a server that answers what the test says


class Server:
    """Answers each request with ``reply``, bytes that may be given by the number of the request; the empty
    reply closes the connection at once, None never answers."""

    def __init__(self) -> None:
        self.reply: Callable[[int], bytes | None] = lambda _: ok(b"{}")
        self.close: Callable[[asyncio.StreamWriter], None] | None = None
        self.open: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.requests: list[int] = []
        self.heads: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self.open.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                self.requests.append(number)
                self.heads.append(head)
                reply = self.reply(len(self.requests))
                if reply is None:
                    await reader.read()
                    break
                writer.write(reply)
                if self.close is not None:
                    self.close(writer)
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()


def ok(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{more}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    async with await asyncio.start_server(one.serve, "127.0.0.1", 0) as running:
        one.url = f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}/"
        yield one


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with contextlib.aclosing(make_client(8)) as one:
        yield one


def item(url: str, body: bytes = b"{}", **headers: str) -> Item:
    return Item("r", 1, url, body, headers)


async def failure(client: Client, url: str, budget: float = 20.0, body: bytes = b"{}") -> CodedError:
    with pytest.raises(CodedError) as caught:
        await exchange(client, item(url, body), budget)
    return caught.value


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
    await until(lambda: not server.open, timeout=2)


async def test_a_reset_is_not_the_end_of_a_body_without_a_length(client: Client, server: Server) -> None:
    server.reply = lambda _: b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"whole": true}'
    server.close = lambda writer: writer.close()
    assert (await exchange(client, item(server.url), 20.0)).data == {"whole": True}

    def reset(writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SO_LINGER of 0 s: close() resets
        asyncio.get_running_loop().call_later(0.1, writer.transport.abort)

    server.close = reset
    assert (await failure(client, server.url)).code == "UPSTREAM.TRUNCATED"


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Type: x\r\n"]
)
async def test_a_head_that_is_cut(client: Client, server: Server, reply: bytes) -> None:
    server.reply = lambda _: reply
    server.close = lambda writer: writer.close()
    error = await failure(client, server.url)
    assert error.code == "TRANSPORT.DISCONNECTED"
    assert classify(error).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("body", [b"zz\r\nno size\r\n", b"5\r\n[1,2]\r\n"])
async def test_a_chunked_body_that_is_broken_or_cut(client: Client, server: Server, body: bytes) -> None:
    server.reply = lambda _: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    server.close = lambda writer: writer.close()
    assert (await failure(client, server.url)).code in ("UPSTREAM.TRUNCATED", "TRANSPORT.DISCONNECTED")


async def test_bytes_beyond_the_body_spoil_the_connection(client: Client, server: Server) -> None:
    server.reply = lambda _: ok(b"{}") + b"stray"
    for _ in range(2):
        with contextlib.suppress(CodedError):
            await exchange(client, item(server.url), 20.0)
    assert server.requests == [1, 2]


async def test_what_is_sent_is_what_the_request_says(client: Client, server: Server) -> None:
    await exchange(client, item(server.url + "a%2Fb/%7e?q=%20+", b'{"n": 1}', **{"x-a": "b"}), 20.0)
    line, *lines = server.heads[0].decode().split("\r\n")
    assert line == "POST /a%2Fb/%7e?q=%20+ HTTP/1.1"
    headers = dict(one.lower().split(": ", 1) for one in lines if one)
    assert len(headers) == len([one for one in lines if one])
    assert headers == {
        "host": server.url[7:-1],
        **transport.SENT,
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
        await until(lambda: sockets() <= before, timeout=5)


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
    monkeypatch.setattr(transport, "LEAK_LOOK", 0.0)
    monkeypatch.setattr(transport, "LEAK_BOUND", 0.3)
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
        await asyncio.sleep(0.4)
        monkeypatch.setattr(Leaky, "leaks", 1)
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


def test_reqwests_connect_phase_alone_says_never_sent() -> None:
    from pyreqwest import exceptions

    one = transport.ReqwestTransport(1)
    connect = {"causes": [{"message": "error sending request"}, {"message": "client error (Connect)"}]}
    sent = {"causes": [{"message": "error sending request"}, {"message": "client error (SendRequest)"}]}
    for kind in vars(exceptions).values():
        if not inspect.isclass(kind) or not issubclass(kind, exceptions.DetailedPyreqwestError):
            continue
        if issubclass(kind, exceptions.JSONDecodeError):  # ours is not the method that raises it
            continue
        never = issubclass(kind, exceptions.BuilderError)
        outcome = Outcome.NOT_RUN if never else Outcome.UNKNOWN
        assert classify(one.named(kind("text", sent))).outcome is outcome, kind  # type: ignore[arg-type]
        assert classify(one.named(kind("text", connect))).outcome is Outcome.NOT_RUN, kind  # type: ignore[arg-type]


async def test_a_get(client: Client, witness: Witness) -> None:
    reply = await client.get(witness.url("ok"), headers={}, timeout=20.0)
    assert reply.status_code == 405
    assert reply.content
