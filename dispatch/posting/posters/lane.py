"""A lane: where attempts go. One life of one poster actor (`PosterLane`), or the local client.

What is in flight with the poster is `batching`'s business; its life (start, health, end) is this module's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import ray
from ray.exceptions import RayError

from dispatch.posting.posters.batching import DEAD, Batcher, Unsent, answered
from dispatch.posting.posters.local import LocalLane
from dispatch.posting.posters.poster import PosterInfo, Pulse, poster_class
from dispatch.posting.posters.session import Session
from dispatch.posting.posters.wire import LARGE
from dispatch.posting.request import Answer, Item
from dispatch.posting.transports.client import Transport
from dispatch.processes import CONFIRM, see_gone
from faults import classify
from protocol import CodedError

RAYLET_KILLS: Final = 6.0
"""Seconds after `ray.kill` within which a process on another node is really gone: its raylet asks it first,
and sends SIGKILL after 5 s to one that is stopped (Ray 2.60, kill_worker_timeout_milliseconds)."""


@dataclass(frozen=True, slots=True)
class Health:
    """How posters are watched; all in seconds, except ``strikes``.

    A probe every ``interval``, each given ``timeout``. The first that is not answered takes the
    poster out of service; ``strikes`` in a row replace it. A heartbeat older than ``wedge_after``
    replaces it too. A poster that Ray calls unavailable is quarantined for up to ``unavailable``."""

    interval: float = 0.5
    timeout: float = 2.0
    strikes: int = 3
    wedge_after: float = 5.0
    unavailable: float = 30.0
    start_timeout: float = 60.0


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    DEAD = "dead"


class PosterLane:
    """One life of one poster. ``release`` gives a place back; ``on_state`` hears of each change
    between serving and quarantined."""

    via: Final = "poster"

    def __init__(
        self,
        name: str,
        release: Callable[[PosterLane], None],
        on_state: Callable[[PosterLane], None],
        health: Health,
        session: Session,
    ) -> None:
        self.name = name
        self._session = session
        self.share = 0
        self.occupied = 0
        self.state = State.STARTING
        self.info: PosterInfo | None = None
        self.trouble: CodedError | None = None  # what the last probe found
        self.lost: CodedError | None = None  # Ray's word that it is dead
        self._on_state = on_state
        self._health = health
        self._actor: Any = None
        self._suspect = asyncio.Event()
        self._hold: asyncio.Task[Any] | None = None
        self._batcher = Batcher(
            name,
            self,
            release=lambda: release(self),
            suspect=self._suspect.set,
            died=self._died,
            interval=health.interval,
        )

    async def start(self, options: dict[str, Any], connections: int, transport: Transport) -> None:
        """Create the actor and wait until it answers. Raises CodedError, and leaves nothing behind."""
        try:
            self._actor = poster_class().options(**options).remote(connections, transport)
            async with asyncio.timeout(self._health.start_timeout):
                self.info = await self._started()
        except BaseException as exc:  # raised again below
            self._kill()  # cancelled, timed out or failed: the actor, whatever became of it, is not kept
            self.state = State.DEAD
            if isinstance(exc, TimeoutError):
                detail = (
                    f"{self.name} did not start in {self._health.start_timeout:g} s: see `ray status` for "
                    f"room on its node, and its worker-*.err under /tmp/ray/session_latest/logs"
                )
                raise CodedError.from_exception(exc, "TIMEOUT.DEADLINE", detail) from exc
            raise
        self._hold = asyncio.create_task(self._call("hold"))
        self.state = State.SERVING

    async def run(self, item: Item, budget: float) -> Answer:
        """One attempt; see `Batcher.run`."""
        if self.state is not State.SERVING:  # since it was chosen
            raise Unsent
        return await self._batcher.run(item, budget)

    def send(self, message: bytes) -> Awaitable[bytes]:
        """For the batcher: one call of the poster."""
        if not ray.is_initialized():
            raise CodedError("POOL.CLOSED", f"Ray was shut down, and {self.name} with it")
        sent: Any = message
        if len(message) > LARGE:
            lost = self._session.orphaned()
            if lost is not None:  # what follows would end this process
                self._died(lost)
                raise lost
            sent = ray.put(message)
        ref: Awaitable[bytes] = self._actor.work.remote(sent)
        return ref

    def cancel(self, call: Awaitable[bytes]) -> None:
        """For the batcher: nobody waits for any request of this call."""
        # Politeness only: whatever comes of it, `drop` is what counts.
        with contextlib.suppress(Exception):
            if ray.is_initialized():
                ray.cancel(call)

    async def drop(self, attempts: list[int]) -> bool:
        """For the batcher: have the poster stop these attempts."""
        stopped: bool = await self._call("drop", attempts)
        return stopped

    async def watch(self) -> CodedError:
        """Until this poster has to be replaced, and why. Never raises for what the poster does."""
        strikes = 0
        away = 0.0  # when Ray first called it unavailable
        loop = asyncio.get_running_loop()
        assert self._hold is not None
        while True:
            wake = asyncio.ensure_future(self._suspect.wait())
            news: set[asyncio.Future[Any]] = {wake}
            if self.trouble is None or not self._hold.done():
                news.add(self._hold)  # once it has told of the trouble, only the interval paces the probes
            try:
                await asyncio.wait(news, timeout=self._health.interval, return_when=asyncio.FIRST_COMPLETED)
            finally:
                wake.cancel()
            self._suspect.clear()
            failure = self.lost or self._session.ended() or await self._probe()
            self.trouble = failure = self.lost or failure  # its answer may have come just before its death
            if failure is None:
                strikes, away = 0, 0.0
                if self._hold.done():  # answers, yet the death detector broke off: set a new one
                    self._hold.exception()
                    self._hold = asyncio.create_task(self._call("hold"))
                self._set(State.SERVING)
                self._batcher.resume()
                continue
            if failure.code in (*DEAD, "NODE.DIED", "POOL.MISUSE"):
                return failure
            lost = self._session.orphaned()
            if lost is not None:
                return lost  # Ray says so much later, if ever
            if failure.code == "ACTOR.UNAVAILABLE":
                away = away or loop.time()
                if loop.time() - away >= self._health.unavailable:
                    return failure
            else:
                strikes += 1
                if strikes >= self._health.strikes or failure.data.get("certain"):
                    return failure
            self._set(State.QUARANTINED)

    async def retire(self, why: CodedError) -> bool:
        """Kill the actor and everything in flight with it. True when its process is known to be gone (on
        another node by Ray's word alone); the places of what was in flight are released either way, since
        no reply can come any more."""
        self.state = State.DEAD
        self._batcher.hand_back()
        by_itself = self.lost is not None
        self._kill()
        if self._session.ended() is not None:  # nothing can be asked any more, and nobody is to wait for that
            detail = "Ray was shut down under the pool with the request in flight"
            self.settle(CodedError("POOL.CLOSED", detail))
        try:
            return await self._confirm_gone(by_itself)
        finally:
            self.settle(
                CodedError("ACTOR.DIED", f"{self.name} was replaced with the request in flight: {why.detail}")
            )
            self._batcher.over()
            if self._hold is not None and not self._hold.cancel() and not self._hold.cancelled():
                self._hold.exception()  # it has told of the death, and nobody else looks at it

    def settle(self, error: CodedError) -> None:
        """Fail what is in flight with ``error``; Ray's own verdict comes too late or not at all."""
        self._batcher.settle(error)

    async def close(self) -> bool:
        """The orderly end: let the poster close its connections, then `retire` it."""
        self.state = State.DEAD
        with contextlib.suppress(CodedError, RayError, TimeoutError):
            # Politeness only: whatever comes of it, the kill below is what counts.
            async with asyncio.timeout(self._health.timeout):
                await self._call("close")
        return await self.retire(CodedError("POOL.CLOSED", "the pool was closed"))

    def _set(self, state: State) -> None:
        if self.state is not state and self.state is not State.DEAD:
            self.state = state
            self._on_state(self)
            if state is State.QUARANTINED:
                self._batcher.hand_back()

    async def _started(self) -> PosterInfo:
        while True:
            try:
                info: PosterInfo = await self._call("start")
                return info
            except RayError as exc:
                if classify(exc).code != "ACTOR.UNAVAILABLE":
                    raise
            await asyncio.sleep(self._health.interval)  # the call or its reply was lost; it may be repeated

    async def _call(self, method: str, *args: Any) -> Any:
        if not ray.is_initialized():  # a call would start another Ray
            raise CodedError("POOL.MISUSE", f"Ray was shut down, and {self.name} with it")
        return await getattr(self._actor, method).remote(*args)

    def _kill(self) -> None:
        # Ray refuses to kill what it does not know, which is as good as killed.
        with contextlib.suppress(Exception):
            if self._actor is not None and self._session.ended() is None:
                ray.kill(self._actor, no_restart=True)

    async def _probe(self) -> CodedError | None:
        try:
            pulse: Pulse = await answered(self._call("pulse"), self._health.timeout)
        except TimeoutError:
            # Stopped, wedged or starved: from here the three look alike.
            return CodedError(
                "ACTOR.WEDGED", f"{self.name} does not answer a probe within {self._health.timeout} s"
            )
        except Exception as exc:  # noqa: BLE001 - Ray raises a bare Exception for an actor that it does not know
            fault = classify(exc)
            return CodedError.from_exception(exc, fault.code)
        if pulse.age >= self._health.wedge_after:
            return CodedError(
                "ACTOR.WEDGED",
                f"{self.name}'s event loop has not moved for {pulse.age:.1f} s",
                {"active": pulse.active, "certain": True},
            )
        return None

    def _died(self, error: CodedError) -> None:
        # Out of service at once: waiting for the next probe would send it more.
        self.trouble = self.lost = error
        self._suspect.set()
        self._set(State.QUARANTINED)

    async def _confirm_gone(self, by_itself: bool) -> bool:
        """``by_itself``: it had died before it was killed."""
        info = self.info
        if info is not None and info.node == self._session.node:
            return await see_gone(info.pid, info.create_time)
        # On another node the raylet kills it, and all that is heard is the call that never returns: it fails
        # when a process that died by itself has closed its sockets, but after `ray.kill` at once, though the
        # process still takes a moment, and a stopped one the 5 s after which its raylet sends SIGKILL (Ray
        # 2.60). It also breaks off when the node merely cannot be reached, and then it has to be set again.
        end = asyncio.get_running_loop().time() + CONFIRM
        while self._hold is not None and self._session.ended() is None:
            left = end - asyncio.get_running_loop().time()
            await asyncio.wait({self._hold}, timeout=max(left, 0.0))
            if not self._hold.done():
                return False
            exc = None if self._hold.cancelled() else self._hold.exception()
            if exc is not None and classify(exc).code in DEAD:
                if not by_itself and self._session.ended() is None:
                    await asyncio.sleep(RAYLET_KILLS)  # its server may still be at work for it until then
                return True
            if left <= 0:
                return False
            await asyncio.sleep(self._health.interval)
            self._hold = asyncio.create_task(self._call("hold"))
        return False


Lane = PosterLane | LocalLane
