"""httpx's transport over aiohttp: what httpcore does, at a fraction of its cost with many connections.

Not the package httpx-aiohttp, which calls a server that hangs up (ServerDisconnectedError) or resets the
connection (ClientOSError) a ConnectTimeout: "never sent", though the request may have run, and a request
that must not run twice would be sent again. Here only failures of the connect phase say so.

Every connection has one end: read to the reply's last byte it is kept for `KEEPALIVE` seconds, else it is
closed at once, without waiting for anything, so that a cancellation leaves none behind, however often it
comes.
"""

from __future__ import annotations

import asyncio
import functools
import io
import math
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiohttp
import httpx
from aiohttp.http import HttpProcessingError
from yarl import URL

KEEPALIVE: Final = 3.0
"""Seconds that an idle connection is kept: below uvicorn's 5 s, which SGLang and vLLM use, so that
the server is never the one to close first (NeMo Gym#1555)."""
FORGOTTEN: Final = 3 * KEEPALIVE
"""Seconds after which an idle connection that is still open was forgotten: aiohttp looks for expired ones
every `KEEPALIVE` seconds, and closes each before it is twice that old."""
LARGE: Final = 2**20
"""Largest body that aiohttp takes in one piece without a warning, in bytes."""

EXCEPTIONS: Final[dict[type[BaseException], type[Exception]]] = {
    # Before anything was sent.
    aiohttp.ClientConnectorError: httpx.ConnectError,
    aiohttp.ConnectionTimeoutError: httpx.ConnectTimeout,
    aiohttp.ServerFingerprintMismatch: httpx.ConnectError,
    aiohttp.ClientProxyConnectionError: httpx.ProxyError,
    aiohttp.ClientHttpProxyError: httpx.ProxyError,
    aiohttp.InvalidURL: httpx.InvalidURL,
    aiohttp.NonHttpUrlClientError: httpx.UnsupportedProtocol,
    # From here on the server may have the request.
    aiohttp.ServerTimeoutError: httpx.ReadTimeout,
    aiohttp.ServerDisconnectedError: httpx.RemoteProtocolError,
    aiohttp.ClientConnectionError: httpx.ReadError,
    aiohttp.ClientPayloadError: httpx.RemoteProtocolError,
    aiohttp.ClientResponseError: httpx.RemoteProtocolError,
    aiohttp.RedirectClientError: httpx.RemoteProtocolError,
    aiohttp.InvalidUrlRedirectClientError: httpx.RemoteProtocolError,
    aiohttp.NonHttpUrlRedirectClientError: httpx.RemoteProtocolError,
    aiohttp.WSMessageTypeError: httpx.RemoteProtocolError,
    aiohttp.ClientError: httpx.ReadError,
    HttpProcessingError: httpx.RemoteProtocolError,
    TimeoutError: httpx.ReadTimeout,
    OSError: httpx.ReadError,
}
"""What each exception becomes; the most specific class counts."""


def mapped(exc: BaseException) -> Exception:
    """The httpx exception that says the same as aiohttp's ``exc``."""
    kind = next(EXCEPTIONS[cls] for cls in type(exc).__mro__ if cls in EXCEPTIONS)
    return kind(str(exc) or type(exc).__name__)


@functools.cache
def trusted() -> ssl.SSLContext:
    """The certificates that httpx trusts, for every transport alike; they take milliseconds to load."""
    return httpx.create_ssl_context(trust_env=False)


class AiohttpTransport(httpx.AsyncBaseTransport):
    """See the module. It opens at its first request, on the loop that runs then."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._connector: _Connector | None = None

    def lost(self, exchanges: int) -> int:
        """How many open connections belong to nothing, where ``exchanges`` are open: they are neither one
        of theirs nor kept for the next."""
        return 0 if self._connector is None else self._connector.lost(exchanges)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``; the reply's body is still to be read, or closed."""
        session = self._session or self._open()
        limits = request.extensions.get("timeout", {})
        body = await request.aread()
        try:
            response = await session.request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=[
                    (name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in request.headers.raw
                    if name.lower() != b"transfer-encoding"  # the body is whole, and has a length
                ],
                data=io.BytesIO(body) if len(body) > LARGE else body or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(connect=limits.get("connect"), sock_read=limits.get("read")),
            )
        except tuple(EXCEPTIONS) as exc:
            raise mapped(exc) from exc
        return httpx.Response(
            response.status,
            headers=list(response.raw_headers),
            stream=_Body(response),
            request=request,
            extensions={"http_version": b"HTTP/1.1", "reason_phrase": (response.reason or "").encode()},
        )

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        self._connector = _Connector(limit=0, keepalive_timeout=KEEPALIVE, ssl=trusted())
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            response_class=_Response,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )
        return self._session


class _Connector(aiohttp.TCPConnector):
    """Knows of each connection whether it is in use (inf) or when it was last given back."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._used: WeakKeyDictionary[asyncio.Transport, float] = WeakKeyDictionary()

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*args, **kwargs)
        wire = connection.transport
        if wire is not None:
            self._used[wire] = math.inf
            connection.add_callback(functools.partial(self._given_back, wire))
        return connection

    def lost(self, exchanges: int) -> int:
        now = time.monotonic()
        since = [at for wire, at in list(self._used.items()) if not wire.is_closing()]
        idle = sum(at < now - FORGOTTEN for at in since)
        return idle + max(0, sum(at == math.inf for at in since) - exchanges)

    def _given_back(self, wire: asyncio.Transport) -> None:
        self._used[wire] = time.monotonic()
        # close() would first send the rest of the request, and wait for a frozen server to take it.
        if wire.get_write_buffer_size():
            wire.abort()


class _Response(aiohttp.ClientResponse):
    """Does not give back a connection that has brought a 5xx: vLLM closes it after a 500, and the next
    request would meet the close."""

    protocol: Any = None

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        self.protocol = connection.protocol
        await super().start(connection)
        if self.status >= 500:
            self.protocol.force_close()
            if self.connection is None:  # the whole body came with the head: it was given back already
                self.protocol.close()
        return self

    @property
    def reset(self) -> BaseException | None:
        """What broke a body that only the connection's end ends: aiohttp takes a reset for that end."""
        framed = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        exc: BaseException | None = None if framed else self.protocol.exception()
        return exc if isinstance(exc, OSError) else None


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        response = self._response
        try:
            while chunk := await response.content.readany():
                yield chunk
            if isinstance(response, _Response) and response.reset is not None:
                raise response.reset
        except tuple(EXCEPTIONS) as exc:
            raise mapped(exc) from exc

    async def aclose(self) -> None:
        self._response.close()  # of a body that was read to its end, the connection is kept already
