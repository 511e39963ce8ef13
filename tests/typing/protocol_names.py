"""The types of protocol's public names. Checked by the type checkers, never run."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

from protocol import (
    Code,
    CodedError,
    Family,
    Reading,
    Trust,
    catalogue,
    code_of,
    coded,
    defuse,
    mint,
    read,
    scan,
)
from protocol.catalogue import Advice, Entry
from protocol.token import Token


@coded
def plain(n: int, *, text: str = "") -> float:
    return float(n)


@coded(code="ENGINE.EXITED", name=lambda exc: None)
async def coroutine(n: int) -> list[str]:
    return [str(n)]


@coded
def generator(n: int) -> Iterator[int]:
    yield n


@coded
async def async_generator(n: int) -> AsyncIterator[int]:
    yield n


@coded
class Actor:
    def __init__(self, n: int) -> None:
        self.n = n

    async def method(self, text: str) -> bytes:
        return text.encode()


async def decorated() -> None:
    assert_type(plain(1, text="x"), float)
    plain("1")  # type: ignore[arg-type]
    plain(1, other=2)  # type: ignore[call-arg]
    assert_type(await coroutine(1), list[str])
    assert_type(generator(1), Iterator[int])
    assert_type(async_generator(1), AsyncIterator[int])
    actor = Actor(1)
    assert_type(actor, Actor)
    assert_type(actor.n, int)
    assert_type(await actor.method("x"), bytes)
    Actor("1")  # type: ignore[arg-type]
    coded(code=5)  # type: ignore[call-overload]


def values(thing: object) -> None:
    code = Code("TASK.FAILED")
    assert_type(code.family, Family)
    assert_type(code.reason, str)
    text: str = code
    assert_type(mint(code), str)
    assert_type(scan(text, key=b"key"), list[Token])
    assert_type(defuse(text), str)
    assert_type(code_of(thing), Code | None)
    reading = read(thing)
    assert_type(reading, Reading)
    assert_type(reading.code, Code | None)
    assert_type(reading.trust, Trust)
    error = CodedError(code, "d", {"a": 1})
    assert_type(error.code, Code)
    assert_type(error.detail, str)
    assert_type(error.data, dict[str, Any])
    assert_type(error.id, str)
    assert_type(CodedError.from_exception(ValueError(), code), CodedError)
    assert_type(catalogue.entry(code), Entry)
    assert_type(catalogue.entry(code).advice, Advice)
    assert_type(catalogue.register("X", family="TASK", meaning="m", advice="wait"), Code)
    catalogue.register("X", family="TASK", meaning="m", advice="try")  # type: ignore[arg-type]


class Mine(CodedError):
    pass


def subclasses() -> None:
    assert_type(Mine.from_exception(ValueError(), "TASK.FAILED"), Mine)
