"""The boundary: naming what escapes (`coded`, `named`), at the raising side."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, Final, TypeVar, overload

from protocol.carriers.http_reply import facts_of
from protocol.codes import Code
from protocol.errors import NESTED, CodedError, Link, Origin, attribute_of, caused_by, contents, kept_live
from protocol.reading import Reading, read, strictness, trust_facts
from protocol.safe import own_attribute
from protocol.token import Trust
from protocol.walking import came_through_ray, is_ray_task_error, leaves_of

T = TypeVar("T")
Namer = Callable[[BaseException], "Code | str | None"]
"""From an exception to the code that a caller has for it, or None."""

# Passed unchanged: control flow that has to arrive as what it is.
# (AsyncioActorExit, named below, is how Ray ends an actor on purpose: ray.actor.exit_actor.)
_CONTROL: Final = (StopIteration, StopAsyncIteration)


@overload
def coded(target: T, /) -> T: ...
@overload
def coded(*, code: Code | str = ..., name: Namer | None = ...) -> Callable[[T], T]: ...
def coded(target: Any = None, /, *, code: Code | str = "TASK.FAILED", name: Namer | None = None) -> Any:
    """Turn whatever escapes ``target`` into a CodedError at the raising side, where the information
    still exists.

    For functions, coroutines, generators, async generators, static and class methods, properties, whole
    classes (their methods, properties and ``__init__``) and Ray remote functions and actor classes.
    A CodedError passes unchanged, Ray's RayTaskError(CodedError) as the CodedError that it stands for;
    cancellation, KeyboardInterrupt, SystemExit and the end of an iteration
    stay what they are. An exception that carries a code already keeps it, and its occurrence (where it
    stood in mere text, the CodedError is believed no further than that text); otherwise ``name(exc)``
    names it, else ``code`` does. The status and the start of the body of an HTTP client's exception go
    into ``data``."""
    fallback = Code(code)

    def name_it(exc: Exception) -> CodedError | None:
        if issubclass(type(exc), _CONTROL) or type(exc).__name__ == "AsyncioActorExit":
            return None
        made = named(exc, code=fallback, name=name)
        return None if made is exc else made

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
    """``exc`` as a CodedError: itself, if it is one, or what Ray's dual of one stands for; else under the
    code (and the occurrence) that it carries, else under ``name(exc)``, else under ``code``. A code that was
    read from mere text is believed no further than that text. ``data`` is added to what an HTTP client's
    exception knows of the reply."""
    arrived = _below_ray(exc) if is_ray_task_error(type(exc)) else None
    if arrived is not None:
        return arrived
    if issubclass(type(exc), CodedError):  # not isinstance, which asks a foreign __class__
        assert isinstance(exc, CodedError)
        kept_live(exc)
        return exc
    if issubclass(type(exc), BaseExceptionGroup):
        named_leaves = [_named_leaf(leaf, code, name) for leaf in leaves_of(exc)]
        whole = read(exc)  # by what the group itself was raised from, where no leaf has a name
        if whole.code is not None:
            named_leaves.append(whole)
        # Of those that allow as little as each other, rather one that brought its name along.
        found = max(named_leaves, key=lambda leaf: (strictness(leaf), leaf.id != ""), default=Reading())
    else:
        found = read(exc)
    facts = {**facts_of(exc), **(data or {}), **trust_facts(found)}
    if found.code is not None and came_through_ray(exc):
        facts[NESTED] = True
    given = found.code or (name(exc) if name is not None else None) or code
    return CodedError.from_exception(exc, given, detail, facts, id=found.id or None)


def _below_ray(exc: BaseException) -> CodedError | None:
    """The CodedError that arrived in a RayTaskError, marked as such. Ray makes a class for the two of them
    that can be imported from nowhere: only cloudpickle sends it, and a worker of multiprocessing that
    raises it is heard to fail with a PicklingError. (It makes none where the CodedError's own ``__new__``
    wants other arguments.)"""
    error = own_attribute(exc, "cause")
    if not issubclass(type(error), CodedError):
        return None
    assert isinstance(error, CodedError)
    if isinstance(error.data, dict):  # somebody may have replaced it
        error.data[NESTED] = True
    return caused_by(error, exc)


def mended(error: CodedError) -> CodedError:
    """``error``; or, where somebody replaced an attribute by what is none of its kind, one that says as much:
    for carriers that write the attributes down."""
    chain = attribute_of(error, "chain")
    sound = type(chain) is tuple and all(type(link) is Link for link in chain)
    kinds = {"code": Code, "detail": str, "data": dict, "id": str, "origin": Origin}
    if sound and all(type(attribute_of(error, name)) is kind for name, kind in kinds.items()):
        return error
    code, id, detail, data = contents(error)
    origin = attribute_of(error, "origin")
    made = CodedError(code, detail, data, id=id or None, origin=origin if type(origin) is Origin else None)
    made._chain = chain if sound else ()
    return made


def _named_leaf(leaf: BaseException, code: Code | str, name: Namer | None) -> Reading:
    """What a leaf of a group is called: one without a code allows as little as the fallback does, so that
    a group never allows more than its strictest leaf."""
    found = read(leaf)
    if found.code is not None:
        return found
    return Reading(Code((name(leaf) if name is not None else None) or code), trust=Trust.STRUCTURED)


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
    called = getattr(it, "__call__", it)  # noqa: B004 - an instance's is what its class says: it may be async
    if inspect.isasyncgenfunction(it) or inspect.isasyncgenfunction(called):
        return _wrap_async_generator(it, name_it)
    if inspect.isgeneratorfunction(it) or inspect.isgeneratorfunction(called):
        return _wrap_generator(it, name_it)
    if inspect.iscoroutinefunction(it) or inspect.iscoroutinefunction(called):

        @functools.wraps(it)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            try:
                return await it(*args, **kwargs)
            except Exception as exc:  # whatever escapes gets a name, and goes on
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
        except Exception as exc:  # whatever escapes gets a name, and goes on
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
        except Exception as exc:  # whatever escapes gets a name, and goes on
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
        except Exception as exc:  # whatever escapes gets a name, and goes on
            named = name_it(exc)
            if named is None:
                raise
            raise named from named.__cause__
        finally:
            await inner.aclose()

    return generator
