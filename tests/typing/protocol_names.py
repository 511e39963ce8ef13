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
from protocol.errors import Link
from protocol.keys import Keyring, Replays, fetch, held, hold
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

    @property
    def size(self) -> int:
        return self.n


class Plain:
    @coded
    @staticmethod
    def static(n: int) -> float:
        return float(n)

    @classmethod
    @coded(code="ENGINE.EXITED")
    def of_class(cls, n: int) -> str:
        return str(n)

    @property
    @coded
    def size(self) -> int:
        return 1

    @coded
    async def stream(self, n: int) -> AsyncIterator[int]:
        yield n


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
    assert_type(actor.size, int)
    actor.size = 2  # type: ignore[misc]
    assert_type(Plain.static(1), float)
    Plain.static("1")  # type: ignore[arg-type]
    assert_type(Plain.of_class(1), str)
    Plain.of_class("1")  # type: ignore[arg-type]
    assert_type(Plain().size, int)
    assert_type(Plain().stream(1), AsyncIterator[int])


async def keyring() -> None:
    ring = Keyring.generate()
    assert_type(ring.rotated(), Keyring)
    assert_type(held(), Keyring | None)
    hold(ring)
    hold("key")  # type: ignore[arg-type]
    assert_type(await fetch("run"), Keyring)
    assert_type(scan("text", key=ring), list[Token])
    assert_type(read("text", key=ring, replays=Replays()), Reading)
    mint("TASK.FAILED", key=ring)  # type: ignore[arg-type]
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
    assert_type(error.trust, Trust)
    assert_type(error.chain, tuple[Link, ...])
    assert_type(CodedError.from_exception(ValueError(), code), CodedError)
    assert_type(catalogue.entry(code), Entry)
    assert_type(catalogue.entry(code).advice, Advice)
    assert_type(catalogue.register("X", family="TASK", meaning="m", advice="wait"), Code)
    catalogue.register("X", family="TASK", meaning="m", advice="try")  # type: ignore[arg-type]


class Mine(CodedError):
    pass


def subclasses() -> None:
    assert_type(Mine.from_exception(ValueError(), "TASK.FAILED"), Mine)
