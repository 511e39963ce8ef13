"""Making values safe to carry: capped, JSON-safe, and without secrets.

An exception message of 20 MB arrives whole through Ray, and headers with a bearer token are
attributes of httpx's exceptions. Whatever a CodedError or an event carries goes through here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

MAX_DETAIL: Final = 8192
"""Longest detail text, in characters."""
MAX_TEXT: Final = 2048
"""Longest text of one cause, or of one value in data, in characters."""
MAX_ITEMS: Final = 64
MAX_DEPTH: Final = 4

_SECRET_KEY = re.compile(
    r"authorization|cookie|password|passwd|secret|token$|api[-_]?key|credential", re.IGNORECASE
)
# A password may hold an unescaped @, stand alone (redis://:secret@host) or be the user (a token).
_URL_USER = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^\s/'\"<>]{1,512}@", re.IGNORECASE)
_URL_QUERY = re.compile(
    r"([?&][^=&\s]{0,64}(?:token|secret|password|api[-_]?key|signature)=)[^&\s'\"]{1,4096}", re.IGNORECASE
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE)
_HEADER = re.compile(
    r"(\b(?:proxy-)?(?:authorization|x-api-key|api-key)(?:['\"]?\s{0,4}[:=]|['\"],)\s{0,4}b?['\"]?)"
    r"(?!bearer\b|basic\b)(?:(?:token|apikey|digest|negotiate)\s{1,4})?[^\s'\",;}&]{4,4096}",
    re.IGNORECASE,
)


def cap(text: str, limit: int = MAX_DETAIL) -> str:
    """``text`` within ``limit`` characters: head and tail kept, the cut named in between."""
    if len(text) <= limit:
        return text
    half = (limit - 40) // 2
    return f"{text[:half]} …[{len(text) - 2 * half} characters cut]… {text[-half:]}"


def scrub(text: str) -> str:
    """``text`` without the secrets that have a recognisable place: URL user info, query tokens and
    the headers that authorize."""
    text = _URL_USER.sub(r"\1[redacted]@", text)
    text = _URL_QUERY.sub(r"\1[redacted]", text)
    return _HEADER.sub(r"\1[redacted]", _BEARER.sub(r"\1 [redacted]", text))


def clean(text: object, limit: int = MAX_DETAIL) -> str:
    """Text that may be carried: capped, scrubbed, and valid UTF-8 (lone surrogates replaced)."""
    plain = text if type(text) is str else text_of(text)
    if len(plain) <= 4 * limit:
        out = cap(scrub(plain), limit)
    else:
        # Only what is near the ends is scrubbed, so that the cost is bounded, but more than is kept: a
        # secret that the first cut halves, and that cannot be recognised any more, is cut off altogether.
        half = (limit - 40) // 2
        head, tail = scrub(plain[: 2 * limit])[:half], scrub(plain[-2 * limit :])[-half:]
        out = f"{head} …[{len(plain) - 2 * half} characters cut]… {tail}"
    return out.encode("utf-8", "replace").decode("utf-8")


def text_of(value: object) -> str:
    """``str(value)``, and a plain word instead when that raises: the text of a failure must never
    be a failure of its own."""
    try:
        return str.__str__(str(value))
    except Exception as exc:  # noqa: BLE001 - any __str__ may raise anything; the type is what we keep
        return f"<{type(value).__name__} whose str() raised {type(exc).__name__}>"


def json_safe(value: Any, depth: int = MAX_DEPTH) -> Any:
    """``value`` reduced to what JSON can hold, bounded in depth, items and text, secrets redacted
    by key. Numbers that JSON lacks (nan, inf) become text. Never raises."""
    try:
        return _reduced(value, depth)
    except Exception:  # noqa: BLE001 - a foreign container or property may raise anything
        return f"<{type(value).__name__} that cannot be read>"


def _reduced(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return (
            int(value)
            if abs(value) < 2**63
            else clean(str(int(value)) if abs(value) < 2**256 else "<large int>", MAX_TEXT)
        )
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return clean(str.__str__(value), MAX_TEXT)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if depth <= 0:
        return clean(value, 128)
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for n, (k, v) in enumerate(value.items()):
            if n >= MAX_ITEMS:
                out["…"] = f"{len(value) - n} more"
                break
            name = clean(k, 128)
            out[name] = "[redacted]" if _SECRET_KEY.search(name) else json_safe(v, depth - 1)
        return out
    if isinstance(value, list | tuple | set | frozenset):
        return _items(value, len(value), depth)
    return clean(value, MAX_TEXT)


def _items(values: Iterable[Any], length: int, depth: int) -> list[Any]:
    out: list[Any] = []
    for n, v in enumerate(values):
        if n >= MAX_ITEMS:
            out.append(f"… {length - n} more")
            break
        out.append(json_safe(v, depth - 1))
    return out
