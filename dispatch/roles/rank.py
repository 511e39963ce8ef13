"""A rank: the actor that holds one instance of the user's class.

The instance is made by a call, not by the actor's own constructor: only then is the rendezvous known, for
its address is rank 0's, and what the instance's ``__init__`` raises arrives as the CodedError that it is,
where of an actor's constructor only text would.

A class without coroutine methods runs on one thread of its own, its ``__init__`` included (CUDA's current
device, for one, belongs to the thread), so that `pulse` answers while it computes. One with coroutine methods
runs on the actor's loop, as it would as an actor of Ray.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import psutil
import ray

from faults import name_of
from protocol import CodedError, coded
from protocol.boundary import named
from protocol.errors import here

CONTROL: Final = "control"
"""The concurrency group of `pulse` and `hold`: a loop and thread of its own."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the ranks of one epoch meet. ``address`` and ``port`` are of rank 0's node, chosen anew for each
    epoch; ``epoch`` only ever grows, so it also serves as a fencing number for what is written outside."""

    group: str
    epoch: int
    address: str
    port: int

    @property
    def name(self) -> str:
        """A name for this epoch alone: ray.util.collective refuses a group name that it had before."""
        return f"{self.group}.{self.epoch}"

    @property
    def url(self) -> str:
        """As torch.distributed's ``init_method``."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


class RankInfo(msgspec.Struct, frozen=True):
    """Who a rank is. The pid counts only together with the process's start time."""

    pid: int
    create_time: float
    node: str
    host: str


def is_async(cls: type) -> bool:
    """Whether Ray would make an async actor of ``cls``: it has a coroutine method."""
    return bool(inspect.getmembers(cls, inspect.iscoroutinefunction))


@coded(name=name_of, code="INTERNAL.BUG")
class Rank:
    """See the module."""

    def __init__(self) -> None:
        self._it: Any = None
        self._async = False
        self._thread = ThreadPoolExecutor(1, "rank")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: socket.socket | None = None
        # By number, so that a call whose reply was lost can be made again and does not run again.
        self._runs: dict[int, asyncio.Task[Any]] = {}

    async def introduce(self) -> RankInfo:
        """Who this is; may be repeated."""
        self._loop = asyncio.get_running_loop()
        node = ray.get_runtime_context().get_node_id()
        return RankInfo(os.getpid(), psutil.Process().create_time(), node, here().host)

    async def choose(self) -> tuple[str, int]:
        """An address of this node that the others reach, and a free port there. The port is held until
        `build` begins, so that nothing else gets it meanwhile; may be repeated."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray gives it no types
        if self._port is None:
            self._port = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            self._port.bind((address, 0))
        return address, int(self._port.getsockname()[1])

    async def build(
        self, cls: type, rank: int, world_size: int, rendezvous: Rendezvous, /, *args: Any, **kwargs: Any
    ) -> None:
        """Make the instance. Raises what its ``__init__`` raises, named."""
        self._async = is_async(cls)
        if self._port is not None:
            self._port.close()
        make = functools.partial(cls, rank, world_size, rendezvous, *args, **kwargs)
        self._it = await self._invoke(make)

    async def run(self, number: int, oldest: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``method``, as call ``number``: once, however often it is asked for. Results of calls before
        ``oldest`` are forgotten."""
        for old in [one for one in self._runs if one < oldest]:
            del self._runs[old]
        if number not in self._runs:
            work = functools.partial(getattr(self._it, method), *args, **kwargs)
            self._runs[number] = asyncio.create_task(self._invoke(work))
        return await self._runs[number]

    @ray.method(concurrency_group=CONTROL)
    async def pulse(self) -> bool:
        """Whether the default loop still runs; a KeyboardInterrupt or SystemExit in one of its tasks ends it,
        and calls are never answered again (Ray 2.60)."""
        return self._loop is None or self._loop.is_running()

    @ray.method(concurrency_group=CONTROL)
    async def hold(self) -> None:
        """Never returns: the call fails the moment the process dies."""
        await asyncio.Event().wait()

    async def _invoke(self, work: Callable[[], Any]) -> Any:
        if not self._async:
            return _value(await asyncio.get_running_loop().run_in_executor(self._thread, _attempt, work))
        value = _value(_attempt(work))
        if not inspect.isawaitable(value):
            return value
        try:
            return await value
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # KeyboardInterrupt and SystemExit too: see `pulse`
            raise _named(exc) from exc


def _attempt(work: Callable[[], Any]) -> tuple[Any, CodedError | None]:
    try:
        return work(), None
    except BaseException as exc:  # noqa: BLE001 - whatever the user's code raises; it must not end the loop
        return None, _named(exc)


def _value(outcome: tuple[Any, CodedError | None]) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _named(exc: BaseException) -> CodedError:
    if isinstance(exc, Exception):
        return named(exc, code="TASK.FAILED", name=name_of)
    return CodedError.from_exception(exc, "TASK.FAILED")


@functools.cache
def rank_class() -> Any:
    """The Ray actor class of ranks. Made once: the first actor of a class exports it through the GCS and
    blocks its process for as long as that is away (Ray 2.60), which must not happen with a restart."""
    remote: Any = ray.remote  # its overloads do not know concurrency_groups
    return remote(concurrency_groups={CONTROL: 16})(Rank)
