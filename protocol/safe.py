"""Making values safe to carry: capped, JSON-safe, and without secrets.

An exception message of 20 MB arrives whole through Ray, and headers with a bearer token are
attributes of httpx's exceptions. Whatever a CodedError or an event carries goes through here.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, cast

MAX_DETAIL: Final = 8192
"""Longest detail text, in characters."""
MAX_TEXT: Final = 2048
"""Longest text of one cause, or of one value in data, in characters."""
MAX_ITEMS: Final = 64
MAX_DEPTH: Final = 4
MAX_DATA: Final = 256 * 1024
"""Most characters of all of the data of a failure together, about."""
CONTROL: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What always passes. Anything else that a foreign object raises while it is read is the object's own
affair, no Exception (pyo3's PanicException) included."""
PROMPT_BUDGET: Final = "FAILSOFT_PROMPT_BUDGET"
"""Environment variable: most characters of a prompt, a completion or a reply's body that a failure
carries, 0 for none (unset: `MAX_TEXT`). `set_prompt_budget` says the same in a program."""

T = TypeVar("T", bound=BaseException)

_SECRET_KEY = re.compile(
    r"authorization|(?<![a-z])auth$|cookie|password|passwd|passphrase|secret|token$"
    r"|(?:api|private|access|subscription)[-_]?key|credential",
    re.IGNORECASE,
)
# The first of a pair has to be a name: there it may be any text.
_SECRET_NAME = re.compile(rf"[\w.-]{{0,64}}(?:{_SECRET_KEY.pattern})[\w.-]{{0,64}}\Z", re.IGNORECASE)
# What the fields of requests and replies are called that hold what users wrote and models answered.
_PROMPT_KEY = re.compile(
    r"(?:prompts?|messages|inputs?|input_ids|token_ids|output_ids|text|completions?|outputs?|response|body"
    r"|content)\Z",
    re.IGNORECASE,
)
# A password may hold an unescaped @, stand alone (redis://:secret@host) or be the user (a token).
_URL_USER = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^\s/'\"<>]+@", re.IGNORECASE)
# Also of a URL that stands in another one's query. Azure signs with sig=, Google's keys are key=.
_URL_QUERY = re.compile(
    r"((?:[?&#]|%3F|%26)(?:[^=&\s]{0,64}(?:token|secret|passw(?:or)?d|pwd|api[-_]?key|signature)|sig|key|auth)"
    r"(?:=|%3D))[^&\s'\"]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE)
# Between a name and its value, as text, repr or JSON (in JSON in JSON) have it: ": ", "', '", "\": \"".
_IS: Final = r"(?:\\*['\"]?\s{0,4}[:=]|\\*['\"],)\s{0,4}b?(?:\\*['\"])?"
_HEADER = re.compile(
    rf"(\b(?:proxy-)?(?:authorization|x-[a-z0-9-]{{0,40}}(?:token|key)|(?:api|subscription)-key){_IS})"
    r"(?!bearer\b|basic\b)(?:(?:token|apikey|digest|negotiate)\s{1,4})?[^\s'\"\\,;}&]{4,}",
    re.IGNORECASE,
)
_COOKIE = re.compile(rf"(\b(?:set-)?cookie{_IS})[^\s'\"\\][^\r\n'\"\\]*", re.IGNORECASE)
_OPTION = re.compile(
    rf"((?<![\w-])--[a-z0-9_-]{{0,40}}(?:api[-_]?key|token|secret|password)(?:{_IS}|\s{{1,4}}))[^\s'\"-][^\s'\"]{{3,}}",
    re.IGNORECASE,
)
# Variables that hold a secret, and how an environment is printed: NAME=value, environ({'NAME': 'value'}).
_NAMED_SO: Final = (
    r"[A-Z][A-Z0-9_]{0,60}(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_[A-Z0-9_]{0,20})?"
)
_ENVIRONMENT = re.compile(rf"(\b{_NAMED_SO}{_IS})[^\s'\"\\,;}}&]{{4,}}")
_SECRET_VARIABLE = re.compile(rf"{_NAMED_SO}\Z")
_ENVIRONMENT_AGE: Final = 5.0
"""Seconds for which the values of the environment's secrets are remembered."""


def _from_environment() -> int:
    text = os.environ.get(PROMPT_BUDGET, "").strip()
    return int(text) if text.isdecimal() else MAX_TEXT if not text else 0  # unreadable: the cautious one


_prompt_budget = _from_environment()


def set_prompt_budget(characters: int) -> None:
    """Carry at most so many characters of a prompt, a completion or a reply's body; 0 for none. For this
    process; the environment variable `PROMPT_BUDGET` reaches the actors of a job as well.

    Raises ValueError for a negative number."""
    global _prompt_budget
    if characters < 0:
        raise ValueError(f"a prompt budget is 0 characters or more, not {characters}")
    _prompt_budget = characters


def within_budget(text: str) -> str:
    """``text`` that users or models wrote, as far as the prompt budget allows."""
    if len(text) <= _prompt_budget:
        return text
    if _prompt_budget < 64:
        return f"[{len(text)} characters left out]"
    return cap(text, _prompt_budget)


def cap(text: str, limit: int = MAX_DETAIL) -> str:
    """``text`` within ``limit`` characters: head and tail kept, the cut named in between."""
    if len(text) <= limit:
        return text
    half = (limit - 40) // 2
    return f"{text[:half]} …[{len(text) - 2 * half} characters cut]… {text[-half:]}"


def scrub(text: str) -> str:
    """``text`` without the secrets that have a recognisable place (URL user info, query tokens, the
    headers that authorize, cookies, variables named like secrets) and without the values of this
    process's own secret variables, wherever they stand."""
    # Most texts hold none of these: looking for a word is a hundred times cheaper than the patterns.
    if "://" in text and "@" in text:
        text = _URL_USER.sub(r"\1[redacted]@", text)
    if ("=" in text and ("?" in text or "&" in text or "#" in text)) or "%3" in text:
        text = _URL_QUERY.sub(r"\1[redacted]", text)
    lowered = text.lower()
    if "bearer" in lowered or "basic" in lowered:
        text = _BEARER.sub(r"\1 [redacted]", text)
    if "authorization" in lowered or "-key" in lowered or "-token" in lowered:
        text = _HEADER.sub(r"\1[redacted]", text)
    if "--" in text:
        text = _OPTION.sub(r"\1[redacted]", text)
    if "cookie" in lowered:
        text = _COOKIE.sub(r"\1[redacted]", text)
    if "KEY" in text or "TOKEN" in text or "SECRET" in text or "PASSW" in text or "CREDENTIAL" in text:
        text = _ENVIRONMENT.sub(r"\1[redacted]", text)
    for value in _environment_secrets():
        if value in text:
            text = text.replace(value, "[redacted]")
    return text


_secrets: tuple[float, tuple[str, ...]] = (-math.inf, ())


def _environment_secrets() -> tuple[str, ...]:
    global _secrets
    now = time.monotonic()
    if now - _secrets[0] > _ENVIRONMENT_AGE:
        # Not items(), which raises KeyError when another thread removes a variable meanwhile.
        named = (os.environ.get(name, "") for name in os.environ if _SECRET_VARIABLE.match(name))
        # Short ones would redact ordinary words.
        _secrets = (now, tuple(sorted((v for v in named if len(v) >= 8), key=len, reverse=True)))
    return _secrets[1]


def clean(text: object, limit: int = MAX_DETAIL) -> str:
    """Text that may be carried: capped, scrubbed, and valid UTF-8 (lone surrogates replaced)."""
    plain = text if type(text) is str else text_of(text)
    if len(plain) <= 2 * _SCRUBBED:
        out = cap(scrub(plain), limit)
    else:
        # Only what is near the ends is scrubbed, so that the cost is bounded, but far more than is kept: a
        # secret that this cut halves, and that cannot be recognised any more, is cut off altogether.
        half = (limit - 40) // 2
        head, tail = scrub(plain[:_SCRUBBED])[:half], scrub(plain[-_SCRUBBED:])[-half:]
        out = f"{head} …[{len(plain) - 2 * half} characters cut]… {tail}"
    return out if out.isascii() else out.encode("utf-8", "replace").decode("utf-8")


_SCRUBBED: Final = 4 * MAX_DETAIL


def text_of(value: object) -> str:
    """``str(value)``, and a plain word instead when that raises: the text of a failure must never
    be a failure of its own."""
    try:
        return str.__str__(str(value))
    except CONTROL:
        raise
    except BaseException as exc:  # noqa: BLE001 - any __str__ may raise anything; the type is what we keep
        return f"<{name_of_type(type(value))} whose str() raised {name_of_type(type(exc))}>"


def own_attribute(exc: BaseException, name: str) -> Any:
    """What the instance itself has under ``name``, whatever its class says; None where it has none, or it
    cannot be read."""
    try:
        return vars(exc).get(name)
    except CONTROL:
        raise
    except BaseException:  # noqa: BLE001 - a __dict__ of a foreign exception may raise anything
        return None


def printed_length(exc: BaseException) -> int:
    """How many characters the text and the notes of an exception have, about, as Python prints them."""
    notes = own_attribute(exc, "__notes__")
    return len(text_of(exc)) + (0 if notes is None else len(text_of(notes)))


def name_of_type(cls: type) -> str:
    """A class's own name, whatever its metaclass says."""
    return str.__str__(_NAME.__get__(cls))


def type_name(exc: BaseException) -> str:
    """The full name of an exception's type, whatever its metaclass says; builtins without their module."""
    kind = type(exc)
    module, name = _MODULE.__get__(kind), str.__str__(_QUALNAME.__get__(kind))
    return name if type(module) is not str or module == "builtins" else f"{module}.{name}"


def mro_of(cls: type) -> tuple[type, ...]:
    """A class and its bases, whatever its metaclass says."""
    found: tuple[type, ...] = _MRO.__get__(cls)
    return found


_NAME: Final = type.__dict__["__name__"]
_MODULE: Final = type.__dict__["__module__"]
_QUALNAME: Final = type.__dict__["__qualname__"]
_MRO: Final = type.__dict__["__mro__"]


def blank(cls: type[T]) -> T | None:
    """An empty instance of a class of exceptions, whose own ``__new__`` may want arguments; None where there
    can be none: a group of exceptions is none without them."""
    for base in (Exception, *mro_of(cls)):  # Exception's makes all but OSErrors and the like
        try:
            made = cast(Any, base).__new__(cls)
        except Exception:  # noqa: BLE001, S112 - a user's __new__ may raise anything
            continue
        if type(made) is cls:
            return made
    return None


def json_safe(value: Any, depth: int = MAX_DEPTH) -> Any:
    """``value`` reduced to what JSON can hold, bounded in depth, items and text, secrets redacted
    by key. Numbers that JSON lacks (nan, inf) become text. Never raises."""
    return _Reducer().reduce(value, depth)


class _Reducer:
    """One reduction, with its budget."""

    def __init__(self) -> None:
        self._left = MAX_DATA

    def reduce(self, value: Any, depth: int) -> Any:
        if self._left <= 0:
            return "…"
        self._left -= 16
        try:
            reduced = self._reduced(value, depth)
        except CONTROL:
            raise
        except BaseException:  # noqa: BLE001 - a foreign container or property may raise anything
            return f"<{name_of_type(type(value))} that cannot be read>"
        if isinstance(reduced, str):
            self._left -= len(reduced)
        return reduced

    def _reduced(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if abs(value) < 2**63:
                return int(value)
            return clean(str(int(value)) if abs(value) < 2**256 else "<large int>", MAX_TEXT)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if isinstance(value, str):
            return clean(str.__str__(value), MAX_TEXT)
        if isinstance(value, bytes | bytearray | memoryview):
            return f"<{len(value)} bytes>"
        if depth <= 0 and isinstance(value, Mapping | list | tuple | set | frozenset):
            return f"<{name_of_type(type(value))} of {len(value)}>"  # its text would show what keys redact
        if depth <= 0:
            return clean(value, 128)
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            return self._items(value, len(value), depth)
        return clean(value, MAX_TEXT)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        # As Kubernetes has the environment, and HAR headers: {"name": …, "value": …}.
        named = value.get("name") if isinstance(value, dict) else None
        secret = ("value",) if isinstance(named, str) and _SECRET_KEY.search(named[:128]) else ()
        for n, (k, v) in enumerate(value.items()):
            if n >= MAX_ITEMS:
                out["…"] = f"{len(value) - n} more"
                break
            name = clean(k, 128)
            self._left -= len(name)
            if _SECRET_KEY.search(name) or name in secret:
                out[name] = "[redacted]"
            else:
                out[name] = self._value(name, v, depth - 1)
        return out

    def _value(self, name: str, value: Any, depth: int) -> Any:
        reduced = self.reduce(value, depth)
        prompt = _prompt_budget < MAX_TEXT and _PROMPT_KEY.match(name) is not None
        if not prompt or isinstance(reduced, int | float | None):
            return reduced
        return within_budget(reduced if isinstance(reduced, str) else str(reduced))

    def _items(self, values: Iterable[Any], length: int, depth: int) -> list[Any]:
        out: list[Any] = []
        for n, v in enumerate(values):
            if n >= MAX_ITEMS:
                out.append(f"… {length - n} more")
                break
            named = n > 0 and _names_secret(out[-1], pair=length == 2)
            out.append("[redacted]" if named else self.reduce(v, depth - 1))
        return out


def _names_secret(before: Any, *, pair: bool) -> bool:
    """Whether an item of a list names the secret that comes next: headers are often a list of pairs, and a
    command line has options."""
    if not isinstance(before, str) or not (pair or before.startswith("--")):
        return False
    return _SECRET_NAME.match(before) is not None
