"""``@coded`` on what Ray makes remote, in both orders of the decorators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import ray

from faults import name_of
from protocol import CodedError, coded
from tests.protocol.badly_written import KeywordOnly, WillNotLoad


class Base:
    """What both actor classes inherit."""

    async def inherited(self) -> NoReturn:
        raise KeywordOnly(status=503)


class Methods(Base):
    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise FileNotFoundError(2, "no such file", "weights.bin")

    async def keyword_only(self) -> NoReturn:
        raise KeywordOnly(status=503)

    async def will_not_load(self) -> NoReturn:
        raise WillNotLoad("what was said")

    async def named(self) -> NoReturn:
        raise CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog", {"step": 7})

    async def stream(self) -> AsyncIterator[int]:
        yield 1
        raise ConnectionResetError("in the middle")

    async def forever(self) -> None:
        await asyncio.Event().wait()

    @ray.method(concurrency_group="control")
    async def works(self, *, n: int = 1) -> int:
        return n


# Each from a class of its own, for `coded` changes the class that it is given.
Inside: Any = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(
    coded(name=name_of)(type("Inside", (Methods,), {}))
)
Outside: Any = coded(name=name_of)(
    ray.remote(num_cpus=0, concurrency_groups={"control": 1})(type("Outside", (Methods,), {}))
)


class _Threaded:
    def sync(self) -> NoReturn:
        raise WillNotLoad("what was said")

    def works(self) -> int:
        return 1


Threaded: Any = coded(name=name_of)(ray.remote(num_cpus=0)(_Threaded))


@coded(name=name_of)
@ray.remote(num_cpus=0)
def task_outside() -> None:
    raise KeywordOnly(status=503)


@ray.remote(num_cpus=0)
@coded(name=name_of)
def task_inside() -> None:
    raise KeywordOnly(status=503)
