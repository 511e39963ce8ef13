"""Tokens: a code's form inside free text.

On two paths through Ray only text survives: an exception raised in an actor's ``__init__``
arrives as the text of an ActorDiedError, and an exception that pickles but will not load arrives
as the text of an UnserializableException. The token is made for those and for log lines::

    FS1.<FAMILY>.<REASON>.<id8>.<mac8>

Its alphabet (letters, digits, ``_`` and ``.``) needs no escaping in JSON, repr, a shell, HTML, a
URL, an HTTP header, a format string or an Alertmanager label, and Rich markup does not eat it.
``id8`` names the occurrence. ``mac8`` is BLAKE2s (RFC 7693) over the rest, keyed when the run has
a key, a plain checksum otherwise; so a cut or mutated token reads as no token, never as another
code.

Text that a model, a tool or a server produced can hold a token too. `defuse` makes it unreadable
at the one place where such text is embedded into ours.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2s
from typing import Any, Final

from protocol.codes import Code, Family
from protocol.keys import Key, Keyring, held

VERSION: Final = "FS1"
MAX_TOKEN: Final = 80
"""Longest token in bytes: 4 + 12 + 1 + 40 + 18 = 75 for today's longest family and reason."""

_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base32: no I, L, O, U
_PAIRS: Final = [a + b for a in _CROCKFORD for b in _CROCKFORD]  # ten bits at a time
_B32: Final = "[0-9a-hjkmnp-tv-z]"
_REST: Final = rf"\.[a-z]{{1,16}}\.[a-z][a-z0-9_]{{0,39}}\.{_B32}{{8}}\.{_B32}{{8}}"
# Both are run on lower-cased text: the literal they begin with is what makes the search fast.
# The end must be an end: a longer run of the alphabet is a glued or a cut neighbour.
_TOKEN = re.compile(rf"fs[0-9]{{1,3}}{_REST}(?![a-z0-9_]|\.[a-z0-9_])")
# Where a token could begin, whatever stands around it: what `defuse` breaks.
_START = re.compile(rf"fs[0-9]{{1,3}}(?={_REST})")
# A token may follow an escape that ends in a letter or digit: "\n" in a repr, %0A, \x1b[38;2;9;9;9m;
# and each of them may have been escaped again, for a URL or a JSON text.
_PERCENT: Final = "%(?:25){0,4}"
_BACKSLASH: Final = rf"(?:\\|{_PERCENT}5[Cc])"
_ESCAPE = re.compile(
    rf"(?:{_BACKSLASH}(?:[abfnrtv0]|[0-7]{{3}}|[xX][0-9A-Fa-f]{{2}}|[uU](?:[0-9A-Fa-f]{{4}}|[0-9A-Fa-f]{{8}}))"
    rf"|{_PERCENT}[0-9A-Fa-f]{{2}})\Z"
)
_NUMBERS: Final = rf"(?:\[|{_PERCENT}5[Bb])(?:[0-9;]|{_PERCENT}3[Bb]){{0,40}}"
_COLOUR = re.compile(rf"{_NUMBERS}m\Z")
_SEQUENCE = re.compile(
    rf"(?:\x1b|{_PERCENT}1[Bb]|{_BACKSLASH}(?:[xX]1[Bb]|[uU](?:0000)?001[Bb]|033)){_NUMBERS}[A-Za-z]\Z"
)
_ESCAPE_LENGTH: Final = 24
_COLOUR_LENGTH: Final = 128
_CHECKED: Final = 1024
"""Shapes whose check is remembered within one scan: a text that repeats one costs one check."""
# The two characters that become other ones, of which one is plain ASCII, in lower case: K and İ.
_LOWERS: Final = {0x212A: "\u0131", 0x130: "\u0131"}


class Trust(IntEnum):
    """How much a reading may be believed, weakest first. Nothing forgiving (a free retry, a masked
    sample) may be decided on less than ``SIGNED``."""

    NONE = 0
    HEURISTIC = 1
    CHECKSUMMED = 2
    SIGNED = 3
    STRUCTURED = 4


@dataclass(frozen=True, slots=True)
class Token:
    """One token found in a text. ``code`` is None when family or version come from a future
    release; ``raw`` then carries it on unchanged."""

    code: Code | None
    id: str
    trust: Trust
    raw: str


def new_id() -> str:
    """A fresh occurrence id: 40 random bits as 8 characters of Crockford base32."""
    return _base32(os.urandom(5))


def is_id(text: str) -> bool:
    """Whether ``text`` is an occurrence id, in capitals."""
    return len(text) == 8 and not text.strip(_CROCKFORD)


def is_token_shaped(text: str) -> bool:
    """Whether ``text`` is a token and nothing else, by its shape alone."""
    return text.isascii() and _TOKEN.fullmatch(text.lower()) is not None


def mint(code: Code | str, id: str | None = None, *, key: bytes | None = None) -> str:
    """The token for ``code``, signed with ``key`` (1 to 32 bytes); with the process's own key
    (`protocol.keys.hold`) when none is given; with none at all for ``b""``.

    Raises ValueError for a malformed code or id."""
    code = Code(code)
    id = new_id() if id is None else id.upper()
    if not is_id(id):
        raise ValueError(f"{id!r} is not an occurrence id: 8 characters of Crockford base32")
    if key is None:
        ring = held()
        key = ring.current if ring is not None else b""
    body = f"{VERSION}.{code}.{id}"
    return f"{body}.{_mac(body, key)}"


def scan(text: str, *, key: Key = None) -> list[Token]:
    """Every genuine token in ``text``, in order, each occurrence once (a nested traceback repeats
    the same token; the id tells). Verified with ``key``, else with the process's own keys
    (`protocol.keys.hold`), where it holds any. Linear in the length of the text; never raises."""
    keys = _keys(key)
    found: dict[str, Token] = {}
    checked: dict[str, Token | None] = {}
    for match in _TOKEN.finditer(_lowered(text)):
        start, end = match.span()
        raw = text[start:end].upper()
        if raw in found:
            continue
        if raw in checked:
            token = checked[raw]
        else:
            token = _check(raw, keys)
            if len(checked) < _CHECKED:
                checked[raw] = token
        if token is not None and _may_begin(text, start):
            found[raw] = token
    return list(found.values())


def defuse(text: str) -> str:
    """``text`` with every token-shaped piece made unreadable (``FS1.`` becomes ``FS1:``), whatever
    its key, and nothing else changed. Idempotent. For foreign text, where it is embedded."""
    if len(text) < 24:
        return text
    out: list[str] = []
    done = 0
    for match in _START.finditer(_lowered(text)):
        out += (text[done : match.end()], ":")
        done = match.end() + 1
    out.append(text[done:])
    return "".join(out)


def _lowered(text: str) -> str:
    """``text`` in lower case, each character at its place and none become an ASCII one."""
    if text.isascii():
        return text.lower()
    if "\u0130" in text or "\u212a" in text:
        text = text.translate(_LOWERS)
    return text.lower()


def _base32(five: bytes) -> str:
    n = int.from_bytes(five, "big")
    return _PAIRS[n >> 30] + _PAIRS[n >> 20 & 1023] + _PAIRS[n >> 10 & 1023] + _PAIRS[n & 1023]


@lru_cache(maxsize=8)
def _hasher(key: bytes) -> Any:
    return blake2s(key=key, person=b"failsoft", digest_size=5)


def _digest(body: bytes, key: bytes) -> bytes:
    hasher = _hasher(key).copy()
    hasher.update(body)
    return bytes(hasher.digest())


def _mac(body: str, key: bytes) -> str:
    return _base32(_digest(body.encode("ascii"), key))


def _is_mac(mac: str, body: bytes, key: bytes) -> bool:
    digest = _digest(body, key)
    # The first two characters tell nearly all near-tokens apart, at half the cost.
    return mac[:2] == _PAIRS[digest[0] << 2 | digest[1] >> 6] and mac == _base32(digest)


def _keys(key: Key) -> tuple[bytes, ...]:
    ring = held() if key is None else key
    if ring is None:
        return ()
    return ring.all if isinstance(ring, Keyring) else ((ring,) if ring else ())


def _may_begin(text: str, start: int) -> bool:
    if start == 0:
        return True
    before = text[start - 1]
    if not before.isascii() or not (before.isalnum() or before in "_."):
        return True
    if _ESCAPE.search(text, max(0, start - _ESCAPE_LENGTH), start):
        return True
    far = max(0, start - _COLOUR_LENGTH)
    if before == "m" and _COLOUR.search(text, far, start):
        return True
    ends_of_escape = ("\x1b", "1B", "1b", "033")
    escaped = max(text.rfind(end, far, start) for end in ends_of_escape)
    return escaped >= 0 and _SEQUENCE.search(text, max(far, escaped - 24), start) is not None


def _check(raw: str, keys: tuple[bytes, ...]) -> Token | None:
    body, mac = raw[:-9], raw[-8:]
    encoded = body.encode("ascii")
    for key in keys:
        if _is_mac(mac, encoded, key):
            trust = Trust.SIGNED
            break
    else:
        if not _is_mac(mac, encoded, b""):
            return None
        trust = Trust.CHECKSUMMED
    version, family, reason, id = body.split(".")
    code: Code | None = None
    if version == VERSION and family in Family.__members__:
        try:
            code = Code(f"{family}.{reason}")
        except ValueError:  # a reason that this release would refuse: the family still speaks
            code = Code(f"{family}.UNKNOWN")
    return Token(code, id, trust, raw)
