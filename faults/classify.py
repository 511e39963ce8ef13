"""classify: from an exception of any shape to what it means.

The order is: a CodedError's own code; the tables by class, most specific first; builtin exceptions;
then, where only text survived, a token in the text or the type name that a traceback ends with.
Structured data beats text, and every Fault says which it was.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import socket
import ssl
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, TypeGuard, TypeVar

from msgspec.structs import replace

from faults.decide import rank
from faults.fault import Blame, Fault, Outcome
from faults.http_faults import HTTP, MAX_RETRY_AFTER, retry_after, status_code
from faults.meanings import meaning
from faults.pool_faults import POOLS
from faults.ray_faults import NESTED, RAY, TASK_ERROR, TEXT_ONLY
from faults.text_faults import guess, line_of, plain
from faults.torch_faults import TORCH
from protocol import Code, CodedError, Family, Reading, Trust, read
from protocol.carriers.http_reply import read_exception
from protocol.errors import NESTED as NESTED_MARK
from protocol.errors import contents, trust_of
from protocol.keys import Key, Replays
from protocol.reading import Budget, read_texts, unless_replayed
from protocol.safe import CONTROL, MAX_TEXT, clean, text_of, type_name
from protocol.walking import came_through_ray, leaves_of, walk

TABLE: Final[dict[str, str]] = {**RAY, **HTTP, **POOLS, **TORCH}
# Cheap to ask first: most classes of most exceptions are builtins. (Not a cache by class: Ray makes a
# class for each failure, and a cache would keep them alive.)
_MODULES: Final = frozenset(name.rpartition(".")[0] for name in TABLE)
_TASK_ERROR: Final = TASK_ERROR.rpartition(".")[2]
MAX_HOPS: Final = 16
MAX_LEAVES: Final = 1024
"""Most leaves of a group, with those of groups that came through Ray in it, that are classified, and most
groups that are opened for it; one beyond that counts as unknown."""

_DISCONNECTED: Final = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, EOFError)
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# aiohttp gives a reply that it could not parse the status 400, which is not the request's fault.
_UNPARSABLE: Final = "aiohttp.http_exceptions"
_UNREACHABLE: Final = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

# What a group and a class really hold, whatever a subclass or a metaclass says: a group that lists
# itself would have no end.
_LEAVES: Final = BaseExceptionGroup.exceptions
_NAME: Final = type.__dict__["__name__"]

T = TypeVar("T")
_code: Final = lru_cache(maxsize=1024)(Code)


def classify(exc: BaseException, *, key: Key = None, replays: Replays | None = None) -> Fault:
    """What ``exc`` means. Never raises; an exception that nothing names is UNKNOWN.EXCEPTION, which
    is not retried. ``key`` is the run's key, with which tokens in text are verified. With ``replays``, an
    occurrence that was met before and now stands in text is a quotation, and never forgivable."""
    try:
        fault = _classify(*_peel(exc), key, exc, Budget())
    except CONTROL:
        raise
    except BaseException:  # noqa: BLE001 - an exception's properties may raise anything when they are read
        name = clean(_NAME.__get__(type(exc)), 256)
        return _make(_code("UNKNOWN.EXCEPTION"), Trust.NONE, f"{name}, whose attributes cannot be read")
    trust = unless_replayed(replays, fault.id, fault.trust)
    return fault if trust is fault.trust else replace(fault, trust=trust)


def _classify(inner: BaseException, hops: int, key: Key, outer: BaseException, budget: Budget) -> Fault:
    """``outer`` is the exception with Ray's wrapping, whose text has the causes that Ray dropped."""
    if _is(inner, BaseExceptionGroup):
        return _group(inner, hops, key, budget)
    if _is(inner, CodedError):
        return _coded(inner, hops)
    row, name = _row(inner)
    if row == "UPSTREAM.SERVER_ERROR" or (row is not None and _status_of(inner) is not None):
        return _http(inner, row, key)
    if row in TEXT_ONLY:
        return _from_text(inner, _code(_without_text(inner, row, hops)), key, budget)
    if row == "ACTOR.DIED":
        return _actor_died(inner, hops, key, budget)
    if row is not None:
        return _nest(_fault(_code(_without_text(inner, row, hops)), Trust.STRUCTURED, name, inner), hops)
    everything = walk(inner)
    carried = _carried(everything)
    if carried:
        return max((_coded(one, hops + came_through_ray(one)) for one in carried), key=rank)
    replied = _replied(everything, key)
    if replied is not None:
        return replied
    builtin = _builtin(inner)
    if builtin is not None:
        return _fault(_code(NESTED.get(builtin, builtin) if hops else builtin), Trust.STRUCTURED, name, inner)
    found = read_texts([*everything, outer] if hops else everything, key, budget)
    if found.code is not None:
        return _by_reading(found, inner)
    if hops:
        return _fault(_code("TASK.FAILED"), Trust.STRUCTURED, name, inner)
    return _fault(_code("UNKNOWN.EXCEPTION"), Trust.STRUCTURED, name, inner)


def classify_text(text: str, *, key: Key = None) -> Fault:
    """What a pasted traceback or log line means: by a token in it, else by the exception type that
    it ends with. Text can be forged, and the fault's trust says that it was text."""
    found = read(text, key=key)
    if found.code is not None:
        return _by_reading(found, plain(line_of(found.raw, text)))
    guess = _guess(text)
    if guess is not None:
        return guess
    return _make(_code("UNKNOWN.EXCEPTION"), Trust.NONE, clean(plain(text[-MAX_TEXT:]), MAX_TEXT))


def classify_status(status: int, headers: Mapping[Any, Any] | None = None, body: str = "") -> Fault | None:
    """What an HTTP reply means; None when its status is no failure."""
    code = status_code(status)
    if code is None:
        return None
    return _make(
        _code(code), Trust.STRUCTURED, clean(body, MAX_TEXT), status=status, retry_after=retry_after(headers)
    )


def name_of(exc: BaseException) -> Code | None:
    """The code that the tables have for ``exc``, None for none; for ``@coded(name=name_of)``, whose
    own ``code`` then names it. What only a text says is no name: as a code it would be believed."""
    fault = classify(exc)
    if fault.code.family is Family.UNKNOWN:
        return None
    if fault.trust >= Trust.SIGNED:
        return fault.code
    inner, hops = _peel(exc)
    row, _ = _row(inner)
    return None if row is None else _code(_without_text(inner, row, hops))


def _carried(everything: list[BaseException]) -> list[CodedError]:
    """The first CodedError; of a group that comes before it, those of its leaves."""
    for one in everything:
        if _is(one, CodedError):
            return [one]
        if _is(one, BaseExceptionGroup):
            below = (next((c for c in walk(leaf) if _is(c, CodedError)), None) for leaf in leaves_of(one))
            found = [error for error in below if error is not None]
            if found:
                return found
    return []


def _without_text(exc: BaseException, row: str, hops: int) -> str:
    """What it is by its row and its attributes alone."""
    if hops and _full(type(exc)) == "ray.exceptions.RayError":
        return "TASK.UNSERIALIZABLE"  # an attribute that cannot be pickled leaves a bare one
    if row == "ACTOR.DIED" and getattr(exc, "actor_init_failed", False):
        return "ACTOR.INIT_FAILED"
    return NESTED.get(row, row) if hops else row


def _is(exc: object, kind: type[T]) -> TypeGuard[T]:
    """isinstance, without asking the ``__class__`` that an exception may claim."""
    return issubclass(type(exc), kind)


def _peel(exc: BaseException) -> tuple[BaseException, int]:
    """What was raised beneath Ray's wrapping, and through how many hops it came."""
    hops = 0
    while hops < MAX_HOPS and any(
        c.__name__ == _TASK_ERROR and _full(c) == TASK_ERROR for c in type(exc).__mro__
    ):
        cause = vars(exc).get("cause")
        hops += 1
        if not _is(cause, BaseException) or cause is exc:
            break
        exc = cause
    return exc, hops


def _full(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _row(exc: BaseException) -> tuple[str | None, str]:
    for cls in type(exc).__mro__:
        row = TABLE.get(_full(cls)) if cls.__module__ in _MODULES else None
        if row is not None:
            return row, type_name(exc)
    return None, type_name(exc)


def _coded(error: CodedError, hops: int) -> Fault:
    code, id, detail, data = contents(error)
    status = data.get("status")
    after = data.get("retry_after")
    known = isinstance(after, int | float) and not isinstance(after, bool)
    made = _make(
        code,
        trust_of(data),
        detail,
        status=status if isinstance(status, int) and not isinstance(status, bool) else None,
        retry_after=float(min(max(0.0, after), MAX_RETRY_AFTER)) if known and after is not None else None,
        id=id,
    )
    return _nest(made, hops + (data.get(NESTED_MARK) is True))


def _nest(fault: Fault, hops: int) -> Fault:
    """Beneath a RayTaskError, what died or cannot be reached was called by our callee, which is alive."""
    if hops and fault.blame is Blame.CALLEE and fault.code.family in (Family.ACTOR, Family.NODE):
        return replace(fault, blame=Blame.NESTED)
    return fault


def _actor_died(exc: BaseException, hops: int, key: Key, budget: Budget) -> Fault:
    name = type_name(exc)
    if getattr(exc, "actor_init_failed", False):
        # Only the text of what __init__ raised survives: a token in it says what it was.
        found = read_texts([exc], key, budget)
        if found.code is not None:
            blame = Blame.NESTED if hops else Blame.CALLEE
            return replace(_by_reading(found, exc), blame=blame, outcome=Outcome.NOT_RUN)
        return _nest(_fault(_code("ACTOR.INIT_FAILED"), Trust.STRUCTURED, name, exc), hops)
    if getattr(exc, "preempted", False):
        return _fault(_code("NODE.PREEMPTED"), Trust.STRUCTURED, name, exc)
    return _fault(_code("ACTOR.NESTED_DIED" if hops else "ACTOR.DIED"), Trust.STRUCTURED, name, exc)


def _http(exc: BaseException, row: str | None, key: Key) -> Fault:
    status = _status_of(exc)
    found = read_exception(exc, key=key) if status is not None and status >= 500 else Reading()
    if found.code is not None:  # the server named it; a 4xx is named by its status, which says whose it is
        return replace(_by_reading(found, _evidence(type_name(exc), exc)), status=status)
    response = getattr(exc, "response", None)
    headers = getattr(response if response is not None else exc, "headers", None)
    code = status_code(status) if status is not None and row == "UPSTREAM.SERVER_ERROR" else row
    if type(exc.__cause__).__module__ == _UNPARSABLE:
        code = "TRANSPORT.PROTOCOL"
    return _make(
        _code(code or row or "UPSTREAM.SERVER_ERROR"),
        Trust.STRUCTURED,
        _evidence(type_name(exc), exc),
        status=status,
        retry_after=retry_after(headers if isinstance(headers, Mapping) else None),
    )


def _replied(everything: list[BaseException], key: Key) -> Fault | None:
    """By the first reply that names a failure, where an exception of no table has one (requests', a plain one
    raised from httpx's). Of a 4xx see `_http`."""
    for one in everything:
        found = read_exception(one, key=key)
        status = _status_of(one) if found.code is not None else None
        if status is not None and status >= 500:
            return replace(_by_reading(found, _evidence(type_name(one), one)), status=status)
    return None


def _status_of(exc: BaseException) -> int | None:
    response = vars(exc).get("response") if hasattr(exc, "__dict__") else None
    for status in (getattr(response, "status_code", None), vars(exc).get("status")):
        if isinstance(status, int) and 100 <= status <= 599:
            return int(status)
    return None


def _builtin(exc: BaseException) -> str | None:
    kind = type(exc)  # not isinstance: see _is
    if issubclass(kind, asyncio.CancelledError | concurrent.futures.CancelledError | KeyboardInterrupt):
        return "CANCEL.CALLER"
    if issubclass(kind, ConnectionRefusedError):
        return "TRANSPORT.CONNECT"
    if issubclass(kind, _DISCONNECTED):
        return "TRANSPORT.DISCONNECTED"
    if issubclass(kind, TimeoutError):
        return "TIMEOUT.DEADLINE"
    if issubclass(kind, ssl.SSLError):  # an OSError, as is the failure to resolve a name
        return "TRANSPORT.TLS"
    if issubclass(kind, socket.gaierror | socket.herror):
        return "TRANSPORT.CONNECT"
    if issubclass(kind, MemoryError):
        return "NODE.OUT_OF_MEMORY"
    if _is(exc, OSError):
        if exc.errno in _DISK_FULL:
            return "NODE.DISK_FULL"
        if exc.errno in _UNREACHABLE:
            return "TRANSPORT.CONNECT"
        return "NODE.IO" if exc.errno is not None else None
    return None


def _group(group: BaseExceptionGroup[BaseException], hops: int, key: Key, budget: Budget) -> Fault:
    """The leaf that allows the least: a group is retried only when every leaf may be, and it is known
    not to have run only when that is known of every leaf."""
    faults: list[Fault] = []
    groups = 0
    stack: list[tuple[BaseException, int]] = [(group, hops)]
    while stack:
        leaf, so_far = stack.pop()
        inner, more = _peel(leaf)
        is_group = _is(inner, BaseExceptionGroup)
        if (groups if is_group else len(faults)) == MAX_LEAVES:
            faults.append(
                _fault(_code("UNKNOWN.EXCEPTION"), Trust.NONE, f"more than {MAX_LEAVES} leaves", leaf)
            )
            break
        if is_group:  # here, not by calling this again: what it holds counts as well
            groups += 1  # a RayTaskError in it may have it as its cause: without a leaf, and without an end
            stack.extend((one, so_far + more) for one in reversed(_LEAVES.__get__(inner)))
            continue
        faults.append(_classify(inner, so_far + more, key, leaf, budget))
    strictest = max(faults, key=rank)
    return replace(
        strictest,
        outcome=strictest.outcome if len({f.outcome for f in faults}) == 1 else Outcome.UNKNOWN,
        trust=min(f.trust for f in faults),
        retry_after=max((f.retry_after for f in faults if f.retry_after is not None), default=None),
    )


def _from_text(exc: BaseException, row: Code, key: Key, budget: Budget) -> Fault:
    found = read_texts([exc], key, budget)
    if found.code is not None:
        return _by_reading(found, exc)
    return _guess(text_of(exc)) or _fault(row, Trust.STRUCTURED, type_name(exc), exc)


def _guess(text: str) -> Fault | None:
    guessed = guess(text)
    if guessed is None:
        return None
    code, status, line = guessed
    return _make(_code(code), Trust.HEURISTIC, clean(line, MAX_TEXT), status=status)


def _by_reading(found: Reading, thing: object) -> Fault:
    assert found.code is not None
    return _make(found.code, found.trust, clean(thing, MAX_TEXT), id=found.id)


def _fault(code: Code, trust: Trust, name: str, exc: BaseException) -> Fault:
    return _make(code, trust, _evidence(name, exc))


def _evidence(name: str, exc: BaseException) -> str:
    return clean(f"{name}: {text_of(exc)}", MAX_TEXT)


def _make(
    code: Code,
    trust: Trust,
    evidence: str,
    *,
    status: int | None = None,
    retry_after: float | None = None,
    id: str = "",
) -> Fault:
    kind, blame, outcome = meaning(code)
    return Fault(kind, code, blame, outcome, trust, retry_after, status, evidence, id)
