"""What goes in (`Request`), what travels (`Item`), what a server answered (`Answer`), what comes
out (`Reply`)."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import UUID

import msgspec
import orjson

from protocol import CodedError

MAX_ID: Final = 128
"""Longest request id, in characters; it travels in a header."""

KNOWN_URLS: Final = 1024
"""How many good URLs are remembered, so that each is parsed once."""
MAX_WALK: Final = 100_000
"""How many values of a refused payload are looked at to say what is wrong with it."""
MAX_PATH: Final = 16
"""Most steps that the place of a wrong value is told in."""
MAX_STEP: Final = 64
"""Longest part of a key that is told, in characters."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a header's name (RFC 9110, 5.1)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Left to themselves these types would be turned into text or objects that nobody asked for. Without
# OPT_SERIALIZE_NUMPY and OPT_NON_STR_KEYS orjson refuses arrays and keys that are no text.
_PLAIN = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One POST for `PosterPool.post_many`; the fields mean what `PosterPool.post`'s parameters do."""

    url: str
    payload: Any
    deadline: float | None = None
    idempotent: bool = True
    headers: Mapping[str, str] | None = None
    request_id: str | None = None


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at a POST, as it travels to a poster. ``id`` is the request's (the same for every
    attempt, sent as X-Request-Id), ``attempt`` numbers this attempt alone, over the whole pool."""

    id: str
    attempt: int
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
        _parse(url)
    except (ValueError, AttributeError, TypeError) as exc:
        raise CodedError("REQUEST.INVALID", f"URL {url!r} cannot be parsed: {exc}") from exc
    return url


@lru_cache(KNOWN_URLS)  # a refusal is an exception, and those are not kept
def _parse(url: str) -> None:
    parts = urlsplit(url)
    _ = parts.port  # the property parses, and raises ValueError on nonsense
    url.encode()  # a lone surrogate cannot be sent
    if parts.scheme not in ("http", "https"):
        raise CodedError("REQUEST.INVALID", f"URL {url!r}: it must begin with http:// or https://")
    if not parts.hostname:
        raise CodedError("REQUEST.INVALID", f"URL {url!r}: it names no host")


def encode(payload: Any) -> bytes:
    """``payload`` as JSON bytes. Raises CodedError REQUEST.INVALID for what JSON cannot hold, and says
    where in the payload it stands. Beyond what `json.dumps` takes, a UUID is sent as its text and an
    Enum's member as its value."""
    if isinstance(payload, bytes | bytearray | memoryview):
        raise CodedError(
            "REQUEST.INVALID", "the payload is bytes: pass the object, the pool encodes it as JSON"
        )
    try:
        body = orjson.dumps(payload, option=_PLAIN)
        # It writes NaN and infinities as null. Where a null is no None, the two are not equal.
        if b"null" not in body or orjson.loads(body) == payload:
            return body
    except (TypeError, ValueError, RecursionError):
        pass  # orjson knows less: large integers, keys that are numbers, subclasses, deep nesting
    try:
        text = json.dumps(payload, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_also)
        return text.encode()  # raises ValueError on a lone surrogate
    except (TypeError, ValueError, RecursionError) as exc:
        raise CodedError("REQUEST.INVALID", f"the payload is not JSON: {_wrong(payload) or exc}") from exc


def _also(value: Any) -> Any:
    """What orjson takes as well, so that it does not depend on the rest of a payload whether it goes."""
    if isinstance(value, Enum):
        return value.value
    if type(value) is UUID:
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_Place = tuple["_Place", str] | None  # a linked list, from a value up to the payload


def _wrong(payload: Any) -> str | None:
    """What is wrong with a payload that was refused, and where: the first such value, of the first
    `MAX_WALK`. Tells keys and types, never values: a payload holds prompts."""
    # Iterators stand on the stack, not their values: a large list costs nothing until it is looked at.
    stack: list[tuple[int, Iterator[tuple[str, Any]], _Place]] = [(0, iter([("payload", payload)]), None)]
    inside: set[int] = set()  # the containers around the value at hand
    for _ in range(MAX_WALK):
        around, values, above = stack[-1]
        following = next(values, None)
        if following is None:
            inside.discard(around)
            stack.pop()
            if not stack:
                return None
            continue
        step, value = following
        place: _Place = (above, step)
        while isinstance(value, Enum) and not isinstance(value, str | int | float):
            value = value.value
        if isinstance(value, dict):
            for key in dict.keys(value):
                if said := _wrong_key(key):
                    return f"{_told(place)} has {said}"
            items: Iterator[tuple[str, Any]] = ((_step(key), inner) for key, inner in dict.items(value))
        elif isinstance(value, list | tuple):
            items = ((f"[{index}]", inner) for index, inner in enumerate(value))
        elif said := _wrong_leaf(value):
            return f"{_told(place)} {said}"
        else:
            continue
        if id(value) in inside:
            return f"{_told(place)} holds itself"
        if len(stack) > sys.getrecursionlimit():
            return f"{_told(place)} is nested too deep"
        inside.add(id(value))
        stack.append((id(value), items, place))
    return None


def _wrong_key(key: Any) -> str | None:
    if not isinstance(key, str | int | float | None):
        return f"a key that is {_a(key)}: JSON's keys are text"
    if said := _wrong_leaf(key):
        return f"a key that {said}"
    return None


def _wrong_leaf(value: Any) -> str | None:
    if isinstance(value, str):
        found = _SURROGATE.search(value)
        return f"holds half a surrogate pair (character {found.start()})" if found else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is {float.__repr__(value)}"
    if isinstance(value, int):
        limit = sys.get_int_max_str_digits()
        too_long = limit and value.bit_length() > 3 * limit and not _has_text(value)
        return f"is an integer of more than {limit} digits" if too_long else None
    if value is None or type(value) is UUID:
        return None
    return f"is {_a(value)}: JSON cannot hold that"


def _has_text(value: int) -> bool:
    try:
        int.__repr__(value)
    except ValueError:
        return False
    return True


def _a(value: Any) -> str:
    return f"of type {type(value).__qualname__[:MAX_STEP]}"


def _step(key: Any) -> str:
    if isinstance(key, str) and key.isidentifier() and len(key) <= MAX_STEP:
        return f".{key}"
    return f"[{key[:MAX_STEP]!r}]" if isinstance(key, str) else f"[{repr(key)[:MAX_STEP]}]"


def _told(place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(step)
    steps.reverse()
    if len(steps) > MAX_PATH:
        half = MAX_PATH // 2
        steps[half:-half] = [f"…{len(steps) - MAX_PATH} more…"]
    return "".join(steps)


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers as a plain dict of text, names in lower case; REQUEST.INVALID where one could not be sent."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise CodedError("REQUEST.INVALID", f"headers are {type(headers).__name__}: a mapping, please")
    out: dict[str, str] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise CodedError("REQUEST.INVALID", f"header {name!r}: names and values must be text")
        if not _NAME.fullmatch(name) or not value.isascii() or _CONTROL.search(value):
            raise CodedError(
                "REQUEST.INVALID", f"header {name!r}: only ASCII without line breaks can be sent"
            )
        out[name.lower()] = value.strip(" \t")
    return out


class _Ids:
    """Ids that no other process makes: 80 random bits, and a count. They are no secret."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)  # or a child would go on with its parent's

    def begin(self) -> None:
        self._prefix = os.urandom(10).hex()
        self._count = itertools.count()

    def new(self) -> str:
        return f"{self._prefix}{next(self._count):012x}"


_ids = _Ids()


def check_id(request_id: str | None) -> str:
    """The request's id, a fresh one when None is given."""
    if request_id is None:
        return _ids.new()
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


def check_count(value: Any, name: str, code: str = "REQUEST.INVALID") -> int:
    """A whole number of at least 1; CodedError ``code`` that names it otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CodedError(code, f"{name} is {value!r}: a whole number of at least 1, please")
    return value


def check_deadline(deadline: float) -> float:
    """A deadline in seconds from now; it must be a positive number below 10 million (116 days)."""
    if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not 0 < deadline < 1e7:
        raise CodedError(
            "REQUEST.INVALID", f"deadline {deadline!r}: seconds above 0 and below 10 million, please"
        )
    return float(deadline)
