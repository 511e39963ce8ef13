"""What goes in (`Request`), what travels (`Item`), what a server answered (`Answer`), what comes
out (`Reply`)."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from protocol import CodedError

MAX_ID: Final = 128
"""Longest request id, in characters; it travels in a header."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a header's name (RFC 9110, 5.1)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One POST for `PosterPool.post_many`; the fields mean what `PosterPool.post`'s parameters do."""

    url: str
    payload: Any
    deadline: float | None = None
    idempotent: bool = True
    headers: Mapping[str, str] | None = None
    request_id: str | None = None


class Item(msgspec.Struct, frozen=True):
    """One attempt at a POST, as it travels to a poster. ``id`` is the request's (the same for every
    attempt, sent as X-Request-Id), ``attempt`` names this attempt alone."""

    id: str
    attempt: str
    url: str
    body: bytes
    headers: dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """A good reply: the status, lower-case headers, and the decoded body (JSON, or for an event
    stream the list of its decoded events)."""

    status: int
    headers: dict[str, str]
    data: Any
    seconds: float


class Reply(msgspec.Struct, frozen=True):
    """What `PosterPool.post` returns.

    ``data`` is the decoded body, ``via`` "poster" or "local", ``attempts`` how often it was sent,
    ``seconds`` the time of the successful exchange, ``request_id`` what was sent as X-Request-Id."""

    data: Any
    status: int
    headers: dict[str, str]
    via: str
    attempts: int
    seconds: float
    request_id: str


def check_url(url: str) -> str:
    """``url`` if a POST can go there. Raises CodedError REQUEST.INVALID that says what is wrong."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # the property parses, and raises ValueError on nonsense
        url.encode()  # a lone surrogate cannot be sent
    except (ValueError, AttributeError, TypeError) as exc:
        raise CodedError("REQUEST.INVALID", f"URL {url!r} cannot be parsed: {exc}") from exc
    if parts.scheme not in ("http", "https"):
        raise CodedError("REQUEST.INVALID", f"URL {url!r}: it must begin with http:// or https://")
    if not parts.hostname:
        raise CodedError("REQUEST.INVALID", f"URL {url!r}: it names no host")
    return url


def encode(payload: Any) -> bytes:
    """``payload`` as JSON bytes. Raises CodedError REQUEST.INVALID for what JSON cannot hold."""
    if isinstance(payload, bytes | bytearray | memoryview):
        raise CodedError(
            "REQUEST.INVALID", "the payload is bytes: pass the object, the pool encodes it as JSON"
        )
    # The standard library is strict about it; msgspec would send NaN as null and a set as a list.
    try:
        text = json.dumps(payload, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode()  # raises ValueError on a lone surrogate
    except (TypeError, ValueError, RecursionError) as exc:
        raise CodedError("REQUEST.INVALID", f"the payload is not JSON: {exc}") from exc


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers as a plain dict of text, names in lower case; REQUEST.INVALID where one could not be sent."""
    if headers is not None and not isinstance(headers, Mapping):
        raise CodedError("REQUEST.INVALID", f"headers are {type(headers).__name__}: a mapping, please")
    out: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise CodedError("REQUEST.INVALID", f"header {name!r}: names and values must be text")
        if not _NAME.fullmatch(name) or not value.isascii() or _CONTROL.search(value):
            raise CodedError(
                "REQUEST.INVALID", f"header {name!r}: only ASCII without line breaks can be sent"
            )
        out[name.lower()] = value.strip(" \t")
    return out


def check_id(request_id: str | None) -> str:
    """The request's id, a fresh one when None is given."""
    if request_id is None:
        return uuid.uuid4().hex
    if (
        not isinstance(request_id, str)
        or not 1 <= len(request_id) <= MAX_ID
        or not request_id.isascii()
        or not request_id.isprintable()
    ):
        raise CodedError(
            "REQUEST.INVALID", f"request_id {request_id!r}: 1 to {MAX_ID} printable ASCII characters, please"
        )
    return request_id


def check_deadline(deadline: float) -> float:
    """A deadline in seconds from now; it must be a positive, finite number."""
    if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not 0 < deadline < 1e7:
        raise CodedError("REQUEST.INVALID", f"deadline {deadline!r}: a number of seconds above 0, please")
    return float(deadline)
