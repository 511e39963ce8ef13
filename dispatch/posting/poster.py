"""The poster: an async Ray actor that makes the POSTs.

It does little on purpose: everything that decides (retries, capacity, replacement) is on the
caller's side. Its calls run in the default group; `pulse`, `drop` and `hold` run in a group of their
own, on their own loop and thread, and answer while the default group is full or blocked.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from typing import Any, Final

import httpx
import msgspec
import psutil
import ray

from dispatch.posting.request import Answer, Item
from dispatch.posting.transport import exchange, make_client
from faults import name_of
from protocol import CodedError, coded

BEAT: Final = 0.2
"""Seconds between two heartbeats of the default group's loop."""
MAX_TOMBSTONES: Final = 10_000
DROP_TIMEOUT: Final = 5.0


class PosterInfo(msgspec.Struct, frozen=True):
    """Who a poster is. The pid counts only together with the process's start time."""

    pid: int
    create_time: float
    node: str
    host: str


class Pulse(msgspec.Struct, frozen=True):
    """``age`` of the last heartbeat in seconds, and how many exchanges are open."""

    age: float
    active: int


@coded(name=name_of, code="INTERNAL.BUG")
class Poster:
    """See the module. ``connections`` is the most exchanges at once that it will ever be asked for."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._active: dict[str, asyncio.Task[Answer]] = {}
        # Attempts that were cancelled before they arrived (ray#52628): they must not start later.
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        self._beat = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> PosterInfo:
        """Open the client and start the heartbeat; must be the first call."""
        self._loop = asyncio.get_running_loop()
        self._client = make_client(self._connections)
        self._heart = asyncio.create_task(self._beat_on())
        me = psutil.Process()
        context = ray.get_runtime_context()
        return PosterInfo(os.getpid(), me.create_time(), context.get_node_id(), os.uname().nodename)

    async def post(self, item: Item, budget: float) -> Answer | CodedError:
        """One exchange within ``budget`` seconds. Failures of the exchange come back as values: they
        are ordinary here, and as values they cross Ray whole."""
        if item.attempt in self._tombstones:
            return CodedError("CANCEL.CALLER", "cancelled before it had started", {"request_id": item.id})
        assert self._client is not None
        task = asyncio.create_task(exchange(self._client, item, budget))
        self._active[item.attempt] = task
        try:
            return await task
        except CodedError as error:
            return error
        finally:
            # Being cancelled while awaiting the task cancels it; it has ended only when it is done.
            if not task.done():
                await _end(task)
            del self._active[item.attempt]

    @ray.method(concurrency_group="control")
    async def pulse(self) -> Pulse:
        """How fresh the default group's loop is. No answer: stopped or dead. An old beat: blocked or
        wedged. A fresh one with many active: merely full."""
        return Pulse(time.monotonic() - self._beat, len(self._active))

    @ray.method(concurrency_group="control")
    async def drop(self, attempt: str) -> bool:
        """Make sure that ``attempt`` neither runs nor will; True when that is certain."""
        if self._loop is None:
            return False
        done = asyncio.run_coroutine_threadsafe(self._drop(attempt), self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), DROP_TIMEOUT)
        except TimeoutError:
            return False

    @ray.method(concurrency_group="control")
    async def hold(self) -> None:
        """Never returns: the call fails the moment the actor dies, which makes it a death detector."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group="control")
    async def close(self) -> None:
        """Cancel what runs and close the client's connections, within `DROP_TIMEOUT`."""
        if self._loop is not None:
            done = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            await asyncio.wait_for(asyncio.wrap_future(done), DROP_TIMEOUT)

    async def _drop(self, attempt: str) -> bool:
        self._tombstones[attempt] = None
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        task = self._active.get(attempt)
        if task is not None:
            await _end(task)
        return True

    async def _close(self) -> None:
        await asyncio.gather(*(_end(task) for task in list(self._active.values())))
        if self._heart is not None:
            self._heart.cancel()
        if self._client is not None:
            await self._client.aclose()

    async def _beat_on(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT)


async def _end(task: asyncio.Task[Answer]) -> None:
    task.cancel()
    await asyncio.wait({task})


def poster_class() -> Any:
    """The Ray actor class of posters."""
    remote: Any = ray.remote  # its overloads do not know concurrency_groups
    return remote(concurrency_groups={"control": 16})(Poster)
