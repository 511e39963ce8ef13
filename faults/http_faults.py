"""The tables of HTTP: exceptions of httpx and aiohttp by full class name, and statuses.

A test holds that every exception that the two packages export has a row.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final

_H: Final = "httpx."
_A: Final = "aiohttp.client_exceptions."

HTTP: Final[dict[str, str]] = {
    # httpx; HTTPStatusError is read by its status
    _H + "HTTPError": "TRANSPORT.PROTOCOL",
    _H + "HTTPStatusError": "UPSTREAM.SERVER_ERROR",
    _H + "RequestError": "TRANSPORT.DISCONNECTED",
    _H + "TransportError": "TRANSPORT.DISCONNECTED",
    _H + "TimeoutException": "TIMEOUT.READ",
    _H + "ConnectTimeout": "TIMEOUT.CONNECT",
    _H + "ReadTimeout": "TIMEOUT.READ",
    _H + "WriteTimeout": "TIMEOUT.WRITE",
    _H + "PoolTimeout": "TIMEOUT.POOL",
    _H + "NetworkError": "TRANSPORT.DISCONNECTED",
    _H + "ConnectError": "TRANSPORT.CONNECT",
    _H + "ReadError": "TRANSPORT.DISCONNECTED",
    _H + "WriteError": "TRANSPORT.DISCONNECTED",
    _H + "CloseError": "TRANSPORT.DISCONNECTED",
    _H + "ProtocolError": "TRANSPORT.PROTOCOL",
    _H + "LocalProtocolError": "REQUEST.INVALID",
    _H + "RemoteProtocolError": "TRANSPORT.DISCONNECTED",
    _H + "ProxyError": "TRANSPORT.PROXY",
    _H + "UnsupportedProtocol": "REQUEST.INVALID",
    _H + "InvalidURL": "REQUEST.INVALID",
    _H + "DecodingError": "UPSTREAM.BAD_BODY",
    _H + "TooManyRedirects": "UPSTREAM.REDIRECT",
    _H + "CookieConflict": "REQUEST.INVALID",
    _H + "StreamError": "INTERNAL.BUG",
    _H + "StreamConsumed": "INTERNAL.BUG",
    _H + "StreamClosed": "INTERNAL.BUG",
    _H + "RequestNotRead": "INTERNAL.BUG",
    _H + "ResponseNotRead": "INTERNAL.BUG",
    # aiohttp; ClientResponseError and its children are read by their status
    _A + "ClientError": "TRANSPORT.DISCONNECTED",
    _A + "ClientResponseError": "UPSTREAM.SERVER_ERROR",
    _A + "ClientHttpProxyError": "TRANSPORT.PROXY",
    _A + "WSServerHandshakeError": "UPSTREAM.SERVER_ERROR",
    _A + "ContentTypeError": "UPSTREAM.BAD_BODY",
    _A + "TooManyRedirects": "UPSTREAM.REDIRECT",
    _A + "ClientPayloadError": "UPSTREAM.TRUNCATED",
    _A + "ClientConnectionError": "TRANSPORT.DISCONNECTED",
    _A + "ClientConnectionResetError": "TRANSPORT.DISCONNECTED",
    _A + "ClientOSError": "TRANSPORT.DISCONNECTED",
    _A + "ClientConnectorError": "TRANSPORT.CONNECT",
    _A + "ClientConnectorDNSError": "TRANSPORT.CONNECT",
    _A + "UnixClientConnectorError": "TRANSPORT.CONNECT",
    _A + "ClientProxyConnectionError": "TRANSPORT.PROXY",
    _A + "ClientSSLError": "TRANSPORT.TLS",
    _A + "ClientConnectorSSLError": "TRANSPORT.TLS",
    _A + "ClientConnectorCertificateError": "TRANSPORT.TLS",
    _A + "ServerConnectionError": "TRANSPORT.DISCONNECTED",
    _A + "ServerDisconnectedError": "TRANSPORT.DISCONNECTED",
    _A + "ServerFingerprintMismatch": "TRANSPORT.TLS",
    _A + "ServerTimeoutError": "TIMEOUT.READ",
    _A + "ConnectionTimeoutError": "TIMEOUT.CONNECT",
    _A + "SocketTimeoutError": "TIMEOUT.READ",
    _A + "InvalidURL": "REQUEST.INVALID",
    _A + "InvalidUrlClientError": "REQUEST.INVALID",
    _A + "NonHttpUrlClientError": "REQUEST.INVALID",
    _A + "RedirectClientError": "UPSTREAM.REDIRECT",
    _A + "InvalidUrlRedirectClientError": "UPSTREAM.REDIRECT",
    _A + "NonHttpUrlRedirectClientError": "UPSTREAM.REDIRECT",
    _A + "WSMessageTypeError": "UPSTREAM.BAD_BODY",
    "aiohttp._websocket.models.WebSocketError": "UPSTREAM.BAD_BODY",
    "aiohttp.http_websocket.WebSocketError": "UPSTREAM.BAD_BODY",
    "aiohttp.streams.EofStream": "UPSTREAM.TRUNCATED",
    "aiohttp.multipart.BadContentDispositionHeader": "UPSTREAM.BAD_BODY",
    "aiohttp.multipart.BadContentDispositionParam": "UPSTREAM.BAD_BODY",
    _A + "UploadAbortedError": "TRANSPORT.DISCONNECTED",
}

STATUS: Final[dict[int, str]] = {
    401: "REQUEST.UNAUTHORIZED",
    403: "REQUEST.UNAUTHORIZED",
    404: "REQUEST.NOT_FOUND",
    405: "REQUEST.NOT_FOUND",
    407: "TRANSPORT.PROXY",
    408: "TIMEOUT.READ",  # the server did not get the whole request in time (RFC 9110, 15.5.9)
    413: "REQUEST.TOO_LARGE",
    414: "REQUEST.TOO_LARGE",
    425: "BACKPRESSURE.RATE_LIMITED",  # Too Early (RFC 8470): send it again later
    429: "BACKPRESSURE.RATE_LIMITED",
    431: "REQUEST.TOO_LARGE",
    502: "UPSTREAM.BAD_GATEWAY",
    503: "BACKPRESSURE.OVERLOADED",
    504: "UPSTREAM.BAD_GATEWAY",
    529: "BACKPRESSURE.OVERLOADED",  # used by some inference services for "overloaded"
}

MAX_RETRY_AFTER: Final = 300.0
"""Longest Retry-After that is believed, in seconds."""


def status_code(status: int) -> str | None:
    """The code of an HTTP status; None for a status that is no failure (1xx, 2xx)."""
    if 100 <= status < 300:
        return None
    known = STATUS.get(status)
    if known is not None:
        return known
    if 300 <= status < 400:
        return "UPSTREAM.REDIRECT"
    if 400 <= status < 500:
        return "REQUEST.REJECTED"
    return "UPSTREAM.SERVER_ERROR"


def retry_after(headers: Mapping[Any, Any] | None, now: float | None = None) -> float | None:
    """Retry-After in seconds from now (RFC 9110, 10.2.3: seconds or an HTTP date); None when it is
    missing or nonsense. ``now`` is unix seconds. Never negative, at most `MAX_RETRY_AFTER`."""
    if headers is None:
        return None
    value = headers.get("retry-after") or headers.get("Retry-After")
    if value is None:
        return None
    text = str(value).strip()[:64]
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text):
        return min(float(text), MAX_RETRY_AFTER)
    try:
        date = parsedate_to_datetime(text)
        # asctime's format names no zone, and means GMT (RFC 9110, 5.6.7): without one it would be local time
        when = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    seconds = when - (time.time() if now is None else now)
    return min(max(seconds, 0.0), MAX_RETRY_AFTER) if math.isfinite(seconds) else None
