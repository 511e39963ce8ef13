"""A lane: where attempts go. One poster actor (`PosterLane`), or the local client (`LocalLane`).

Awaiting a Ray call does not stop it: after a timeout or a cancellation the remote end goes on until
`ray.cancel`, and even then only the poster itself can say that it has stopped. So a lane separates
the two: `run` ends for its caller at once, and the place is released when the remote end is known to
have stopped, or the poster with everything in it is known to be dead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import psutil
import ray
from ray.exceptions import RayError

from dispatch.posting.poster import PosterInfo, Pulse, poster_class
from dispatch.posting.request import Answer, Item
from dispatch.posting.transport import exchange, make_client
from dispatch.processes import is_alive, same_process
from faults import classify
from protocol import CodedError

GRACE: Final = 0.5
"""Seconds that a caller waits beyond a request's deadline for the poster's own verdict."""
CONFIRM: Final = 10.0
"""Seconds within which an abandoned attempt, or a killed poster, must be known to have ended."""
POLITE: Final = 1.0
"""Seconds that a worker gets to exit by itself after ray.kill."""


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
    ) -> None:
        self.name = name
        self.share = 0
        self.occupied = 0
        self.state = State.STARTING
        self.info: PosterInfo | None = None
        self.trouble: CodedError | None = None  # what the last probe found
        self._release = release
        self._on_state = on_state
        self._health = health
        self._actor: Any = None
        self._suspect = asyncio.Event()
        self._hold: asyncio.Task[Any] | None = None
        self._races: set[asyncio.Future[Any]] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._end: CodedError | None = None
        self._over = False

    async def start(self, options: dict[str, Any], connections: int) -> None:
        """Create the actor and wait until it answers. Raises CodedError, and leaves nothing behind."""
        try:
            self._actor = poster_class().options(**options).remote(connections)
            async with asyncio.timeout(self._health.start_timeout):
                self.info = await self._call("start")
        except BaseException:  # cancelled, timed out or failed: the actor, whatever became of it, is not kept
            if self._actor is not None:
                ray.kill(self._actor, no_restart=True)
            self.state = State.DEAD
            raise
        self._hold = asyncio.create_task(self._call("hold"))
        self.state = State.SERVING

    async def run(self, item: Item, budget: float) -> Answer:
        """One attempt. Raises CodedError. The place is released here in every case, at once or when
        the remote end is known to have stopped."""
        ref: Any = None
        race: asyncio.Future[Any] | None = None
        running = False  # whether the remote end may go on after this returns
        try:
            if self._end is not None:
                raise CodedError(
                    "ACTOR.DIED", f"{self.name} died before it got the request: {self._end.detail}"
                )
            ref = self._actor.post.remote(item, budget)
            race = self._race(ref)
            running = True
            async with asyncio.timeout(budget + GRACE):
                answer = await race
            running = False
        except TimeoutError as exc:
            self._suspect.set()  # the poster should have ended it by itself
            detail = f"{self.name} gave no verdict within {budget + GRACE:.3g} s"
            raise CodedError("TIMEOUT.DEADLINE", detail, {"url": item.url}) from exc
        except CodedError as error:  # the lane's end, or what the poster did not expect
            running = False
            raise _without_ray(error) from None
        except RayError as exc:
            fault = classify(exc)
            self._suspect.set()  # Ray says "died" before the process has ended: the place waits for that
            raise CodedError.from_exception(
                exc, fault.code, data={"url": item.url, "poster": self.name}
            ) from exc
        finally:
            if race is not None:
                race.cancel()
            if running:
                self._abandon(ref, item)
            else:
                self._release(self)
        if isinstance(answer, CodedError):
            raise answer
        assert isinstance(answer, Answer)
        return answer

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
            self.trouble = failure = await self._probe()
            if failure is None:
                strikes, away = 0, 0.0
                if self._hold.done():  # answers, yet the death detector broke off: set a new one
                    self._hold.exception()
                    self._hold = asyncio.create_task(self._call("hold"))
                self._set(State.SERVING)
                continue
            if failure.code in ("ACTOR.DIED", "NODE.PREEMPTED", "ACTOR.INIT_FAILED"):
                return failure
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
        """Kill the actor and everything in flight with it. True when its process is known to be gone;
        the places of what was in flight are released either way, since no reply can come any more."""
        self.state = State.DEAD
        self._end = why
        ray.kill(self._actor, no_restart=True)
        try:
            return await self._confirm_gone()
        finally:
            self.settle(
                CodedError("ACTOR.DIED", f"{self.name} was replaced with the request in flight: {why.detail}")
            )
            await asyncio.sleep(0)  # let the attempts see it before the lane counts as empty
            self._over = True
            for task in list(self._abandoned):
                task.cancel()
            if self._hold is not None and not self._hold.cancel() and not self._hold.cancelled():
                self._hold.exception()  # it has told of the death, and nobody else looks at it

    def settle(self, error: CodedError) -> None:
        """Fail what is in flight with ``error``; Ray's own verdict comes too late or not at all."""
        for race in list(self._races):
            if not race.done():
                race.set_exception(error)

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

    async def _call(self, method: str, *args: Any) -> Any:
        return await getattr(self._actor, method).remote(*args)

    async def _probe(self) -> CodedError | None:
        try:
            async with asyncio.timeout(self._health.timeout):
                pulse: Pulse = await self._call("pulse")
        except TimeoutError:
            # Stopped, wedged or starved: from here the three look alike.
            return CodedError(
                "ACTOR.WEDGED", f"{self.name} does not answer a probe within {self._health.timeout} s"
            )
        except (RayError, CodedError) as exc:
            fault = classify(exc)
            return CodedError.from_exception(exc, fault.code)
        if pulse.age >= self._health.wedge_after:
            return CodedError(
                "ACTOR.WEDGED",
                f"{self.name}'s event loop has not moved for {pulse.age:.1f} s",
                {"active": pulse.active, "certain": True},
            )
        return None

    def _race(self, ref: Any) -> asyncio.Future[Any]:
        """A future for ``ref`` that the lane's end can settle too: a dead poster's call may never do
        so by itself (miles#1279)."""
        race: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reply = asyncio.ensure_future(_await(ref))

        def settle(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if race.done():
                return
            if error is not None:
                race.set_exception(error)
            else:
                race.set_result(done.result())

        reply.add_done_callback(settle)

        def forget(done: asyncio.Future[Any]) -> None:
            self._races.discard(race)
            reply.cancel()
            if not done.cancelled():
                done.exception()  # its caller may have gone: then nobody else looks at it

        race.add_done_callback(forget)
        self._races.add(race)
        return race

    def _abandon(self, ref: Any, item: Item) -> None:
        if self._over:
            self._release(self)
            return
        task = asyncio.create_task(self._confirm_stopped(ref, item.attempt))
        self._abandoned.add(task)

        def stopped(done: asyncio.Task[None]) -> None:
            # Here and not in the task: one that is cancelled before its first step runs no `finally`.
            self._abandoned.discard(done)
            self._release(self)

        task.add_done_callback(stopped)

    async def _confirm_stopped(self, ref: Any, attempt: str) -> None:
        """Cancel the remote end and hold its place until it is known to have stopped; where that
        cannot be learned, the poster is a suspect, and its end (`retire`) cancels this."""
        ray.cancel(ref)
        while True:
            if self._end is None:
                with contextlib.suppress(TimeoutError, RayError, CodedError):
                    async with asyncio.timeout(CONFIRM):
                        if await self._call("drop", attempt):
                            return
            self._suspect.set()
            await asyncio.sleep(self._health.interval)

    async def _confirm_gone(self) -> bool:
        info = self.info
        if info is not None and info.node == ray.get_runtime_context().get_node_id():
            # ray.kill asks the worker to exit; a stopped or wedged one cannot, and SIGKILL can.
            if await until(lambda: not is_alive(info.pid, info.create_time), POLITE):
                return True
            process = same_process(info.pid, info.create_time)
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return await until(lambda: not is_alive(info.pid, info.create_time), CONFIRM)
        # On another node the raylet kills it, and the call that never returns fails when it is gone.
        hold = self._hold
        return hold is not None and await until(hold.done, CONFIRM)


class LocalLane:
    """The local client: the pool's own process makes the POSTs while no poster is healthy."""

    name = "local"
    via: Final = "local"

    def __init__(self, release: Callable[[LocalLane], None], connections: int) -> None:
        self.share = 0
        self.occupied = 0
        self._release = release
        self._client = make_client(connections)
        self._running: set[asyncio.Task[Answer]] = set()

    async def run(self, item: Item, budget: float) -> Answer:
        """One attempt; see `PosterLane.run`. Its end is its remote end."""
        task = asyncio.create_task(exchange(self._client, item, budget))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError as exc:
            if not task.cancelled() or (current := asyncio.current_task()) is None or current.cancelling():
                raise
            raise CodedError("POOL.CLOSED", "the pool was closed with the request in flight") from exc
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            self._running.discard(task)
            self._release(self)

    async def close(self) -> None:
        """Cancel what runs, and close the connections."""
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))
        await self._client.aclose()


Lane = PosterLane | LocalLane


def _without_ray(error: CodedError) -> CodedError:
    """The error as it was raised: through Ray it arrives as a dual of itself and RayTaskError."""
    cause = vars(error).get("cause")
    return cause if isinstance(cause, CodedError) else error


async def _await(ref: Awaitable[Any]) -> Any:
    return await ref


async def until(true: Callable[[], bool], timeout: float) -> bool:
    """Poll ``true`` until it holds or ``timeout`` seconds have passed; the last answer."""
    end = asyncio.get_running_loop().time() + timeout
    while not true():
        if asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(0.01)
    return True
