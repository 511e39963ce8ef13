"""Exceptions and values that do what they can to break their reader.

An exception is described by a `Recipe` (names only, so that a failing example can be printed) and made by
`build`: a base class, traits that go into a class of its own, attributes, and what lies below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import aiohttp
import httpx
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayTaskError, UnserializableException

from protocol import Code, CodedError, mint


class Panic(BaseException):
    """No Exception, as pyo3's PanicException is none."""


def _raises(kind: type[BaseException] = RuntimeError) -> Callable[..., NoReturn]:
    def method(*args: Any, **kwargs: Any) -> NoReturn:
        raise kind("hostile")

    return method


class Text(str):
    """A str whose every method raises."""


for _name in (
    "__len__",
    "__getitem__",
    "__str__",
    "__iter__",
    "__format__",
    "__eq__",
    "__add__",
    "__contains__",
):
    setattr(Text, _name, _raises())
for _name in ("encode", "lower", "upper", "find", "partition", "isascii", "startswith", "strip", "__bool__"):
    setattr(Text, _name, _raises())


class Awkward:
    """An object of which nothing can be asked."""


for _name in ("__str__", "__repr__", "__bool__", "__len__", "__iter__", "__eq__", "__int__", "__float__"):
    setattr(Awkward, _name, _raises())
for _name in ("__getattr__", "__format__", "__index__", "__contains__", "__getitem__", "__call__", "__lt__"):
    setattr(Awkward, _name, _raises())
Awkward.__hash__ = _raises()  # type: ignore[method-assign, assignment]  # hostile on purpose


class Panicking:
    __str__ = __repr__ = __bool__ = _raises(Panic)  # type: ignore[assignment]  # hostile on purpose


OVERRUN: Final[list[str]] = []
"""Filled when something went through what has no end."""


def _endless() -> Iterator[int]:
    yield from range(100_000)
    OVERRUN.append("went through a mapping that has no end")  # and ends, or the test would not


class BadMapping(Mapping[Any, Any]):
    """A mapping of which one method misbehaves, by name."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __getitem__(self, key: Any) -> Any:
        if self.how == "getitem":
            raise RuntimeError("hostile")
        return Awkward() if self.how == "awkward" else BadMapping(self.how) if self.how == "deep" else 5

    def __iter__(self) -> Iterator[Any]:
        if self.how == "iter":
            raise RuntimeError("hostile")
        if self.how == "endless":
            return _endless()
        return iter([Text("code"), 7, None, "code", "detail", ("a",), "id", "data"])

    def __len__(self) -> int:
        if self.how == "len":
            raise RuntimeError("hostile")
        return 8 if self.how != "huge" else 2**62

    def get(self, key: Any, default: Any = None) -> Any:
        if self.how in ("get", "panics"):
            raise (Panic if self.how == "panics" else RuntimeError)("hostile")
        return super().get(key, default)

    def items(self) -> Any:
        return 5 if self.how == "items" else super().items()

    def values(self) -> Any:
        return None if self.how == "values" else super().values()

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        if self.how == "class":
            raise RuntimeError("hostile")
        return dict if self.how == "class lies" else BadMapping


HOW: Final = (
    *("getitem", "awkward", "deep", "iter", "endless", "len", "huge", "get", "items", "values", "class"),
    *("class lies", "panics"),
)


@lru_cache(maxsize=1)
def _long_text() -> str:
    return "FS1.TASK.FAILED.ABCDEFGH.ABCDEFGX " * 1000  # no token; 50 MB are in test_bounds


def _recurses(self: object) -> str:
    return f"a{self}"


def _repr_recurses(self: object) -> str:
    return f"a{self!r}"


def _property(get: Callable[[Any], Any]) -> property:
    return property(get, lambda self, value: None)


_CODE: Final = Code("WEIGHTS.REFIT_ABORTED")

WILD: Final[dict[str, Callable[[BaseException], Any]]] = {
    "none": lambda e: None,
    "itself": lambda e: e,
    "number": lambda e: 503,
    "huge number": lambda e: 10**400,
    "nan": lambda e: float("nan"),
    "text": lambda e: "TASK.FAILED",
    "our code": lambda e: _CODE,
    "hostile text": lambda e: Text("TASK.FAILED"),
    "surrogate": lambda e: "\ud800",
    "bytes": lambda e: b"\xff" * 100,
    "awkward": lambda e: Awkward(),
    "panicking": lambda e: Panicking(),
    "class": lambda e: CodedError,
    "dict": lambda e: {"status": 503, "retry-after": Awkward()},
    "mapping": lambda e: BadMapping("deep"),
    "endless mapping": lambda e: BadMapping("endless"),
    "response": lambda e: SimpleNamespace(
        status_code=503, headers={"retry-after": Text("1")}, content=b"{" * 100
    ),
    "list of itself": lambda e: [e, e],
    "another": lambda e: ValueError("another"),
}
"""What an attribute holds."""

PLACES: Final = (
    *("cause", "code", "id", "detail", "data", "status", "status_code", "headers", "response", "content"),
    *("errno", "request_info", "exceptions", "actor_init_failed", "preempted", "args", "__notes__", "_chain"),
    *("origin", "trust", "token", "chain", "message", "strerror"),
)
"""Attributes that a reader may look at."""

SPECIAL: Final[dict[str, Any]] = {
    "str raises": ("__str__", _raises()),
    "str panics": ("__str__", _raises(Panic)),
    "str recurses": ("__str__", _recurses),
    "str is no text": ("__str__", lambda self: 5),
    "str is a subclass": ("__str__", lambda self: Text("a subclass")),
    "str is long": ("__str__", lambda self: _long_text()),
    "str is a surrogate": ("__str__", lambda self: "\ud800"),
    "repr raises": ("__repr__", _raises()),
    "repr recurses": ("__repr__", _repr_recurses),
    "eq raises": ("__eq__", _raises()),
    "hash raises": ("__hash__", _raises()),
    "bool raises": ("__bool__", _raises()),
    "len raises": ("__len__", _raises()),
    "reduce raises": ("__reduce__", _raises()),
    "reduce is nonsense": ("__reduce__", lambda self: 5),
    "getattr raises": ("__getattr__", _raises()),
    "getattr panics": ("__getattr__", _raises(Panic)),
    "getattr answers": ("__getattr__", lambda self, name: Awkward()),
    "getattribute raises": ("__getattribute__", _raises()),
    "getattribute panics": ("__getattribute__", _raises(Panic)),
    "getattribute answers": ("__getattribute__", lambda self, name: self),
    "dict raises": ("__dict__", property(_raises())),
    "dict is none": ("__dict__", property(lambda self: None)),
    "dict is a mapping": ("__dict__", property(lambda self: BadMapping("getitem"))),
    "class raises": ("__class__", property(_raises())),
    "class panics": ("__class__", property(_raises(Panic))),
    "class lies: coded": ("__class__", property(lambda self: CodedError)),
    "class lies: group": ("__class__", property(lambda self: ExceptionGroup)),
    "class lies: dict": ("__class__", property(lambda self: dict)),
    "class lies: str": ("__class__", property(lambda self: str)),
    "cause raises": ("__cause__", _property(_raises())),
    "cause panics": ("__cause__", _property(_raises(Panic))),
    "cause is text": ("__cause__", _property(lambda self: "text")),
    "cause is itself": ("__cause__", _property(lambda self: self)),
    "cause is always new": ("__cause__", _property(lambda self: type(self)("new"))),
    "context raises": ("__context__", _property(_raises())),
    "suppress raises": ("__suppress_context__", _property(_raises())),
    "traceback raises": ("__traceback__", _property(_raises())),
    "module is a number": ("__module__", 5),
    "module raises": ("__module__", property(_raises())),
    "module is hostile text": ("__module__", Text("ray.exceptions")),
    "module is Ray's": ("__module__", "ray.exceptions"),
}
"""Members of the class by the name of the trait; the module's among them."""


def _without(*names: str, kind: type[BaseException] = RuntimeError, answer: Any = None) -> dict[str, Any]:
    """A metaclass whose classes cannot be asked for ``names``, or answer with ``answer``."""

    def get(cls: type, name: str) -> Any:
        if name not in names:
            return type.__getattribute__(cls, name)
        if answer is not None:
            return answer
        raise kind("hostile")

    return {"__getattribute__": get}


META: Final[dict[str, Any]] = {
    "meta: name": _without("__name__"),
    "meta: qualname": _without("__qualname__"),
    "meta: qualname is a number": _without("__qualname__", answer=5),
    "meta: names are hostile text": _without(
        "__name__", "__qualname__", "__module__", answer=Text("builtins")
    ),
    "meta: names recurse": _without("__name__", "__qualname__", "__module__", kind=RecursionError),
    "meta: module": _without("__module__"),
    "meta: mro": _without("__mro__"),
    "meta: mro is a number": _without("__mro__", answer=5),
    "meta: mro lies": _without("__mro__", answer=(CodedError, Exception)),
    "meta: dict": _without("__dict__"),
    "meta: panics": _without("__qualname__", "__name__", "__module__", "__mro__", kind=Panic),
    "meta: getattribute": {"__getattribute__": _raises()},
    "meta: instancecheck": {"__instancecheck__": _raises(), "__subclasscheck__": _raises()},
    "meta: hash and eq": {"__hash__": _raises(), "__eq__": _raises()},
    "meta: str": {"__str__": _raises(), "__repr__": _raises()},
}
"""Members of the class's class."""

BASES: Final[dict[str, tuple[type[BaseException], tuple[Any, ...]]]] = {
    "Exception": (Exception, ("x",)),
    "BaseException": (BaseException, ("x",)),
    "ValueError": (ValueError, ("x", 5, None)),
    "OSError": (OSError, (28, "No space left on device")),
    "TimeoutError": (TimeoutError, ()),
    "KeyError": (KeyError, ("x",)),
    "UnicodeDecodeError": (UnicodeDecodeError, ("utf-8", b"\xff", 0, 1, "why")),
    "group": (ExceptionGroup, ("g", [ValueError("a"), KeyError("b")])),
    "httpx.HTTPError": (httpx.HTTPError, ("x",)),
    "aiohttp.ClientError": (aiohttp.ClientError, ("x",)),
    "aiohttp.ClientResponseError": (aiohttp.ClientResponseError, (None, ())),
    "RayTaskError": (RayTaskError, ()),
    "ActorDiedError": (ActorDiedError, ()),
    "UnserializableException": (UnserializableException, ("x",)),
    "CodedError": (CodedError, ("TASK.FAILED", "x")),
}


@dataclass(frozen=True)
class Recipe:
    """``traits`` of `SPECIAL` and `META`; ``wild``: what stands at which place, and whether as an attribute
    or as a property of the class; ``shape``: what it is put into or what lies below it."""

    base: str = "Exception"
    traits: tuple[str, ...] = ()
    wild: tuple[tuple[str, str, bool], ...] = ()
    shape: str = "alone"
    size: int = 1


SHAPES: Final = (
    *("alone", "causes", "contexts", "cycle", "itself", "Ray causes", "wide", "deep", "group of itself"),
    *("deep causes", "wide causes"),
)


def _recipes(bases: list[str], *, panicking: bool = False) -> st.SearchStrategy[Recipe]:
    traits = [t for t in (*SPECIAL, *META) if panicking or "panic" not in t]
    wild = [w for w in sorted(WILD) if panicking or "panic" not in w]
    places = st.tuples(st.sampled_from(PLACES), st.sampled_from(wild), st.booleans())
    return st.builds(
        Recipe,
        st.sampled_from(bases),
        st.lists(st.sampled_from(traits), max_size=3, unique=True).map(tuple),
        st.lists(places, max_size=2).map(tuple),
        st.sampled_from(SHAPES),
        st.sampled_from([1, 2, 5, 20]),
    )


recipes: Final = _recipes(sorted(BASES.keys() - {"CodedError"}))
coded_recipes: Final = _recipes(["CodedError"])
"""Subclasses of CodedError, which people write as badly as others."""
panicking_recipes: Final = _recipes(sorted(BASES), panicking=True)
"""With members that raise what is no Exception."""


def build(recipe: Recipe) -> BaseException:
    """The exception that ``recipe`` describes."""
    one = _single(recipe)
    try:
        return _shaped(one, recipe.shape, recipe.size)
    except (Exception, Panic):  # noqa: BLE001 - Python itself asks the class before it takes it into a group
        return one


def _single(recipe: Recipe) -> BaseException:
    base, args = BASES[recipe.base]
    namespace: dict[str, Any] = dict(SPECIAL[t] for t in recipe.traits if t in SPECIAL)
    meta: dict[str, Any] = {}
    for trait in recipe.traits:
        meta.update(META.get(trait, {}))
    for place, what, of_class in recipe.wild:
        if of_class:
            namespace[place] = _property(WILD[what])
    kind: Any = type("Meta", (type,), meta) if meta else type
    cls: Any = kind("Hostile", (base,), namespace)
    made: BaseException = base.__new__(cls, *args)
    _fill(made, base, args)
    for place, what, of_class in recipe.wild:
        if not of_class:
            _attributes(made)[place] = WILD[what](made)
    return made


def _attributes(made: BaseException) -> dict[str, Any]:
    """The exception's own attributes, whatever its class says of them."""
    held: dict[str, Any] = vars(BaseException)["__dict__"].__get__(made)
    return held


def _fill(made: BaseException, base: type[BaseException], args: tuple[Any, ...]) -> None:
    """Run the base's ``__init__``, as far as the hostile class lets it."""
    try:
        if base is RayTaskError:
            base.__init__(made, "f", "Traceback", ValueError("x"), "ray::f", 7, "10.0.0.7")
        else:
            base.__init__(made, *args)
    except (Exception, Panic):  # noqa: BLE001 - a class that refuses to be initialised: hostile all the more
        return


def _shaped(one: BaseException, shape: str, size: int) -> BaseException:
    if shape == "causes":
        return _chain(one, "__cause__", size)
    if shape == "contexts":
        return _chain(one, "__context__", size)
    if shape == "Ray causes":
        return _chain(one, "cause", size)
    if shape == "cycle":
        top = _chain(one, "__cause__", size)
        _link(one, "__cause__", top)
        return top
    if shape == "itself":
        _link(one, "__cause__", one)
        _link(one, "cause", one)
        return one
    if shape == "wide":
        return BaseExceptionGroup("wide", [ValueError(str(n)) for n in range(size)] + [one])
    if shape == "deep":
        for n in range(size):
            one = BaseExceptionGroup(f"level {n}", [one])
        return one
    if shape == "group of itself":
        group = BaseExceptionGroup("g", [ValueError("x"), one])
        _link(one, "__cause__", group)
        return group
    if shape == "deep causes":
        for n in range(size):
            one = BaseExceptionGroup(f"level {n}", [_chain(one, "__cause__", 2)])
        return one
    if shape == "wide causes":
        return BaseExceptionGroup("wide", [_chain(one, "__cause__", 3) for _ in range(size)])
    return one


def _chain(bottom: BaseException, attribute: str, length: int) -> BaseException:
    for n in range(length):
        above = RuntimeError(f"level {n}")
        _link(above, attribute, bottom)
        bottom = above
    return bottom


def _link(above: BaseException, attribute: str, below: BaseException) -> None:
    setter = vars(BaseException).get(attribute)
    if setter is not None:
        setter.__set__(above, below)
    else:
        _attributes(above)[attribute] = below


def _self_holding_list(length: int) -> list[Any]:
    held: list[Any] = []
    held.extend([held] * length)
    return held


def _self_holding_dict() -> dict[str, Any]:
    held: dict[str, Any] = {}
    held["data"] = held
    held["code"] = held
    return held


VALUES: Final[dict[str, Callable[[], Any]]] = {
    **{name: (lambda make=make: make(ValueError("x"))) for name, make in WILD.items()},
    **{f"mapping: {how}": (lambda how=how: BadMapping(how)) for how in HOW},
    "token": lambda: mint("TASK.FAILED", "ABCDEFGH", key=b""),
    "list that holds itself": lambda: _self_holding_list(2),
    "dict that holds itself": _self_holding_dict,
    "set": lambda: {1, "x", (2,)},
    "bytearray": lambda: bytearray(b"FS1.\xff"),
    "memoryview": lambda: memoryview(b"abcd").cast("I"),
    "deep JSON": lambda: b"[" * 10_000,
    "inf": lambda: -float("inf"),
    "bool": lambda: True,
    "range": lambda: range(10**12),
    "generator": lambda: (n for n in range(3)),
    "int's subclass": lambda: type("Int", (int,), {"__abs__": _raises(), "__lt__": _raises()})(5),
    "float's subclass": lambda: type("Float", (float,), {"__float__": _raises(), "__str__": _raises()})(5),
    "list's subclass": lambda: type("List", (list,), {"__len__": _raises(), "__iter__": _raises()})([5]),
    "dict's subclass": lambda: type("Dict", (dict,), {"items": _raises(), "get": _raises()})({"a": 5}),
    "tuple's subclass": lambda: type("Tuple", (tuple,), {"__len__": lambda self: -1})([5]),
    "bytes' subclass": lambda: type("Bytes", (bytes,), {"__len__": _raises(), "decode": _raises()})(b"x"),
    "says it is an exception": lambda: type("Lies", (), {"__class__": property(lambda self: ValueError)})(),
    "says it is a dict": lambda: type("Lies", (), {"__class__": property(lambda self: dict)})(),
    "says it is bytes": lambda: type("Lies", (), {"__class__": property(lambda self: bytes)})(),
    "says it is a text": lambda: type("Lies", (), {"__class__": property(lambda self: str)})(),
    "says it is an int": lambda: type("Lies", (), {"__class__": property(lambda self: int)})(),
    "says it is a float": lambda: type("Lies", (), {"__class__": property(lambda self: float)})(),
    "says it is a list": lambda: type("Lies", (), {"__class__": property(lambda self: list)})(),
    "raises when asked": lambda: type("Raises", (), {"__class__": property(_raises())})(),
    "headers raise": lambda: type("Raises", (), {"headers": property(_raises())})(),
    "headers panic": lambda: type("Raises", (), {"headers": property(_raises(Panic))})(),
    "httpx response": lambda: httpx.Response(503, headers={"x-failsoft-code": "x"}, content=b"{"),
    "httpx response, not read": lambda: httpx.Response(503, stream=httpx.ByteStream(b"x")),
}
"""Values by their names: what may stand in an exception's data, be read, or be made safe."""
values: Final = st.sampled_from([name for name in sorted(VALUES) if "panic" not in name])
panicking_values: Final = st.sampled_from([name for name in sorted(VALUES) if "panic" in name])

CONTAINERS: Final[dict[str, Callable[[Any], Any]]] = {
    "bare": lambda v: v,
    "list": lambda v: [v, v],
    "tuple": lambda v: (v,),
    "wide list": lambda v: [v] * 70,
    "dict": lambda v: {"a": v, "b": 5},
    "dict by number": lambda v: {5: v, None: v},
    "problem": lambda v: {"code": "TASK.FAILED", "id": v, "detail": v, "data": v, "instance": v},
    "code": lambda v: {"code": v, "data": {"n": 1}},
    "data": lambda v: {"code": "TASK.FAILED", "data": {"code_trust": v, "carried": v}},
    "headers": lambda v: SimpleNamespace(headers=v, content=v, status_code=v),
    "header": lambda v: SimpleNamespace(headers={"x-failsoft-code": v, "content-type": v}, content=v),
    "body": lambda v: SimpleNamespace(headers={"content-type": "application/problem+json"}, content=v),
    "exception": lambda v: ValueError(v),
    "attribute": lambda v: _with(RuntimeError("x"), v),
}
"""What a value is put into."""


def _with(exc: Exception, value: Any) -> Exception:
    exc.cause = value  # type: ignore[attr-defined]  # as Ray's RayTaskError has one
    exc.response = value  # type: ignore[attr-defined]
    exc.status = value  # type: ignore[attr-defined]
    return exc
