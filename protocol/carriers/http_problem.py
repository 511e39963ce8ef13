"""Over HTTP, the server's side: a problem document (RFC 9457) beside one header, ``x-failsoft-code``,
that holds the token.

`problem` writes both. `protocol.carriers.http_middleware` puts it behind ASGI and aiohttp applications;
`protocol.carriers.http_reply` reads it back, and says what is believed.

A proxy that replaces error pages replaces the body and, in nginx (``proxy_intercept_errors on``), drops
the header as well: docs/http.md has the line that keeps the name.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from typing import Any, Final

import msgspec

from protocol.boundary import Namer, mended, named
from protocol.carriers.http_reply import HEADER, PROBLEM, URN
from protocol.catalogue import catalogue
from protocol.codes import Family
from protocol.errors import CodedError
from protocol.safe import cap, clean, json_safe
from protocol.token import MAX_TOKEN, Trust, defuse, is_token_shaped, mint

MAX_BODY: Final = 16384
"""Default budget of a problem document, in bytes."""
MIN_BODY: Final = 2048
"""Least budget, in bytes: what the members of fixed length may need."""
MAX_RETRY_AFTER: Final = 300
"""Longest Retry-After that is written, in seconds: the longest that failsoft's clients believe."""

# A code's own row, else its family's, else 500.
_STATUS: Final[dict[str, int]] = {
    "REQUEST": 400,
    "REQUEST.UNAUTHORIZED": 401,
    "REQUEST.NOT_FOUND": 404,
    "REQUEST.TOO_LARGE": 413,
    "REQUEST.OUTCOME_UNKNOWN": 500,  # nothing is wrong with the request
    "CANCEL": 499,  # nginx's: the client closed the request
    "BACKPRESSURE": 503,
    "BACKPRESSURE.RATE_LIMITED": 429,
    "ENGINE": 503,
    "POOL": 503,
    "QUEUE": 503,
    "UPSTREAM": 502,
    "UPSTREAM.EJECTED": 503,
    "UPSTREAM.NO_ENGINE": 503,
    "TRANSPORT": 502,
    "TIMEOUT": 504,
}
_WAITING: Final = frozenset({425, 429, 503, 529})
_encode = msgspec.json.Encoder().encode


class Problem(msgspec.Struct, frozen=True):
    """A reply that names a failure: ``status``, ``headers`` (lower case, ASCII, no line ends) and
    ``body`` (application/problem+json, within its budget)."""

    status: int
    headers: dict[str, str]
    body: bytes


def problem(
    exc: BaseException, *, status: int | None = None, budget: int = MAX_BODY, name: Namer | None = None
) -> Problem:
    """The reply that carries ``exc``, its body at most ``budget`` bytes.

    An exception without a code is named first: by what it carries, by ``name(exc)``
    (`faults.name_of`), or as TASK.FAILED. ``status`` is `status_of` the failure where it is not given.
    Tokens in the detail and the data are defused: a reply names one failure.

    Raises ValueError for a ``status`` outside 400 to 599 and for a ``budget`` below `MIN_BODY`."""
    if status is not None and not 400 <= status <= 599:
        raise ValueError(f"status={status} is no failure: give 400 to 599, or none to let the code decide")
    if budget < MIN_BODY:
        raise ValueError(f"budget={budget} bytes is too little for a problem: give at least {MIN_BODY}")
    error = _named(exc, name)
    status = status_of(error) if status is None else status
    token = _token(error)
    headers = {
        "content-type": PROBLEM,
        HEADER: token,
        "cache-control": "no-store",  # caches keep a 404, and this failure happened once
    }
    after = error.data.get("retry_after")
    if status in _WAITING and isinstance(after, int | float) and math.isfinite(after):
        headers["retry-after"] = str(math.ceil(min(max(after, 0), MAX_RETRY_AFTER)))
    return Problem(status, headers, _document(error, status, token, budget))


def status_of(error: CodedError) -> int:
    """The HTTP status for ``error``: that of its code or family; for REQUEST and BACKPRESSURE the one
    in its data, where it is one of theirs (a 4xx; 425, 429, 503 or 529)."""
    held, family = error.data.get("status"), error.code.family
    if isinstance(held, int) and (
        (family is Family.REQUEST and 400 <= held <= 499)
        or (family is Family.BACKPRESSURE and held in _WAITING)
    ):
        return held
    return _STATUS.get(error.code, _STATUS.get(family, 500))


def _named(exc: BaseException, name: Namer | None) -> CodedError:
    cancelled = issubclass(type(exc), asyncio.CancelledError | concurrent.futures.CancelledError)
    return mended(named(exc, code="CANCEL.CALLER" if cancelled else "TASK.FAILED", name=name))


def _token(error: CodedError) -> str:
    token = error.token
    # What was carried on is data, and data may hold anything; a header may not.
    if len(token) <= MAX_TOKEN and token.isupper() and is_token_shaped(token):
        return token
    return mint(error.code, key=None if error.trust >= Trust.SIGNED else b"")


def _document(error: CodedError, status: int, token: str, budget: int) -> bytes:
    # The token stands before all that may be long: a body that is cut still names the failure.
    fixed: dict[str, Any] = {
        "type": f"{URN}{error.code}",
        "title": cap(clean(catalogue.entry(error.code).meaning), 200),
        "status": status,
        "code": str(error.code),
        "instance": token.split(".")[3],
        "token": token,
    }
    detail = defuse(clean(error.detail))
    data = _within(json_safe(error.data), (budget - MIN_BODY) // 2)
    while True:
        body = _encode({**fixed, "detail": detail, "data": data})
        if len(body) <= budget:
            return body
        detail = cap(detail, len(detail) // 2) if len(detail) > 128 else ""


def _within(data: dict[str, Any], budget: int) -> msgspec.Raw:
    """``data`` as JSON of about ``budget`` bytes at most: whole items in their order, and the number of
    those left out."""
    kept: list[bytes] = []
    size = 0
    for name, value in data.items():
        # Defused as JSON: the token's alphabet needs no escape there, and neither does the colon.
        item = defuse(f"{_encode(name).decode()}:{_encode(value).decode()}").encode()
        if size + len(item) <= budget:
            kept.append(item)
            size += len(item)
    if len(kept) < len(data):
        kept.append(_encode("…") + b":" + _encode(f"{len(data) - len(kept)} left out"))
    return msgspec.Raw(b"{" + b",".join(kept) + b"}")
