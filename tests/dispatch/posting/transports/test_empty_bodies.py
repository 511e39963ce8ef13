"""A 2xx without a body: None where its framing says so, a failure where it may have been cut."""

from __future__ import annotations

import gzip

import httpx
import pytest

from dispatch.engines.dialect import Api, read
from dispatch.posting.transports.client import Client, make_client
from dispatch.posting.transports.transport import exchange
from protocol import CodedError
from tests.dispatch.posting.transports.server import Server, failure, hang_up, item, ok

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "length, json": JSON + b"Content-Length: 0\r\n\r\n",
    "202": b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n",
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "chunked": JSON + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, trailer": b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n0\r\nA: b\r\n\r\n",
}
CUT = {
    "no framing": (JSON + b"\r\n", "UPSTREAM.BAD_BODY"),
    "no framing, to be closed": (JSON + b"Connection: close\r\n\r\n", "UPSTREAM.BAD_BODY"),
    "length": (JSON + b"Content-Length: 2\r\n\r\n", "UPSTREAM.TRUNCATED"),
    "chunked": (JSON + b"Transfer-Encoding: chunked\r\n\r\n", "UPSTREAM.TRUNCATED"),
    "chunked, in the size": (JSON + b"Transfer-Encoding: chunked\r\n\r\n0", "UPSTREAM.TRUNCATED"),
    "event stream": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n",
        "UPSTREAM.TRUNCATED",
    ),
}


@pytest.mark.parametrize("reply", WHOLE.values(), ids=WHOLE)
async def test_a_reply_that_says_it_is_empty_holds_none(client: Client, server: Server, reply: bytes) -> None:
    server.reply = lambda _: reply
    for _ in range(3):
        answer = await exchange(client, item(server.url), 20.0)
        assert answer.data is None
        assert 200 <= answer.status < 300
    assert server.requests == [1, 1, 1]  # which it could not be after a body without an end


@pytest.mark.parametrize(("reply", "code"), CUT.values(), ids=CUT)
async def test_a_reply_that_may_have_been_cut_is_a_failure(
    client: Client, server: Server, reply: bytes, code: str
) -> None:
    server.reply = lambda _: reply
    server.close = hang_up
    assert (await failure(client, server.url)).code == code


@pytest.mark.parametrize("packed", [gzip.compress(b""), gzip.compress(b"{}")[:10]], ids=["empty", "cut"])
async def test_what_is_decoded_to_nothing_does_not_say_it_is_empty(
    client: Client, server: Server, packed: bytes
) -> None:
    server.reply = lambda _: ok(packed, more="Content-Encoding: gzip\r\n")
    assert (await failure(client, server.url)).code == "UPSTREAM.BAD_BODY"


async def test_white_space_is_a_body(client: Client, server: Server) -> None:
    server.reply = lambda _: ok(b"\n")
    assert (await failure(client, server.url)).code == "UPSTREAM.BAD_BODY"


async def test_http_2_marks_the_end_itself() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        version = request.url.path[1:].encode()
        return httpx.Response(200, stream=httpx.ByteStream(b""), extensions={"http_version": version})

    client = make_client(1, lambda _: httpx.MockTransport(reply))
    for version in ("HTTP/2", "HTTP/2.0"):
        assert (await exchange(client, item(f"http://h/{version}"), 20.0)).data is None
    assert (await failure(client, "http://h/HTTP/1.0")).code == "UPSTREAM.BAD_BODY"


@pytest.mark.parametrize("api", ["sglang", "openai"])
async def test_none_is_no_generation(client: Client, server: Server, api: Api) -> None:
    server.reply = lambda _: ok(b"")
    answer = await exchange(client, item(server.url), 20.0)
    with pytest.raises(CodedError) as caught:
        read(api, answer.data, server.url)
    assert caught.value.code == "UPSTREAM.BAD_BODY"
    assert server.url in caught.value.detail
