"""The poster: an async Ray actor that makes the POSTs.

It does little on purpose: everything that decides (retries, capacity, replacement) is on the
caller's side. `work` runs in the default group; `pulse`, `drop` and `hold` run in a group of their
own, on their own loop and thread, and answer while the default group is full or blocked.

`work` brings requests and waits for outcomes, not necessarily of its own requests: outcomes that are
there go out with the oldest call that waits. So one POST alone costs one call, many share calls both
ways, and a fast one never waits for a slow one.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import psutil
import ray

from dispatch.posting.posters.wire import Outcome, pack_reply, unpack
from dispatch.posting.request import Item
from dispatch.posting.transports.client import Client, Transport, make_client
from dispatch.posting.transports.descriptors import check_descriptors
from dispatch.posting.transports.transport import exchange
from faults import name_of
from protocol import CodedError, coded

BEAT: Final = 0.2
"""Seconds between two heartbeats of the default group's loop."""
STALE: Final = 5 * BEAT
"""Seconds without a heartbeat that need an explanation; a poster that starts on a busy machine has some."""
MAX_REMEMBERED: Final = 20_000
"""How many ended attempts are remembered, so that none is run a second time."""
DROP_TIMEOUT: Final = 5.0
WINDOW: Final = 0.005
"""Most seconds that an outcome waits for others to go with it."""
CROWD: Final = 16
"""An outcome waits for others only while more than this many exchanges are open, and then until one in
this many has ended: at 16 and fewer each goes out at once."""
PATIENCE: Final = 10.0
"""Seconds after which a call that waits is answered though there is nothing to say."""
WAITING: Final = 8
"""Most calls that wait for outcomes; older ones are answered. Below `batching.MAX_CALLS`, so that the pool
always has a call left to bring more with."""


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


class _Outgoing:
    """Outcomes on their way back, and the calls that wait for them. Lives on one event loop."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, Outcome]] = []
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._unacknowledged: OrderedDict[int, list[tuple[int, Outcome]]] = OrderedDict()
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    def acknowledged(self, numbers: Sequence[int], again: bool) -> None:
        """Forget the replies that came; with ``again``, send the others once more."""
        for number in numbers:
            self._unacknowledged.pop(number, None)
        if again:
            for outcomes in self._unacknowledged.values():
                self._ready.extend(outcomes)
            self._unacknowledged.clear()

    def add(self, attempt: int, outcome: Outcome, active: int) -> None:
        """An outcome; ``active`` exchanges are still open."""
        self._ready.append((attempt, outcome))
        self.pump(active)

    async def reply(self, active: int) -> bytes:
        """The next reply, for the call that awaits this."""
        loop = asyncio.get_running_loop()
        call: asyncio.Future[bytes] = loop.create_future()
        self._waiting.append(call)
        late = loop.call_later(PATIENCE, self._answer, call)
        try:
            self.pump(active)
            return await call
        finally:
            late.cancel()
            if call.cancelled():
                self._waiting = deque(one for one in self._waiting if one is not call)

    def pump(self, active: int) -> None:
        """Answer the calls that need not wait any longer."""
        while self._waiting and (len(self._waiting) > WAITING or self._due(active)):
            self._answer(self._waiting[0])
        if self._ready and self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._window_over)

    def _due(self, active: int) -> bool:
        return len(self._ready) * CROWD > active if self._ready else active == 0

    def _window_over(self) -> None:
        self._timer = None
        if self._ready and self._waiting:
            self._answer(self._waiting[0])

    def _answer(self, call: asyncio.Future[bytes]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = deque(one for one in self._waiting if one is not call)
        if call.done():
            return
        self._number += 1
        outcomes, self._ready = self._ready, []
        if outcomes:
            self._unacknowledged[self._number] = outcomes
        call.set_result(pack_reply(self._number, outcomes))


@coded(name=name_of, code="INTERNAL.BUG")
class Poster:
    """See the module. ``connections`` is the most exchanges at once that it will ever be asked for."""

    def __init__(self, connections: int, transport: Transport = "aiohttp") -> None:
        self._connections = connections
        self._transport: Transport = transport
        self._active: dict[int, asyncio.Task[None]] = {}
        # Attempts that have ended, or were cancelled before they arrived (ray#52628): they must not start.
        self._over: OrderedDict[int, None] = OrderedDict()
        self._outgoing = _Outgoing()
        self._beat = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Client | None = None
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> PosterInfo:
        """Open the client and start the heartbeat; must be the first call, and may be repeated."""
        if self._client is None:
            check_descriptors(self._connections, "a poster")
            self._loop = asyncio.get_running_loop()
            self._client = make_client(self._connections, self._transport)
            self._heart = asyncio.create_task(self._beat_on())
        me = psutil.Process()
        context = ray.get_runtime_context()
        return PosterInfo(os.getpid(), me.create_time(), context.get_node_id(), os.uname().nodename)

    async def work(self, message: bytes) -> bytes:
        """Begin the requests of ``message`` (see `wire.Message`), and answer with outcomes as soon as
        there are some, with none after `PATIENCE` seconds or when nothing is under way. Being cancelled
        says that nobody waits for these requests any more."""
        said = unpack(message)
        self._outgoing.acknowledged(said.acknowledged, said.again)
        mine = [item.attempt for item, budget in said.items if self._begin(item, budget)]
        try:
            return await self._outgoing.reply(len(self._active))
        except asyncio.CancelledError:
            await self._end(mine)
            raise

    @ray.method(concurrency_group="control")
    async def pulse(self) -> Pulse:
        """How fresh the default group's loop is. No answer: stopped or dead. An old beat: blocked or
        wedged. A fresh one with many active: merely full."""
        if time.monotonic() - self._beat > STALE:
            # A process that was stopped goes on in both loops: the other one is given the time for a beat.
            await asyncio.sleep(BEAT)
        return Pulse(time.monotonic() - self._beat, len(self._active))

    @ray.method(concurrency_group="control")
    async def drop(self, attempts: list[int]) -> bool:
        """Make sure that none of ``attempts`` runs or will; True when that is certain."""
        if self._loop is None:
            return False
        done = asyncio.run_coroutine_threadsafe(self._end(attempts), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), DROP_TIMEOUT)
        except TimeoutError:
            return False
        return True

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

    def _begin(self, item: Item, budget: float) -> bool:
        attempt = item.attempt
        if attempt in self._active or attempt in self._over:
            return False  # its call was sent again, or it was cancelled before it came
        self._active[attempt] = asyncio.create_task(self._exchange(item, budget))
        return True

    async def _exchange(self, item: Item, budget: float) -> None:
        assert self._client is not None
        outcome: Outcome
        try:
            outcome = await exchange(self._client, item, budget)
        except CodedError as error:
            outcome = error
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcome = CodedError.from_exception(exc, "INTERNAL.BUG")  # a transport's own doing
        except Exception as exc:  # noqa: BLE001 - whatever it is, its caller has to hear of it
            outcome = CodedError.from_exception(exc, name_of(exc) or "INTERNAL.BUG")
        self._ended(item.attempt)
        self._outgoing.add(item.attempt, outcome, len(self._active))

    def _ended(self, attempt: int) -> None:
        self._active.pop(attempt, None)
        self._over[attempt] = None
        while len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)

    async def _end(self, attempts: Sequence[int]) -> None:
        running: list[asyncio.Task[None]] = []
        for attempt in attempts:
            task = self._active.get(attempt)
            if task is None:
                self._ended(attempt)
            else:
                task.cancel()
                running.append(task)
        if running:
            await asyncio.wait(running)
            for attempt in attempts:
                self._ended(attempt)
            self._outgoing.pump(len(self._active))

    async def _close(self) -> None:
        await self._end(list(self._active))
        if self._heart is not None:
            self._heart.cancel()
        if self._client is not None:
            await self._client.aclose()

    async def _beat_on(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT)


@functools.cache
def poster_class() -> Any:
    """The Ray actor class of posters. Made once: the first actor of a class exports it through the GCS and
    blocks its process for as long as that is away (Ray 2.60), which must not happen with a replacement."""
    remote: Any = ray.remote  # its overloads do not know concurrency_groups
    return remote(concurrency_groups={"control": 16})(Poster)
