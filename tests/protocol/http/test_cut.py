"""Bodies that end anywhere, never end, or are far larger than what is read of them."""

from __future__ import annotations

import asyncio
import gzip
import os
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
import requests

from protocol import CodedError, Reading
from protocol.carriers.http_problem import problem
from protocol.carriers.http_reply import HEADER, PROBLEM, read_reply
from protocol.carriers.http_stream import BUDGET, decoded, read_stream, read_stream_sync
from tests.protocol.http.clients import BROKEN, CLIENTS, Seen, ask, stream
from tests.protocol.http.servers import Wire, chunked, plain

INNER = CodedError("NODE.IO", "what it quotes")
ERROR = CodedError("WEIGHTS.REFIT_ABORTED", f"quotes {INNER} and goes on", {"quoted": str(INNER)})
MADE = problem(ERROR)
TOKEN = MADE.headers[HEADER]
WITH_HEADER = {"content_type": PROBLEM, HEADER.replace("-", "_"): TOKEN}
WITHOUT = {"content_type": PROBLEM}


def test_every_prefix_of_a_document_is_the_same_failure_or_none() -> None:
    for media in (PROBLEM, "application/json", "text/plain"):
        whole = 0
        for end in range(len(MADE.body) + 1):
            found = read_reply(500, {"content-type": media}, MADE.body[:end])
            assert found.code in (None, ERROR.code)
            assert found.id in ("", ERROR.id)
            whole += found.code is not None
            named = read_reply(500, {"content-type": media, HEADER: TOKEN}, MADE.body[:end])
            assert (named.code, named.id) == (ERROR.code, ERROR.id)
        assert whole > len(ERROR.detail)  # the name stands before the text, so most cuts spare it


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_every_prefix_of_a_compressed_document(compress: Any) -> None:
    body = compress(MADE.body)
    encoding = "gzip" if compress is gzip.compress else "deflate"
    for end in range(len(body) + 1):
        found = read_reply(500, {"content-type": PROBLEM}, decoded(body[:end], encoding, BUDGET))
        assert found.code in (None, ERROR.code)
        for wrong in (body[:end] + b"\x00" * 8, b"\x1f\x8b" + body[:end]):
            assert read_reply(500, {"content-type": PROBLEM}, decoded(wrong, encoding, BUDGET)).code in (
                None,
                ERROR.code,
            )


def cuts(body: bytes, reply: bytes) -> range:
    """Where ``reply`` is cut: at each byte after its head."""
    return range(reply.index(b"\r\n\r\n") + 4, len(reply))


REPLIES = {
    "a length not reached": plain(MADE.body, **WITHOUT),
    "a length not reached, with the header": plain(MADE.body, **WITH_HEADER),
    "chunked": chunked(MADE.body, size=50, **WITHOUT),
    "gzip": plain(gzip.compress(MADE.body), content_encoding="gzip", **WITHOUT),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", REPLIES)
async def test_a_reply_cut_at_any_byte(kind: str, client: str) -> None:
    reply = REPLIES[kind]
    named = "header" in kind
    seen: set[str | None] = set()
    with Wire(lambda path, head: [reply[: int(path[1:])]]) as wire:
        for end in cuts(MADE.body, reply):
            found = (await stream(client, f"{wire.url}/{end}")).reading
            assert found.code in ({ERROR.code} if named else {None, ERROR.code}), end
            assert found.id == (ERROR.id if found.code else "")
            seen.add(found.code)
    assert seen == ({ERROR.code} if named else {None, ERROR.code})


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_that_insists_on_the_whole_body_has_a_failure_of_its_own(client: str) -> None:
    reply = REPLIES["a length not reached, with the header"]
    with Wire(lambda path, head: [reply[:-1]]) as wire, pytest.raises(BROKEN):
        await ask(client, wire.url)


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_length_that_is_too_short_cuts_as_well(client: str) -> None:
    with Wire(lambda path, head: [plain(MADE.body, length=int(path[1:]), **WITHOUT)]) as wire:
        for length in range(0, len(MADE.body), 7):
            for asked in (ask, stream):
                try:
                    found = (await asked(client, f"{wire.url}/{length}")).reading
                except aiohttp.ClientResponseError:  # aiohttp takes the rest for a second reply's head
                    assert client == "aiohttp"
                else:
                    assert found.code in (None, ERROR.code)


MB = 1 << 20
HEAD = b"HTTP/1.1 500 x\r\nContent-Type: text/plain\r\n"
BLOCK = os.urandom(MB // 16)


def large(path: str, head: bytes) -> Iterator[bytes]:
    """100 MB with a length, or no end at all; the failure's token at its start."""
    if path == "/endless":
        yield HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        yield b"%x\r\n%s\r\n" % (len(TOKEN) + 1, TOKEN.encode() + b" ")
        while True:
            yield b"%x\r\n%s\r\n" % (len(BLOCK), BLOCK)
    yield HEAD + b"Content-Length: %d\r\n\r\n%s " % (100 * MB, TOKEN.encode())
    for _ in range(1600):
        yield BLOCK


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("path", ["/hundred", "/endless"])
async def test_no_more_than_the_budget_is_read(path: str, client: str) -> None:
    with Wire(large) as wire:
        before = psutil.Process().memory_info().rss
        tracemalloc.start()
        try:
            found = (await stream(client, wire.url + path)).reading
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        grown = psutil.Process().memory_info().rss - before
        assert await asyncio.to_thread(wire.idle.wait, 20), "the connection was not closed"
    assert found.code == ERROR.code
    # Two socket buffers of loopback hold a few MB that nobody ever read.
    assert wire.sent < 25 * MB
    assert peak < 8 * MB
    assert grown < 50 * MB


@pytest.mark.parametrize("client", ["httpx", "requests"])
async def test_the_whole_would_have_been_read_otherwise(client: str) -> None:
    """What the test above would see without a budget."""
    with Wire(large) as wire:
        tracemalloc.start()
        try:
            await ask(client, f"{wire.url}/hundred")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert wire.sent > 100 * MB
    assert peak > 90 * MB


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_bomb_is_decoded_within_the_budget(encoding: str, client: str) -> None:
    text = TOKEN.encode() + b" " + b"x" * (200 * MB)
    body = gzip.compress(text, 9) if encoding == "gzip" else zlib.compress(text, 9)
    assert len(body) < MB
    del text
    with Wire(lambda path, head: [plain(body, content_type="text/plain", content_encoding=encoding)]) as wire:
        tracemalloc.start()
        try:
            found = (await stream(client, wire.url)).reading
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert found.code == ERROR.code
    assert peak < 16 * MB


@pytest.mark.parametrize("client", ["httpx async", "aiohttp", "httpx", "requests"])
async def test_a_body_that_stops_coming_is_waited_for_so_long(client: str) -> None:
    """One chunk, then silence, or a byte now and then: what had come is read, and the connection closed."""
    asleep = asyncio.Event()
    loop = asyncio.get_running_loop()

    def drip(path: str, head: bytes) -> Iterator[bytes]:
        yield plain(TOKEN.encode() + b" ", length=10_000)
        loop.call_soon_threadsafe(asleep.set)
        while True:
            time.sleep(0.05)
            yield b"x"

    with Wire(drip) as wire:
        begun = time.monotonic()
        found = (await stream(client, wire.url, timeout=0.5)).reading
        assert time.monotonic() - begun < 10
        assert await asyncio.to_thread(wire.idle.wait, 20), "the connection was not closed"
    assert asleep.is_set()
    assert found.code == ERROR.code


async def test_a_cancelled_reading_closes_the_response() -> None:
    def stalls(path: str, head: bytes) -> Iterator[bytes]:
        yield plain(b"x", length=10_000)
        while True:
            time.sleep(0.05)
            yield b"x"

    with Wire(stalls) as wire:
        client = httpx.AsyncClient(trust_env=False)
        async with client, client.stream("GET", wire.url) as response:
            reading: asyncio.Task[Reading] = asyncio.create_task(read_stream(response, timeout=30))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert response.is_closed
            assert await asyncio.to_thread(wire.idle.wait, 20)


def test_a_response_is_closed_that_was_not_read_to_its_end() -> None:
    with Wire(large) as wire:
        with httpx.Client(trust_env=False, verify=False) as client:
            response = client.send(client.build_request("GET", f"{wire.url}/endless"), stream=True)
            assert read_stream_sync(response).code == ERROR.code
            assert response.is_closed
        assert wire.idle.wait(20)
        session = requests.Session()
        session.trust_env = False
        with session, session.get(f"{wire.url}/endless", stream=True, timeout=10) as answer:
            assert read_stream_sync(answer).code == ERROR.code
            assert wire.idle.wait(20)


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_body_of_a_success_is_left_to_the_caller(client: str) -> None:
    """Neither read nor closed; the header is read."""
    with Wire(lambda path, head: [plain(MADE.body, status=200, content_type="application/json")]) as wire:
        seen: Seen = await stream(client, wire.url)
        assert seen.reading == Reading()
    async with httpx.AsyncClient(trust_env=False) as session:
        with Wire(lambda path, head: [plain(MADE.body, status=200, x_failsoft_code=TOKEN)]) as wire:
            async with session.stream("GET", wire.url) as response:
                assert (await read_stream(response)).code == ERROR.code
                assert not response.is_closed
                assert await response.aread() == MADE.body
