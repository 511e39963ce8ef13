"""Over HTTP, the client's side, when the body may be anything: 100 MB, endless, a gzip bomb, cut.

`read_stream` and `read_stream_sync` read no more of a body than tells what failed, and close the
response. The budget holds for the bytes on the wire and for what they decompress to; so gzip and deflate
are decoded here, never by the client, which would decode a whole chunk at once. Bodies in other encodings
(br, zstd) are left alone, and the header speaks. aiohttp decompresses by itself, piece by piece as it is
read.

A reply whose body is not a failure's (see `http_reply.reads_body`) is left open and unread: it is the
caller's.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from protocol.carriers.http_reply import body_in, read_reply, reads_body, status_in, values
from protocol.keys import Key
from protocol.reading import Reading

BUDGET: Final = 65536
"""Default for the most bytes that are read of a body, on the wire and decoded."""
PATIENCE: Final = 5.0
"""Default for the most seconds that a body is waited for."""

_GZIP: Final = 16 + zlib.MAX_WBITS
# Servers send two formats under the name of deflate: zlib's, which is the standard's, and the bare one.
_FORMATS: Final = {"gzip": (_GZIP,), "x-gzip": (_GZIP,), "deflate": (zlib.MAX_WBITS, -zlib.MAX_WBITS)}


async def read_stream(
    response: Any, budget: int = BUDGET, *, timeout: float = PATIENCE, key: Key = None
) -> Reading:
    """What a reply says about a failure (`http_reply.read_reply`), from a response that is still open:
    httpx's ``AsyncClient.stream`` or aiohttp's.

    Reads at most ``budget`` bytes and waits at most ``timeout`` seconds; what had come by then, or until
    the connection broke, is read. The response is closed, also when this is cancelled."""
    status, headers = status_in(response), response.headers
    if not reads_body(status, headers):
        return read_reply(status, headers, b"", key=key)
    body = bytearray(body_in(response)[:budget])
    encoding = "identity"
    try:
        if not body:
            async with asyncio.timeout(timeout):
                if hasattr(response, "aiter_raw"):
                    encoding = _encoding(headers)
                    async for chunk in response.aiter_raw():
                        body += chunk[: budget - len(body)]
                        if len(body) >= budget:
                            break
                else:
                    async for chunk in _pieces(response.content, budget):
                        body += chunk
    except Exception:  # noqa: BLE001, S110 - each client has its own errors for a body that is cut: it is read so far
        pass
    finally:
        await _close(response)
    return read_reply(status, headers, decoded(bytes(body), encoding, budget), key=key)


def read_stream_sync(
    response: Any, budget: int = BUDGET, *, timeout: float = PATIENCE, key: Key = None
) -> Reading:
    """`read_stream` for httpx's ``Client.stream`` and requests' ``stream=True``. One wait for bytes is
    bounded by the client's own read timeout, all of them together by ``timeout`` and that."""
    status, headers = status_in(response), response.headers
    if not reads_body(status, headers):
        return read_reply(status, headers, b"", key=key)
    body = bytearray(body_in(response)[:budget])
    encoding = "identity"
    end = time.monotonic() + timeout
    try:
        if not body:
            encoding = _encoding(headers)
            for chunk in _raw(response):
                body += chunk[: budget - len(body)]
                if len(body) >= budget or time.monotonic() > end:
                    break
    except Exception:  # noqa: BLE001, S110 - as in read_stream
        pass
    finally:
        response.close()
    return read_reply(status, headers, decoded(bytes(body), encoding, budget), key=key)


def decoded(body: bytes, encoding: str, budget: int) -> bytes:
    """At most ``budget`` bytes of ``body``, decoded from its Content-Encoding, as far as it goes; empty
    when it is damaged or in an encoding that is not read here."""
    if encoding in ("", "identity"):
        return body[:budget]
    for bits in _FORMATS.get(encoding, ()):
        try:
            return zlib.decompressobj(bits).decompress(body, budget)
        except zlib.error:
            continue
    return b""


def _encoding(headers: Any) -> str:
    return ",".join(values(headers, "content-encoding")).strip().lower()


async def _pieces(stream: Any, budget: int) -> AsyncIterator[bytes]:
    while budget > 0:
        piece = await stream.read(budget)
        if not piece:
            return
        budget -= len(piece)
        yield piece


def _raw(response: Any) -> Iterator[bytes]:
    if hasattr(response, "iter_raw"):  # httpx
        yield from response.iter_raw()
    else:  # requests: what is below it reads as much as comes at once, without decoding
        while piece := response.raw.read1(8192, decode_content=False):
            yield piece


async def _close(response: Any) -> None:
    if hasattr(response, "aclose"):
        await response.aclose()
    else:
        response.close()
