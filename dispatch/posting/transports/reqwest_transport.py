"""httpx's transport over pyreqwest, a Rust client on a thread of its own."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final

import httpx

from dispatch.posting.transports.aiohttp_transport import KEEPALIVE
from protocol import CodedError

CONNECT_TIMEOUT: Final = 10.0
"""Seconds that connecting may take, whatever the transport."""
LATER: Final = 1.0
"""Seconds that reqwest's times, kept on another thread, are beyond ours: its timeout lets the exchange's own
speak first, and an idle connection is gone when ours says so."""


def reqwest_package() -> Any:
    try:
        from pyreqwest import client, exceptions
    except ImportError as exc:
        detail = "transport 'reqwest' needs a package: pip install 'failsoft[reqwest]'"
        raise CodedError.from_exception(exc, "CONFIG.INVALID", detail) from exc
    return client.ClientBuilder, exceptions


class ReqwestTransport(httpx.AsyncBaseTransport):
    """httpx's transport over pyreqwest.

    Not the one that pyreqwest brings: that calls a server that hangs up before it answers a ConnectError,
    and one that never answers a ConnectTimeout; it loses the status where the body is cut early, and takes
    the sum of all timeouts for the exchange's.

    What no setting changes: a request that is cancelled before its reply has begun stays open until then, or
    until its timeout (for a POST its budget), so the server works on; the one timeout is the whole
    exchange's, so an exchange that ends while it connects ends as a ReadTimeout, of unknown outcome, unless
    `CONNECT_TIMEOUT` had passed; and a request of which no byte was written when its kept-alive connection
    turned out to be closed goes out on another, once.

    A connection that brought a 5xx cannot be picked out of reqwest's pool, nor closed: hyper keeps it even if
    the reply is dropped unread, where its body had come with its head. So for as long as the pool may hold it
    (`KEEPALIVE`), requests to its origin have a connection each, from a client that keeps none: dearer, while
    an origin brings 5xx, than the other transports. Not every request is spared: one that goes out between
    the 5xx's arrival and the event loop's seeing it may have that connection, and so may one after a 5xx that
    nobody saw, because its request was cancelled."""

    def __init__(self, connections: int) -> None:
        self._builder, self._exceptions = reqwest_package()
        self._client = self._built(connections)
        self._keepless: Any = None
        self._distrusted: dict[tuple[str, bytes], float] = {}
        self.failure: type[Exception] = self._exceptions.PyreqwestError

    def _built(self, kept: int) -> Any:
        builder = (
            self._builder()
            .no_proxy()
            .follow_redirects(False)
            .referer(False)
            .connect_timeout(datetime.timedelta(seconds=CONNECT_TIMEOUT))
            .pool_idle_timeout(datetime.timedelta(seconds=KEEPALIVE))
            .pool_max_idle_per_host(kept)
        )
        for coding in ("gzip", "deflate", "brotli", "zstd"):  # httpx decodes
            builder = getattr(builder, coding)(False)
        return builder.build()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``; the reply's body is still to be read, or closed."""
        names = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        body = await request.aread()
        origin = (request.url.scheme, request.url.netloc)
        limit = request.extensions.get("timeout", {}).get("read")
        try:
            client = self._client_for(origin)
            builder = client.request(request.method, str(request.url)).headers(names).body_bytes(body)
            if limit is not None:
                builder = builder.timeout(datetime.timedelta(seconds=limit + LATER))
            # Without a buffer of its own: it would be filled before the status is told.
            sent = builder.streamed_read_buffer_limit(0).build_streamed()
            response = await _heeding(sent.__aenter__(), sent)
        except self.failure as exc:
            raise self.named(exc) from exc
        failed = response.status >= 500 and client is self._client
        if failed:
            self.distrust(origin)
        return httpx.Response(
            response.status,
            headers=list(response.headers.items()),
            stream=_Body(self, sent, response.body_reader, origin if failed else None),
            request=request,
            extensions={"http_version": response.version.encode("ascii")},
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.close()
        if self._keepless is not None:
            await self._keepless.close()

    def distrust(self, origin: tuple[str, bytes]) -> None:
        """``origin`` brought a 5xx: its connection may be kept from now on."""
        now = time.monotonic()
        self._distrusted = {one: until for one, until in self._distrusted.items() if until > now}
        self._distrusted[origin] = now + KEEPALIVE + LATER

    def _client_for(self, origin: tuple[str, bytes]) -> Any:
        if self._distrusted.get(origin, 0.0) <= time.monotonic():
            return self._client
        if self._keepless is None:  # made late: it loads the certificates, which takes milliseconds
            self._keepless = self._built(0)
        return self._keepless

    def named(self, exc: Exception) -> Exception:
        """The httpx exception for ``exc``: only a failure of the connect phase says that nothing was sent."""
        known = self._exceptions
        causes = [cause["message"] for cause in (getattr(exc, "details", None) or {}).get("causes") or ()]
        if isinstance(exc, known.BuilderError):
            kind: type[Exception] = httpx.LocalProtocolError
        elif "client error (Connect)" in causes:
            kind = httpx.ConnectTimeout if isinstance(exc, TimeoutError) else httpx.ConnectError
        elif isinstance(exc, TimeoutError):
            kind = httpx.ReadTimeout
        elif isinstance(exc, known.DecodeError):
            kind = httpx.RemoteProtocolError
        else:
            kind = httpx.ReadError
        return kind(": ".join([str(exc.args[0]), *causes[1:]]))


async def _heeding(awaited: Awaitable[Any], opened: Any = None) -> Any:
    """The result of pyreqwest's ``awaited``, which by itself forgets a cancellation that meets its result;
    what was ``opened`` by then is closed."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await awaited
    if task.cancelling() > before:
        if opened is not None:
            await opened.__aexit__(None, None, None)
        raise asyncio.CancelledError
    return result


class _Body(httpx.AsyncByteStream):
    def __init__(
        self, transport: ReqwestTransport, sent: Any, reader: Any, failed: tuple[str, bytes] | None
    ) -> None:
        self._owner = transport
        self._sent = sent
        self._reader = reader
        self._failed = failed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (chunk := await _heeding(self._reader.read_chunk())) is not None:
                yield bytes(chunk)
        except self._owner.failure as exc:
            raise self._owner.named(exc) from exc

    async def aclose(self) -> None:
        if self._failed is not None:  # again: the connection is kept from the body's end on
            self._owner.distrust(self._failed)
        await self._sent.__aexit__(None, None, None)
