"""`coded`: whatever escapes has a name, and everything else stays as it was."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from aiohttp import ClientResponseError, RequestInfo
from multidict import CIMultiDict, CIMultiDictProxy
from ray.exceptions import RayTaskError
from yarl import URL

from faults import Outcome, classify, decide, name_of
from protocol import CodedError, Trust, code_of, coded, mint, read
from protocol.boundary import named
from tests.protocol.badly_written import HOSTILE


def kind(exc: BaseException) -> str | None:
    return "NODE.IO" if isinstance(exc, OSError) else None


@coded
def function(fail: BaseException | None = None, /, *, n: int = 1) -> int:
    """The docstring."""
    if fail is not None:
        raise fail
    return n


@coded(code="ENGINE.EXITED", name=kind)
async def coroutine(fail: BaseException | None = None) -> int:
    await asyncio.sleep(0)
    if fail is not None:
        raise fail
    return 1


@coded
def generator(fail: BaseException | None = None) -> Iterator[object]:
    got = yield 1
    yield got
    if fail is not None:
        raise fail
    return "returned"


@coded
async def async_generator(fail: BaseException | None = None) -> AsyncIterator[int]:
    yield 1
    if fail is not None:
        raise fail
    yield 2


def test_a_function_names_what_escapes() -> None:
    with pytest.raises(CodedError) as caught:
        function(ValueError("why"))
    assert caught.value.code == "TASK.FAILED"
    assert caught.value.detail == "ValueError: why"
    assert caught.value.origin.type == "ValueError"
    assert isinstance(caught.value.__cause__, ValueError)
    assert function(n=5) == 5


async def test_a_coroutine_names_what_escapes() -> None:
    with pytest.raises(CodedError) as caught:
        await coroutine(ValueError("why"))
    assert caught.value.code == "ENGINE.EXITED"
    with pytest.raises(CodedError) as caught:
        await coroutine(PermissionError("no"))
    assert caught.value.code == "NODE.IO"
    assert await coroutine() == 1


def test_a_generator_names_what_escapes_and_stays_a_generator() -> None:
    made = generator(ValueError("why"))
    assert next(made) == 1
    assert made.send("sent") == "sent"  # type: ignore[attr-defined]
    with pytest.raises(CodedError, match="why"):
        next(made)
    whole = generator()
    assert list(whole) == [1, None]
    ended = generator()
    next(ended), next(ended)
    with pytest.raises(StopIteration) as stop:
        next(ended)
    assert stop.value.value == "returned"


def test_a_generator_that_is_closed_or_thrown_into() -> None:
    made = generator()
    next(made)
    made.close()  # type: ignore[attr-defined]
    thrown = generator()
    next(thrown)
    with pytest.raises(CodedError, match="thrown"):
        thrown.throw(KeyError("thrown"))  # type: ignore[attr-defined]


async def test_an_async_generator_names_what_escapes() -> None:
    made = async_generator(ValueError("why"))
    assert await anext(made) == 1
    with pytest.raises(CodedError, match="why"):
        await anext(made)
    assert [n async for n in async_generator()] == [1, 2]


async def test_an_async_generator_that_is_closed_closes_the_one_inside() -> None:
    closed = []

    @coded
    async def inner() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    made = inner()
    assert await anext(made) == 1
    await made.aclose()  # type: ignore[attr-defined]
    assert closed == [True]


async def test_an_async_generator_takes_what_is_sent_and_thrown() -> None:
    seen: list[object] = []

    @coded
    async def inner() -> AsyncIterator[int]:
        try:
            seen.append((yield 1))
            yield 2
        except KeyError as exc:
            seen.append(exc)
            yield 3

    made = inner()
    assert await anext(made) == 1
    assert await made.asend("sent") == 2  # type: ignore[attr-defined]
    thrown = KeyError("thrown")
    assert await made.athrow(thrown) == 3  # type: ignore[attr-defined]
    assert seen == ["sent", thrown]
    with pytest.raises(StopAsyncIteration):
        await anext(made)


CONTROL = [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError()]


@pytest.mark.parametrize("control", CONTROL, ids=lambda e: type(e).__name__)
async def test_control_flow_passes_unchanged(control: BaseException) -> None:
    with pytest.raises(type(control)) as caught:
        function(control)
    assert caught.value is control
    with pytest.raises(type(control)) as caught:
        await coroutine(control)
    assert caught.value is control
    with pytest.raises(type(control)) as caught:
        list(generator(control))
    assert caught.value is control
    if not isinstance(control, GeneratorExit):
        with pytest.raises(type(control)) as caught:
            [n async for n in async_generator(control)]
        assert caught.value is control


def test_the_end_of_an_iteration_passes_unchanged() -> None:
    class Countdown:
        def __init__(self) -> None:
            self.left = 2

        def __iter__(self) -> Iterator[int]:
            return self

        @coded
        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    assert list(Countdown()) == [1, 0]
    with pytest.raises(StopAsyncIteration):
        function(StopAsyncIteration())


def test_a_coded_error_passes_unchanged() -> None:
    error = CodedError("CONFIG.MISSING", "no file")
    with pytest.raises(CodedError) as caught:
        function(error)
    assert caught.value is error
    assert error.__cause__ is None


async def test_a_cancellation_inside_stays_one() -> None:
    began = asyncio.Event()

    @coded
    async def forever() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(forever())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await forever()


def test_an_exception_that_carries_a_code_keeps_it() -> None:
    exc = ValueError("x")
    exc.__cause__ = CodedError("CONFIG.MISSING", "no file")
    with pytest.raises(CodedError) as caught:
        function(exc)
    assert caught.value.code == "CONFIG.MISSING"
    assert read(caught.value).trust is Trust.STRUCTURED


def test_a_code_read_from_text_gains_no_trust() -> None:
    """A model that prints a token must not turn it into structured data by raising it."""
    forged = mint("BACKPRESSURE.OVERLOADED")
    with pytest.raises(CodedError) as caught:
        function(ValueError(f"the model said: {forged}"))
    error = pickle.loads(pickle.dumps(caught.value))
    assert read(error).code == "BACKPRESSURE.OVERLOADED"
    assert read(error).trust is Trust.CHECKSUMMED
    fault = classify(error)
    assert (fault.outcome, fault.trust) == (Outcome.NOT_RUN, Trust.CHECKSUMMED)
    assert not decide(fault, idempotent=False).action.sends_again
    event = {"code": str(error.code), "id": error.id, "detail": error.detail, "data": error.data}
    assert read(event).trust is Trust.CHECKSUMMED


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_exception_is_named(name: str) -> None:
    with pytest.raises(CodedError) as caught:
        function(HOSTILE[name])
    assert caught.value.code == "TASK.FAILED"
    pickle.dumps(caught.value)


def test_a_namer_that_names_badly_is_a_bug_that_shows() -> None:
    @coded(name=lambda exc: "nonsense")
    def fails() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="is not a code"):
        fails()
    with pytest.raises(ValueError, match="is not a code"):
        coded(code="nonsense")


# -- what HTTP clients raise, which Ray loses (I1, I5)


def test_the_status_and_the_start_of_the_body_of_httpx_are_kept() -> None:
    @coded(name=name_of)
    def post() -> None:
        httpx.Response(
            400, text=f"bad prompt {mint('NODE.IO')}", request=httpx.Request("POST", "http://h/x")
        ).raise_for_status()

    with pytest.raises(CodedError) as caught:
        post()
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.code == "REQUEST.REJECTED"
    assert error.data["status"] == 400
    assert error.data["body"].startswith("bad prompt FS1:")
    assert classify(error).status == 400


async def test_a_body_that_was_not_read_is_left_out() -> None:
    @coded(name=name_of)
    async def post() -> None:
        transport = httpx.MockTransport(lambda r: httpx.Response(503, stream=httpx.ByteStream(b"busy")))
        async with httpx.AsyncClient(transport=transport) as client, client.stream("GET", "http://h/") as got:
            got.raise_for_status()

    with pytest.raises(CodedError) as caught:
        await post()
    assert (caught.value.code, caught.value.data) == ("BACKPRESSURE.OVERLOADED", {"status": 503})


def test_the_status_of_aiohttp_is_kept() -> None:
    headers = CIMultiDictProxy(CIMultiDict({"Retry-After": "2"}))
    exc = ClientResponseError(RequestInfo(URL("http://h/"), "POST", headers), (), status=503, headers=headers)
    with pytest.raises(CodedError) as caught:
        coded(name=name_of)(lambda: function.__wrapped__(exc))()  # type: ignore[attr-defined]
    assert caught.value.code == "BACKPRESSURE.OVERLOADED"
    assert caught.value.data == {"status": 503, "retry_after": 2}
    assert classify(caught.value).retry_after == 2


def test_a_status_of_something_else_is_not_taken_for_http() -> None:
    exc = ValueError("a job")
    exc.status = 404  # type: ignore[attr-defined]
    with pytest.raises(CodedError) as caught:
        function(exc)
    assert caught.value.data == {}


# -- names, signatures, kinds


@pytest.mark.parametrize("it", [function, coroutine, generator, async_generator])
def test_names_and_signatures_are_kept(it: object) -> None:
    plain = it.__wrapped__  # type: ignore[attr-defined]
    assert it.__name__ == plain.__name__  # type: ignore[attr-defined]
    assert it.__qualname__ == plain.__qualname__  # type: ignore[attr-defined]
    assert it.__doc__ == plain.__doc__
    assert inspect.signature(it) == inspect.signature(plain)  # type: ignore[arg-type]
    for question in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        assert question(it) == question(plain)


@coded(name=kind)
class Thing:
    limit = 5

    def __init__(self, fail: Exception | None = None) -> None:
        if fail is not None:
            raise fail

    def __call__(self) -> None:
        raise ValueError("called")

    def method(self) -> None:
        raise ValueError("method")

    async def amethod(self) -> None:
        raise ValueError("amethod")

    def stream(self) -> Iterator[int]:
        yield 1
        raise ValueError("stream")

    @staticmethod
    def static() -> None:
        raise ValueError("static")

    @classmethod
    def klass(cls) -> None:
        raise PermissionError("klass")

    @property
    def value(self) -> int:
        return self.limit

    class Inner:
        def plain(self) -> None:
            raise ValueError("not ours")


async def test_a_class_names_what_escapes_its_methods() -> None:
    thing = Thing()
    assert thing.value == Thing.limit == 5
    for call in (thing, thing.method, Thing.static, thing.static, lambda: list(thing.stream())):
        with pytest.raises(CodedError) as caught:
            call()
        assert caught.value.code == "TASK.FAILED"
    for klass in (Thing.klass, thing.klass):
        with pytest.raises(CodedError) as caught:
            klass()
        assert caught.value.code == "NODE.IO"
    with pytest.raises(CodedError, match="amethod"):
        await thing.amethod()
    with pytest.raises(ValueError, match="not ours"):
        Thing.Inner().plain()


def test_a_class_names_what_escapes_its_init() -> None:
    with pytest.raises(CodedError) as caught:
        Thing(FileNotFoundError("no file"))
    assert caught.value.code == "NODE.IO"
    assert isinstance(Thing(), Thing)
    assert Thing.__name__ == "Thing"


def test_methods_that_are_inherited_are_named_too() -> None:
    class Base:
        def inherited(self) -> None:
            raise ValueError("inherited")

    @coded
    class Child(Base):
        def own(self) -> None:
            super().inherited()

    with pytest.raises(CodedError, match="inherited"):
        Child().own()
    with pytest.raises(CodedError, match="inherited"):
        Child().inherited()
    with pytest.raises(ValueError, match="inherited"):
        Base().inherited()


def test_coded_twice_names_once() -> None:
    twice = coded(code="NODE.IO")(coded(code="TASK.WORKER_CRASHED")(function.__wrapped__))  # type: ignore[attr-defined]
    with pytest.raises(CodedError) as caught:
        twice(ValueError("x"))
    assert caught.value.code == "TASK.WORKER_CRASHED"
    assert caught.value.detail == "ValueError: x"


def test_static_and_class_methods_in_either_order() -> None:
    class Plain:
        @coded
        @staticmethod
        def outer() -> None:
            raise ValueError("x")

        @staticmethod
        @coded
        def inner() -> None:
            raise ValueError("x")

        @coded
        @classmethod
        def klass(cls) -> str:
            raise ValueError(cls.__name__)

    for call in (Plain.outer, Plain.inner, Plain().klass):
        with pytest.raises(CodedError):
            call()


def test_other_callables_are_wrapped() -> None:
    part = functools.partial(function.__wrapped__, ValueError("partial"))  # type: ignore[attr-defined]
    with pytest.raises(CodedError, match="partial"):
        coded(part)()
    with pytest.raises(CodedError, match="invalid literal"):
        coded(lambda: int("x"))()


async def test_instances_that_are_called_are_what_their_call_is() -> None:
    class Call:
        async def __call__(self) -> None:
            raise ValueError("a call")

    class Stream:
        async def __call__(self) -> AsyncIterator[int]:
            yield 1
            raise ValueError("a stream")

    class Steps:
        def __call__(self) -> Iterator[int]:
            yield 1
            raise ValueError("a step")

    with pytest.raises(CodedError, match="a call"):
        await coded(Call())()
    with pytest.raises(CodedError, match="a stream"):
        _ = [n async for n in coded(Stream())()]
    with pytest.raises(CodedError, match="a step"):
        list(coded(Steps())())


@pytest.mark.parametrize("thing", [5, "text", object(), {}])
def test_what_cannot_be_decorated_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="takes a function, a class or a Ray actor class"):
        coded(thing)


# -- properties ----------------------------------------------------------------------------------------


@coded
class WithProperties:
    """Every kind of attribute that runs code."""

    def __init__(self) -> None:
        self.computed = 0
        self._limit = 1

    @property
    def limit(self) -> int:
        """How much."""
        if self._limit < 0:
            raise ValueError("limit is negative")
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        if value > 10:
            raise ValueError("limit is too large")
        self._limit = value

    @limit.deleter
    def limit(self) -> None:
        raise ValueError("limit stays")

    @functools.cached_property
    def model(self) -> str:
        """Loaded once."""
        self.computed += 1
        if self.computed == 1:
            raise OSError(5, "cannot load")
        return "loaded"


def test_properties_of_a_class_name_what_escapes() -> None:
    it = WithProperties()
    it.limit = 5
    assert it.limit == 5
    for act in (
        lambda: setattr(it, "limit", 11),
        lambda: delattr(it, "limit"),
        lambda: (setattr(it, "limit", -1), it.limit),
    ):
        with pytest.raises(CodedError, match="limit") as caught:
            act()
        assert caught.value.code == "TASK.FAILED"
    with pytest.raises(CodedError, match="cannot load"):
        _ = it.model
    assert (it.model, it.model, it.computed) == ("loaded", "loaded", 2), "cached, once it succeeded"
    limit, model = vars(WithProperties)["limit"], vars(WithProperties)["model"]
    assert isinstance(limit, property)
    assert (limit.__doc__, model.__doc__) == ("How much.", "Loaded once.")


def test_a_property_alone_in_a_class_that_is_not_decorated() -> None:
    class Plain:
        @coded
        @property
        def first(self) -> int:
            raise ValueError("first")

        @property
        @coded
        def second(self) -> int:
            raise ValueError("second")

        @coded
        @functools.cached_property
        def third(self) -> int:
            raise ValueError("third")

    for name in ("first", "second", "third"):
        with pytest.raises(CodedError, match=name):
            getattr(Plain(), name)


def test_a_read_only_property_stays_one() -> None:
    @coded
    class Plain:
        @property
        def only_read(self) -> int:
            return 1

    with pytest.raises(AttributeError):
        Plain().only_read = 2  # type: ignore[misc]


def test_a_group_that_came_through_ray_is_named_by_its_strictest_leaf() -> None:
    leaves = [CodedError("ENGINE.EXITED", "a"), CodedError("REQUEST.INVALID", "b")]
    raised = RayTaskError("f", "a traceback", ExceptionGroup("two", leaves)).as_instanceof_cause()
    assert named(raised).code == code_of(raised) == "REQUEST.INVALID"


def test_a_coded_error_of_which_ray_makes_no_dual_keeps_all_it_has() -> None:
    """One whose ``__new__`` wants other arguments than Ray has."""
    error = CodedError("ENGINE.EXITED", "signal 9", {"pid": 7})
    made = named(RayTaskError("f", "a traceback", error))
    assert (made.code, made.id, made.detail) == (error.code, error.id, "signal 9")
    assert made.data["pid"] == 7
