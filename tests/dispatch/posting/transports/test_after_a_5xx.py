"""No transport uses a connection again that has brought a 5xx: vLLM resets it at its next request."""

from __future__ import annotations

import asyncio

import pytest

from dispatch.posting.transports.client import Client
from dispatch.posting.transports.transport import exchange
from protocol import CodedError
from tests.dispatch.posting.transports.server import Server, item, ok
from tests.support.wait import until

ERROR = "500 Internal Server Error"
CHUNKED = f"HTTP/1.1 {ERROR}\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode()
FAILED = {
    "no body": ok(b"", ERROR),
    "short": ok(b"{}", ERROR),
    "long": ok(b"x" * 100_000, ERROR),
    "chunked": CHUNKED,
    "503": ok(b"{}", "503 Service Unavailable"),
}


async def said(client: Client, server: Server) -> int | str:
    """The status of an exchange, or the code of one that had none."""
    try:
        return (await exchange(client, item(server.url), 20.0)).status
    except CodedError as error:
        return error.data.get("status") or str(error.code)


@pytest.mark.parametrize("failed", FAILED.values(), ids=FAILED)
async def test_the_next_post_has_another_connection(client: Client, server: Server, failed: bytes) -> None:
    server.done_after_5xx = True
    server.reply = lambda number: failed if number % 2 else ok(b"{}")
    status = int(failed[9:12])
    assert [await said(client, server) for _ in range(20)] == [status, 200] * 10
    brought, following = server.requests[::2], server.requests[1::2]
    assert all(after != before for before, after in zip(brought, following, strict=True))
    await until(lambda: len(server.open) <= 1, what="the connections that brought a 5xx are closed")


async def test_nor_has_one_of_many_at_once(client: Client, server: Server) -> None:
    server.done_after_5xx = True
    await asyncio.gather(*(said(client, server) for _ in range(8)))  # the connections are there
    server.reply = lambda number: ok(b"{}", ERROR) if number % 5 == 4 else ok(b"{}")
    assert await said(client, server) == 500  # seen before the next goes out, which reqwest needs

    async def work() -> list[int | str]:
        return [await said(client, server) for _ in range(25)]

    statuses = [one for part in await asyncio.gather(*(work() for _ in range(8))) for one in part]
    assert set(statuses) == {200, 500}
    assert statuses.count(500) == 40


async def test_the_connections_of_good_replies_are_kept(client: Client, server: Server) -> None:
    server.reply = lambda number: ok(b"no", "429 Too Many Requests") if number % 2 else ok(b"{}")
    assert [await said(client, server) for _ in range(6)] == [429, 200] * 3
    assert server.connections == 1
