"""CodedError: the one exception that crosses boundaries.

It has one picklable shape, equal after a round trip, whoever subclasses it: pickling keeps the
state and never calls ``__init__`` again, which is where most exceptions lose their identity
(ray#28436, ray#31806, ray#46408: keyword-only or several required arguments).
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import msgspec

from protocol.codes import Code
from protocol.safe import (
    CONTROL,
    MAX_TEXT,
    blank,
    clean,
    json_safe,
    mro_of,
    name_of_type,
    own_attribute,
    printed_length,
    type_name,
)
from protocol.token import Trust, is_id, is_token_shaped, mint, new_id
from protocol.walking import walk

MAX_CHAIN: Final = 8
"""Most causes kept as data."""
MAX_LIVE: Final = 64 * 1024
"""Most characters that the texts of live causes may have together; longer ones are kept as (capped)
data alone. Seen with Ray 2.60: an actor whose ``__init__`` raises with a text of 20 MB arrives as an
ActorUnavailableError without a word of it, for the message does not fit into an RPC."""
MAX_NOTES: Final = 8
"""Most notes (PEP 678) of an exception kept as data."""
CODE_TRUST: Final = "code_trust"
"""In a CodedError's data: how far its code may be believed, where it was read from mere text."""
NESTED: Final = "came_through_ray"
"""In a CodedError's data: it was named, or passed on, after it had come through a Ray call: what it tells of
happened to something that our callee called, and our callee is alive."""
CARRIED: Final = "carried"
"""In a CodedError's data: the token of a later release that named it, carried on byte for byte."""


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cause, as data: its type's full name, its capped text, its code when it had one, its notes."""

    type: str
    text: str
    code: str = ""
    notes: tuple[str, ...] = ()


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a failure was named: host, process, Ray actor (empty outside of one), and the type and
    capped text of the exception that it was made from (empty when raised as a CodedError)."""

    host: str
    pid: int
    actor: str = ""
    type: str = ""
    text: str = ""


class CodedError(Exception):
    """A failure with a name.

    ``code`` is the catalogue's, ``detail`` one text for people (at most 8 KiB), ``data`` JSON-safe
    facts, ``id`` the occurrence (joins its log lines), ``origin`` where it was named, ``chain`` its
    causes as data, outermost first. ``str()`` begins with the token, so that the code survives on
    the paths where only text does.

    Raises ValueError when ``code`` or ``id`` is malformed.
    """

    code: Code
    detail: str
    data: dict[str, Any]
    id: str
    origin: Origin
    _chain: tuple[Link, ...] | None

    def __init__(
        self,
        code: Code | str,
        detail: str = "",
        data: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.code = Code(code)
        self.detail = clean(detail)
        self.data = json_safe(dict(data)) if data else {}
        if id and not is_id(id):
            raise ValueError(f"{id!r} is not an occurrence id: 8 characters of Crockford base32, in capitals")
        self.id = id or new_id()
        self.origin = origin or here()
        self._chain = None
        super().__init__(self.code, self.detail)

    @classmethod
    def from_exception(
        cls,
        exc: BaseException,
        code: Code | str,
        detail: str | None = None,
        data: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
    ) -> Self:
        """Name a foreign exception: its type and text go into ``origin``, its causes and notes into
        ``chain``. Raise the result ``from`` its own ``__cause__``: that is ``exc``, or None where the
        texts are so long that Ray, which prints the whole chain, could not carry them."""
        text = clean(exc, MAX_TEXT)
        name = type_name(exc)
        made = cls(
            code, f"{name}: {text}" if detail is None else detail, data, id=id, origin=here(name, text)
        )
        return caused_by(made, exc)

    @property
    def trust(self) -> Trust:
        """How far the code may be believed: structured, unless it was read from mere text."""
        return trust_of(contents(self)[3])

    @property
    def token(self) -> str:
        """The code and the occurrence as a token (`protocol.mint`). One that is believed no further than
        unsigned text is not signed, or passing it on would lend it the run's word."""
        code, id, _, data = contents(self)
        return token_of(code, id, data)

    @property
    def chain(self) -> tuple[Link, ...]:
        """The causes as data: those carried over a boundary, or read from the live exception."""
        return self._chain if self._chain is not None else tuple(_links(self))

    if not TYPE_CHECKING:  # to a type checker it would mean that there is every attribute

        def __getattr__(self, name: str) -> Any:
            """What one lacks whose ``__init__`` never called ours: it is printed and sent all the same. (No
            attributes of the class: in Ray's dual they would hide those of the cause.)"""
            if name in _LACKING:
                return _LACKING[name]
            text = f"{name_of_type(type(self))!r} object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self)

    def add_note(self, note: str) -> None:
        """As any exception's (PEP 678), but a note travels with the error, and Ray prints it: it is capped
        and without secrets, and there are no more than `MAX_NOTES`."""
        notes = vars(self).get("__notes__")
        if type(notes) is not list or len(notes) < MAX_NOTES:
            super().add_note(clean(note, MAX_TEXT) if type(note) is str else note)

    def __str__(self) -> str:
        detail = contents(self)[2]
        return f"{self.token} {detail}" if detail else self.token

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.token!r}, {self.detail!r})"  # some keep no more than a repr

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CodedError):
            return NotImplemented
        return _content(self) == _content(other)

    def __hash__(self) -> int:
        return hash((CodedError, self.id))

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: _sendable(value) for name, value in self.__dict__.items() if name in _LACKING}
        state["_chain"] = self.chain
        others = {name: value for name, value in self.__dict__.items() if name not in _LACKING}
        if id(self) in _met():  # one of them leads back here: without them, or there is no end
            _met()[id(self)] = True
            others = {}
        return (_rebuild, (_lineage(type(self)), self.args, state, _Others(others, self) if others else None))

    def __copy__(self) -> Self:
        """Of the same class whatever finds that again, for nothing has to be sent."""
        made = _blank(mro_of(type(self)))
        made.__dict__.update(self.__dict__, _chain=self.chain)
        made.args = self.args
        return cast(Self, made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = copy(self)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            try:
                made.__dict__[name] = deepcopy(_sendable(value) if name in _LACKING else value, memo)
            except Exception:  # noqa: BLE001 - __deepcopy__ of a foreign value may raise anything
                made.__dict__[name] = clean(value, MAX_TEXT)
        made._chain = self.chain
        return made


_LACKING: Final[dict[str, Any]] = {
    "code": Code("UNKNOWN.EXCEPTION"),
    "detail": "",
    "data": MappingProxyType({}),
    "id": "",
    "origin": Origin("", 0),
    "_chain": None,
}


def _sendable(value: Any) -> Any:
    """``value``, as JSON-safe data where somebody has put into it what cannot be pickled."""
    if value and type(value) is dict:
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - __reduce__ of a foreign value may raise anything
            return json_safe(value)
    return value


class _Others:
    """The attributes that a user's subclass adds, on their way. Each is a pickle of its own, so that none
    costs the failure its name: one that cannot be pickled (a lock) arrives as its text, one that the
    reader cannot load (its module is not there) is left out. What refers to ``__main__`` is left to
    whichever pickle it is, as the class is."""

    def __init__(self, values: dict[str, Any], error: CodedError | None = None) -> None:
        self.values = values
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        pickled: dict[str, bytes] = {}
        live: dict[str, Any] = {}
        for name, value in self.values.items():
            try:
                as_bytes, leads_back = self._pickled(value)
            except Exception:  # noqa: BLE001 - __reduce__ of a foreign value may raise anything
                live[name] = clean(value, MAX_TEXT)
            else:
                if b"__main__" in as_bytes and not leads_back:
                    live[name] = value
                else:
                    pickled[name] = as_bytes
        return (_arrived, (pickled, live))

    def _pickled(self, value: Any) -> tuple[bytes, bool]:
        met, me = _met(), id(self._error)
        met[me] = False
        try:
            return pickle.dumps(value), met[me]
        finally:
            del met[me]


_pickling = threading.local()


def _met() -> dict[int, bool]:
    """The errors (by `id`) whose attributes this thread is pickling, and whether one of these led back."""
    met: dict[int, bool] = vars(_pickling).setdefault("met", {})
    return met


def _arrived(pickled: dict[str, bytes], live: dict[str, Any]) -> _Others:
    for name, value in pickled.items():
        with suppress(Exception):  # what the reader cannot load may raise anything
            live[name] = pickle.loads(value)  # noqa: S301 - as in _found
    return _Others(live)


T = TypeVar("T", bound=CodedError)


def caused_by(error: T, exc: BaseException) -> T:
    """``error``, with ``exc`` as its cause: live, or as data where the texts are so long that Ray, which
    prints the whole chain, could not carry them."""
    error.__cause__ = exc
    if not kept_live(error):
        error.__traceback__ = exc.__traceback__
    error.__suppress_context__ = True
    return error


def kept_live(error: CodedError) -> bool:
    """Whether the causes of ``error`` are short enough to stay live; they are data from now on if not."""
    causes = walk(error, 256, context=True)[1:]
    if len(causes) < 255 and sum(map(printed_length, causes)) <= MAX_LIVE:
        return True
    error._chain = error.chain
    error.__cause__, error.__suppress_context__ = None, True
    return False


Lineage = type[CodedError] | tuple[tuple[str, str] | bytes, ...]


def _lineage(cls: type[CodedError]) -> Lineage:
    """How the class travels: by the names of itself and its bases, so that a reader who cannot import it
    falls back to the nearest base that it can. One that no name leads to (a class inside a function) goes
    first by value, where there is a cloudpickle: a plain pickle, all that multiprocessing has, would refuse
    it, and the failure would lose its name. A class of ``__main__`` is left to whichever pickle it is."""
    found = _find(cls.__module__, cls.__qualname__, load=False) is cls
    if found and cls.__module__ == "__main__":
        return cls
    names = tuple((c.__module__, c.__qualname__) for c in cls.__mro__ if issubclass(c, CodedError))
    value = None if found else _by_value(cls)
    return names if value is None else (value, *names)


def _by_value(cls: type) -> bytes | None:
    cloudpickle: Any = sys.modules.get("ray.cloudpickle") or sys.modules.get("cloudpickle")
    if cloudpickle is None:
        return None
    try:
        value: bytes = cloudpickle.dumps(cls)
    except Exception:  # noqa: BLE001 - what the class refers to may raise anything: then its base goes
        return None
    return value if len(value) <= MAX_LIVE else None


def _find(module: str, qualname: str, *, load: bool) -> Any:
    try:
        found: Any = importlib.import_module(module) if load else sys.modules[module]
        for part in qualname.split("."):
            found = getattr(found, part)
    except Exception:  # noqa: BLE001 - importing a foreign module may raise anything: then it is not there
        return None
    return found


def _found(one: tuple[str, str] | bytes) -> Any:
    if isinstance(one, tuple):
        return _find(*one, load=True)
    try:
        return pickle.loads(one)  # noqa: S301 - it came inside a pickle, whoever wrote it may do anything
    except Exception:  # noqa: BLE001 - the reader lacks cloudpickle, or what the class refers to
        return None


def _rebuild(
    lineage: Lineage, args: tuple[Any, ...], state: dict[str, Any], others: _Others | None = None
) -> CodedError:
    made = _blank(map(_found, lineage) if isinstance(lineage, tuple) else mro_of(lineage))
    made.__dict__.update(state)
    if others is not None:
        made.__dict__.update(others.values)
    made.args = args
    return made


def _blank(classes: Iterable[Any]) -> CodedError:
    """An empty instance of the first of ``classes`` that is one of ours and of which there can be one."""
    ours = (cls for cls in classes if isinstance(cls, type) and issubclass(cls, CodedError))
    return next((made for made in map(blank, ours) if made is not None), CodedError.__new__(CodedError))


def _content(error: CodedError) -> tuple[Any, ...]:
    return (error.code, error.id, error.detail, error.data, error.origin, error.chain)


def trust_of(data: Mapping[str, Any]) -> Trust:
    """How far the code may be believed that came with ``data``: structured, unless it says less."""
    return Trust.__members__.get(str(data.get(CODE_TRUST, "")).upper(), Trust.STRUCTURED)


def token_of(code: Code, id: str, data: Mapping[str, Any]) -> str:
    """The token of an error with these attributes (`CodedError.token`)."""
    carried = data.get(CARRIED)
    if code.reason == "FOREIGN" and isinstance(carried, str) and is_token_shaped(carried):
        return carried
    id = id if is_id(id) else "00000000"  # replaced by nonsense: str() must not raise for it
    return mint(code, id, key=None if trust_of(data) >= Trust.SIGNED else b"")


def _links(error: CodedError) -> Iterator[Link]:
    for cause in walk(error, MAX_CHAIN + 1, context=True)[1:]:
        if issubclass(type(cause), CodedError):  # not isinstance, which asks a foreign __class__
            code, _, detail, _ = contents(cast(CodedError, cause))
            yield Link(type_name(cause), clean(detail, MAX_TEXT), str(code), notes_of(cause))
        else:
            yield Link(type_name(cause), clean(cause, MAX_TEXT), notes=notes_of(cause))


def contents(error: CodedError) -> tuple[Code, str, str, dict[str, Any]]:
    """Code, id, detail and data of an error whose attributes somebody may have replaced by anything."""
    code, id, detail, data = (attribute_of(error, name) for name in ("code", "id", "detail", "data"))
    if type(code) is not Code:
        try:
            code = Code(str.__str__(code))
        except (TypeError, ValueError):
            code = Code("UNKNOWN.EXCEPTION")
    id = id if type(id) is str and is_id(id) else ""
    if type(detail) is not str:
        detail = f"<{name_of_type(type(detail))} in the place of the detail>"
    elif not detail.isascii():
        detail = clean(detail)
    return code, id, detail, data if type(data) is dict else {}


def attribute_of(error: CodedError, name: str) -> Any:
    """An attribute as it stands, None where it cannot be read."""
    try:
        return getattr(error, name, None)
    except CONTROL:
        raise
    except BaseException:  # noqa: BLE001 - a property of a user's subclass may raise anything
        return None


def notes_of(exc: BaseException) -> tuple[str, ...]:
    """The notes of an exception (PEP 678), capped."""
    notes = own_attribute(exc, "__notes__")
    return tuple(clean(note, MAX_TEXT // 4) for note in notes[:MAX_NOTES]) if type(notes) is list else ()


@lru_cache(maxsize=1)
def _host() -> str:
    return socket.gethostname()


def here(type: str = "", text: str = "") -> Origin:
    """The origin of a failure that is named in this process, now."""
    return Origin(_host(), os.getpid(), _actor(), type, text)


def _actor() -> str:
    # Only where Ray is loaded already and runs: naming a failure must not import or start Ray.
    ray = sys.modules.get("ray")
    if ray is None:
        return ""
    worker = getattr(getattr(getattr(ray, "_private", None), "worker", None), "global_worker", None)
    actor_id = getattr(worker, "actor_id", None)
    if actor_id is None or actor_id.is_nil():
        return ""
    return str(actor_id.hex())
