"""httpx's own transport, which does not use a connection again that has brought a 5xx.

httpcore keeps every connection whose reply was read to its end, and cannot be told otherwise: so the
connection is closed below it, before it is given back; httpcore sees that it is closed, and drops it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from dispatch.posting.transports.aiohttp_transport import KEEPALIVE, trusted


class HttpxTransport(httpx.AsyncHTTPTransport):
    """See the module."""

    def __init__(self, connections: int) -> None:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=connections, keepalive_expiry=KEEPALIVE
        )
        super().__init__(verify=trusted(), limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``; the reply's body is still to be read, or closed."""
        response = await super().handle_async_request(request)
        if response.status_code >= 500:
            response.stream = _Last(response.stream, response.extensions["network_stream"])
        return response


class _Last(httpx.AsyncByteStream):
    """The last body that its connection brings."""

    def __init__(self, stream: Any, wire: Any) -> None:
        self._stream = stream
        self._wire = wire

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._wire.aclose()
        finally:
            await self._stream.aclose()
