"""Reading a code back, from whatever carries one: `read` and `code_of`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from protocol.catalogue import STRICTNESS, catalogue
from protocol.codes import Code
from protocol.errors import CARRIED, CODE_TRUST, CodedError, contents, token_of, trust_of
from protocol.keys import Key, Replays
from protocol.safe import CONTROL, text_of
from protocol.token import Trust, is_id, scan
from protocol.walking import leaves_of, walk

MAX_READ: Final = 1 << 20
"""Most characters of a text that are searched for a token: the head and the tail, half each."""
MAX_NESTED: Final = 8
"""Deepest mapping inside a mapping that is looked at."""

MAX_VALUES: Final = 256
"""Most values of a mapping, and of those inside of it, that are looked at."""

_MAX_OPENED: Final = 32
"""Most groups of exceptions whose leaves are compared."""

FOREIGN: Final = Code("UNKNOWN.FOREIGN")
"""What the token of a later release reads as; ``raw`` carries it on."""

_DIRECT_CAUSE = re.compile(
    r"^The above exception was the direct cause of the following exception:$", re.MULTILINE
)
_HANDLING = re.compile(r"^During handling of the above exception, another exception occurred:$", re.MULTILINE)


class Reading(msgspec.Struct, frozen=True):
    """What was read back. ``code`` is None when nothing was found; ``raw`` is the token as it stood,
    which keeps tokens of later releases readable."""

    code: Code | None = None
    id: str = ""
    detail: str = ""
    data: dict[str, Any] = {}
    trust: Trust = Trust.NONE
    raw: str = ""


def code_of(thing: object, *, key: Key = None) -> Code | None:
    """The code that ``thing`` carries, or None. See `read`."""
    return read(thing, key=key).code


def read(thing: object, *, key: Key = None, replays: Replays | None = None) -> Reading:
    """Read a code back from an exception of any shape, an ExceptionGroup, an HTTP response (httpx,
    requests and aiohttp have the attributes it looks at), an event or problem as a mapping, a log
    line or plain text. Structured data beats text, and the reading says which it was. Never raises.
    A mapping is taken at its word: give it what came over a carrier of yours, never what a model wrote.

    Tokens in text are verified with ``key``, else with the keys that the process holds
    (`protocol.keys.hold`). With ``replays``, an occurrence that was met before and now stands in text
    is a quotation, and believed no further than a guess."""
    try:
        found = _read(thing, key)
    except CONTROL:
        raise
    except BaseException:  # noqa: BLE001 - a property or mapping of a foreign type may raise anything
        return Reading()
    return msgspec.structs.replace(found, trust=unless_replayed(replays, found.id, found.trust))


def _read(thing: object, key: Key) -> Reading:
    if isinstance(thing, BaseException):
        return _read_exception(thing, key)
    if isinstance(thing, Mapping):
        return _read_mapping(thing, key)
    if isinstance(thing, bytes | bytearray):
        return _read_bytes(thing, key)
    if isinstance(thing, str):
        return _read_text(thing, key)
    headers = getattr(thing, "headers", None)
    if isinstance(headers, Mapping):
        return _read_response(thing, headers, key)
    return Reading()


def _read_exception(exc: BaseException, key: Key) -> Reading:
    from protocol.carriers.http_reply import read_exception  # here, for it needs Reading from above

    named = _structured(exc, set())
    if named is not None:
        return named
    everything = walk(exc)
    for one in everything:  # what an HTTP client raises for a status holds the reply
        found = read_exception(one, key=key)
        if found.code is not None:
            return found
    return read_texts(everything, key)


def _structured(exc: BaseException, opened: set[int]) -> Reading | None:
    """By the outermost CodedError; of a group by the strictest among its leaves. ``opened`` are the groups
    (by `id`) that were looked into: each once, and no more than `_MAX_OPENED`."""
    for one in walk(exc):
        if issubclass(type(one), CodedError):  # not isinstance, which asks a foreign __class__
            return _of(one)
        if issubclass(type(one), BaseExceptionGroup) and id(one) not in opened and len(opened) < _MAX_OPENED:
            opened.add(id(one))
            leaves = [found for leaf in leaves_of(one) if (found := _structured(leaf, opened)) is not None]
            if leaves:
                return max(leaves, key=strictness)
    return None


def _of(error: BaseException) -> Reading:
    assert isinstance(error, CodedError)
    # Through Ray the instance is a dual of RayTaskError; its attributes answer all the same.
    code, id, detail, data = contents(error)
    return Reading(code, id, detail, data, trust_of(data), token_of(code, id, data))


def trust_facts(found: Reading) -> dict[str, Any]:
    """What the data of a CodedError must say whose code is ``found``'s: how far it may be believed where
    that is less than structured, or text that a model wrote would gain trust on its way; and the token of a
    later release, which is carried on."""
    if found.code is None or found.trust >= Trust.STRUCTURED:
        return {}
    carried = {CARRIED: found.raw} if found.code == FOREIGN else {}
    return {CODE_TRUST: found.trust.name.lower(), **carried}


def unless_replayed(replays: Replays | None, id: str, trust: Trust) -> Trust:
    """``trust``, but no more than a guess for an occurrence that was met before and now stands in text."""
    if replays is not None and id and replays.met(id) and trust < Trust.STRUCTURED:
        return min(trust, Trust.HEURISTIC)
    return trust


def strictness(found: Reading) -> int:
    """How little the code that was read allows (`protocol.catalogue.STRICTNESS`)."""
    assert found.code is not None
    return STRICTNESS.index(catalogue.entry(found.code).advice)


class Budget:
    """How many characters of an exception's texts, and of those below it, are still searched."""

    def __init__(self, characters: int = MAX_READ) -> None:
        self.left = characters

    def take(self, text: str) -> str:
        """Head and tail of ``text``, as far as the budget goes."""
        if len(text) > self.left:
            half = self.left // 2
            text = f"{text[:half]}\n{text[-half:]}" if half else ""
        self.left -= min(self.left, len(text))
        return text


def read_texts(exceptions: Iterable[BaseException], key: Key = None, budget: Budget | None = None) -> Reading:
    """The first code that the text of one of ``exceptions`` holds. Where such a text is a traceback (a
    process pool and Ray keep those of the other side), it is read as the exceptions themselves would be
    (`walk`): the outermost that has a code, then its causes, and never what was only being handled."""
    budget = budget or Budget()
    for one in exceptions:
        if budget.left <= 0:
            break
        chain = _DIRECT_CAUSE.split(_HANDLING.split(budget.take(text_of(one)))[-1])
        for text in reversed(chain):  # Python prints a cause first
            found = _read_text(text, key)
            if found.raw:
                return found
    return Reading()


def _read_text(text: str, key: Key) -> Reading:
    if len(text) > MAX_READ:
        text = f"{text[: MAX_READ // 2]}\n{text[-MAX_READ // 2 :]}"
    tokens = scan(text, key=key)
    if not tokens:
        return Reading()
    # The first token is the first failure: Python prints a cause above its effect.
    token = tokens[0]
    code = token.code or FOREIGN
    return Reading(code, token.id, "", {}, token.trust, token.raw)


def _read_bytes(body: bytes | bytearray, key: Key) -> Reading:
    if len(body) > MAX_READ:
        body = b"\n".join((body[: MAX_READ // 2], body[-MAX_READ // 2 :]))
    return _read_text(bytes(body).decode("utf-8", "replace"), key)


def _read_mapping(
    thing: Mapping[Any, Any], key: Key, depth: int = MAX_NESTED, places: Iterator[int] | None = None
) -> Reading:
    places = iter(range(MAX_VALUES)) if places is None else places  # shared with what lies below
    code, occurrence = thing.get("code"), thing.get("id") or thing.get("instance") or ""
    if isinstance(code, str):
        try:
            held = thing.get("data")
            data = dict(islice(held.items(), MAX_VALUES)) if isinstance(held, Mapping) else {}
            # Only the top is a carrier of ours; deeper, it is some other program's error object.
            trust = trust_of(data) if depth == MAX_NESTED else Trust.HEURISTIC
            id = occurrence if isinstance(occurrence, str) and is_id(occurrence) else ""
            return Reading(Code(code), id, text_of(thing.get("detail") or ""), data, trust)
        except ValueError:
            pass  # some other program's "code": its texts may still hold a token
    for _, value in zip(places, thing.values(), strict=False):
        if isinstance(value, str):
            found = _read_text(value, key)
            if found.raw:
                return found
        elif isinstance(value, Mapping) and depth > 0:
            found = _read_mapping(value, key, depth - 1, places)
            if found.code is not None:
                return found
    return Reading()


def _read_response(response: object, headers: Mapping[Any, Any], key: Key) -> Reading:
    from protocol.carriers.http_reply import read_response  # here, for it needs Reading from above

    return read_response(response, headers, key=key)
