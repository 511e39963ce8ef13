"""The boundary: naming what escapes (`coded`) and reading the name back (`read`, `code_of`)."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar, overload

import msgspec

from protocol.codes import Code
from protocol.errors import CARRIED, CODE_TRUST, CodedError, trust_of, walk
from protocol.keys import Key, Replays
from protocol.safe import text_of
from protocol.token import Trust, is_id, scan

HEADER: Final = "x-failsoft-code"
"""The HTTP header that carries a token."""
PROBLEM: Final = "application/problem+json"
"""Media type of a problem body (RFC 9457)."""
MAX_READ: Final = 1 << 20
"""Most characters of a text that are searched for a token: the head and the tail, half each."""
MAX_NESTED: Final = 8
"""Deepest mapping inside a mapping that is looked at."""

FOREIGN: Final = Code("UNKNOWN.FOREIGN")
"""What the token of a later release reads as; ``raw`` carries it on."""

_HANDLING = re.compile(r"^During handling of the above exception, another exception occurred:$", re.M)

T = TypeVar("T")
Namer = Callable[[BaseException], "Code | str | None"]

# Passed unchanged: what has a name already, and control flow that has to arrive as what it is.
# (AsyncioActorExit, named below, is how Ray ends an actor on purpose: ray.actor.exit_actor.)
_CONTROL: Final = (StopIteration, StopAsyncIteration, CodedError)


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
    except Exception:  # noqa: BLE001 - a property or mapping of a foreign type may raise anything
        return Reading()
    if replays is not None and found.id and replays.met(found.id) and found.trust < Trust.STRUCTURED:
        return msgspec.structs.replace(found, trust=min(found.trust, Trust.HEURISTIC))
    return found


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
    everything = walk(exc)
    for one in everything:
        if issubclass(type(one), CodedError):  # not isinstance, which asks a foreign __class__
            assert isinstance(one, CodedError)
            # Through Ray the instance is a dual of RayTaskError; its attributes answer all the same.
            return Reading(one.code, one.id, one.detail, one.data, one.trust, one.token)
    return read_texts(everything, key)


def read_texts(exceptions: Iterable[BaseException], key: Key = None) -> Reading:
    """The first code that the text of one of ``exceptions`` holds. Where such a text is a traceback (a
    process pool and Ray keep those of the other side), what was only being handled when the exception
    arose does not count, here as little as beside a live exception (`walk`)."""
    for one in exceptions:
        found = _read_text(_HANDLING.split(text_of(one))[-1], key)
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


def _read_mapping(thing: Mapping[Any, Any], key: Key, depth: int = MAX_NESTED) -> Reading:
    code, occurrence = thing.get("code"), thing.get("id") or thing.get("instance") or ""
    if isinstance(code, str):
        try:
            held = thing.get("data")
            data = dict(held) if isinstance(held, Mapping) else {}
            # Only the top is a carrier of ours; deeper, it is some other program's error object.
            trust = trust_of(data) if depth == MAX_NESTED else Trust.HEURISTIC
            id = occurrence if isinstance(occurrence, str) and is_id(occurrence) else ""
            return Reading(Code(code), id, text_of(thing.get("detail") or ""), data, trust)
        except ValueError:
            pass  # some other program's "code": its texts may still hold a token
    for value in list(thing.values())[:64]:
        if isinstance(value, str):
            found = _read_text(value, key)
            if found.raw:
                return found
        elif isinstance(value, Mapping) and depth > 0:
            found = _read_mapping(value, key, depth - 1)
            if found.code is not None:
                return found
    return Reading()


def _read_response(response: object, headers: Mapping[Any, Any], key: Key) -> Reading:
    from protocol.carriers.http_reply import read_response  # here, for it needs Reading from above

    return read_response(response, headers, key=key)


@overload
def coded(target: T, /) -> T: ...
@overload
def coded(*, code: Code | str = ..., name: Namer | None = ...) -> Callable[[T], T]: ...
def coded(target: Any = None, /, *, code: Code | str = "TASK.FAILED", name: Namer | None = None) -> Any:
    """Turn whatever escapes ``target`` into a CodedError at the raising side, where the information
    still exists.

    For functions, coroutines, generators, async generators, static and class methods, properties, whole
    classes (their methods, properties and ``__init__``) and Ray remote functions and actor classes.
    A CodedError passes unchanged; cancellation, KeyboardInterrupt, SystemExit and the end of an iteration
    stay what they are. An exception that carries a code already keeps it, and its occurrence (where it
    stood in mere text, the CodedError is believed no further than that text); otherwise ``name(exc)``
    names it, else ``code`` does. The status and the start of the body of an HTTP client's exception go
    into ``data``."""
    fallback = Code(code)

    def name_it(exc: Exception) -> CodedError | None:
        if issubclass(type(exc), _CONTROL) or type(exc).__name__ == "AsyncioActorExit":
            return None
        return named(exc, code=fallback, name=name)

    def decorate(it: Any) -> Any:
        return _wrap(it, name_it)

    return decorate if target is None else decorate(target)


def named(
    exc: BaseException,
    *,
    code: Code | str = "TASK.FAILED",
    name: Namer | None = None,
    detail: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> CodedError:
    """``exc`` as a CodedError: itself, if it is one; else under the code (and the occurrence) that it
    carries, else under ``name(exc)``, else under ``code``. A code that was read from mere text is believed
    no further than that text. ``data`` is added to what an HTTP client's exception knows of the reply."""
    from protocol.carriers.http_reply import facts_of  # here, for it needs Reading from above

    if issubclass(type(exc), CodedError):  # not isinstance, which asks a foreign __class__
        assert isinstance(exc, CodedError)
        return exc
    found = read(exc)
    facts = {**facts_of(exc), **(data or {})}
    if found.code is not None and found.trust < Trust.STRUCTURED:
        facts[CODE_TRUST] = found.trust.name.lower()  # or text that a model wrote would gain trust
        if found.code == FOREIGN:
            facts[CARRIED] = found.raw
    given = found.code or (name(exc) if name is not None else None) or code
    return CodedError.from_exception(exc, given, detail, facts, id=found.id or None)


NameIt = Callable[[Exception], "CodedError | None"]


def _wrap(it: Any, name_it: NameIt) -> Any:
    if isinstance(it, type):
        return _wrap_class(it, name_it)
    if isinstance(it, staticmethod | classmethod):
        return type(it)(_wrap(it.__func__, name_it))
    if isinstance(it, property):
        get, put, delete = (f and _wrap(f, name_it) for f in (it.fget, it.fset, it.fdel))
        return property(get, put, delete, it.__doc__)
    if isinstance(it, functools.cached_property):
        cached = functools.cached_property(_wrap(it.func, name_it))
        cached.attrname = it.attrname  # as __set_name__ would, which is called for a class body alone
        return cached
    metadata = getattr(it, "__ray_metadata__", None)
    if metadata is not None:  # a Ray ActorClass: it is exported at its first .remote(), from this class
        _wrap_class(metadata.modified_class, name_it)
        return it
    if hasattr(it, "remote") and callable(getattr(it, "_function", None)):  # a RemoteFunction, likewise
        it._function = _wrap(it._function, name_it)
        return it
    if inspect.isasyncgenfunction(it):
        return _wrap_async_generator(it, name_it)
    if inspect.isgeneratorfunction(it):
        return _wrap_generator(it, name_it)
    if inspect.iscoroutinefunction(it):

        @functools.wraps(it)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            try:
                return await it(*args, **kwargs)
            except Exception as exc:
                named = name_it(exc)
                if named is None:
                    raise
                raise named from named.__cause__

        return coroutine
    if not callable(it):
        raise TypeError(f"@coded takes a function, a class or a Ray actor class, not {type(it).__name__}")

    @functools.wraps(it)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return it(*args, **kwargs)
        except Exception as exc:
            named = name_it(exc)
            if named is None:
                raise
            raise named from named.__cause__

    return function


_WRAPPED_IN_CLASSES: Final = (staticmethod, classmethod, property, functools.cached_property)


def _wrap_class(cls: type, name_it: NameIt) -> type:
    # What is inherited as well: Ray's ActorClass holds a subclass of the class that the user wrote.
    for attribute in dir(cls):
        if attribute.startswith("__") and attribute not in ("__init__", "__call__"):
            continue
        value = inspect.getattr_static(cls, attribute)
        if isinstance(value, _WRAPPED_IN_CLASSES) or inspect.isfunction(value):
            setattr(cls, attribute, _wrap(value, name_it))
    return cls


def _wrap_generator(it: Callable[..., Iterator[Any]], name_it: NameIt) -> Any:
    @functools.wraps(it)
    def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            return (yield from it(*args, **kwargs))
        except Exception as exc:
            named = name_it(exc)
            if named is None:
                raise
            raise named from named.__cause__

    return generator


def _wrap_async_generator(it: Callable[..., AsyncGenerator[Any, Any]], name_it: NameIt) -> Any:
    @functools.wraps(it)
    async def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = it(*args, **kwargs)
        try:
            value = await anext(inner)
            while True:
                try:
                    sent = yield value
                except GeneratorExit:
                    raise  # closed: so is the inner one, below
                except BaseException as thrown:  # noqa: BLE001 - whatever was thrown in is the inner one's
                    value = await inner.athrow(thrown)
                else:
                    value = await inner.asend(sent)
        except StopAsyncIteration:
            return
        except Exception as exc:
            named = name_it(exc)
            if named is None:
                raise
            raise named from named.__cause__
        finally:
            await inner.aclose()

    return generator
