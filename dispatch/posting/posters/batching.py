"""Batching: what is in flight with one poster, from the pool's side.

Requests that become ready together travel in one call, outcomes that are there together come back in one
reply, and any reply answers any request (see `poster`). So the caller of a request awaits a future, and a
few calls a poster serve thousands of them.

Awaiting does not stop the remote end: after a timeout or a cancellation it goes on until it is told, and
only the poster itself can say that it has stopped. So a request ends for its caller at once, and its place
is released when the remote end is known to have stopped, or the poster with everything in it to be dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

from ray.exceptions import RayError

from dispatch.posting.posters.poster import PATIENCE
from dispatch.posting.posters.wire import Message, Outcome, pack, unpack_reply
from dispatch.posting.request import Answer, Item
from faults import classify
from protocol import CodedError

GRACE: Final = 0.5
"""Seconds that a caller waits beyond a request's deadline for the poster's own verdict."""
COARSE: Final = 0.25
"""Seconds by which the end of that grace may be late."""
CONFIRM: Final = 10.0
"""Seconds within which a poster that was told to drop a request must confirm it."""
CALL_TIMEOUT: Final = PATIENCE + 5.0
"""Seconds after which a call that was not answered counts as lost: a poster answers within `PATIENCE`."""
MAX_CALLS: Final = 12
"""Most calls under way at once; what becomes ready meanwhile goes with the next."""
PARTS: Final = 8
"""A call carries at most this part of what is in flight. Each call under way can bring back outcomes, and
with several of them outcomes trickle back instead of coming, and being sent again, as one wave."""
MAX_BYTES: Final = 8 * 1024 * 1024
"""About how many bytes of requests go in one call."""
FEW: Final = 16
"""Up to this many in flight a request is sent in the same turn of the loop; with more, `GATHER` later."""
GATHER: Final = 0.001
"""Seconds in which requests gather for one call."""
FAILURES: Final = 3
"""How many times in a row calls may fail before their requests fail with them."""
DEAD: Final = ("ACTOR.DIED", "NODE.PREEMPTED", "ACTOR.INIT_FAILED")
"""What Ray says of an actor that is gone for good."""
LOST: Final = ("ACTOR", "CANCEL", "NODE", "OBJECT", "TIMEOUT")
"""Families of failures of a call that say nothing of its requests."""
AWAY: Final = ("ACTOR.UNAVAILABLE", "OBJECT.LOST")
"""Those that end by themselves, with the poster's return or its death, and hit many calls at once: a poster's
large replies lie in its node's object store, and go with it before Ray calls the poster dead."""
T = TypeVar("T")


class Wire(Protocol):
    """How a poster is reached. `send` begins a call and gives what to await; `cancel` revokes it; `drop`
    makes sure that attempts do not run, True when that is certain."""

    def send(self, message: bytes) -> Awaitable[bytes]: ...
    def cancel(self, call: Awaitable[bytes]) -> None: ...
    async def drop(self, attempts: list[int]) -> bool: ...


class Unsent(Exception):
    """The poster ended, or fell silent, before the request was handed to Ray. Its place is still taken."""


class _Flight:
    """One request on its way. ``call`` is the call it went with last; None while it waits for one."""

    __slots__ = ("call", "ends", "future", "item", "sent", "slot")

    def __init__(self, item: Item, ends: float, loop: asyncio.AbstractEventLoop) -> None:
        self.item = item
        self.ends = ends
        self.future: asyncio.Future[Outcome | None] = loop.create_future()  # None: never sent
        self.call: _Call | None = None
        self.sent = False
        self.slot = math.ceil((ends + GRACE) / COARSE)  # when it is looked at, with others; `_look_later`

    def handed_back(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.result() is None


class _Call:
    """One call under way. ``live``: how many of its requests somebody still waits for."""

    __slots__ = ("awaited", "flights", "live", "revoked", "task")

    def __init__(self, flights: list[_Flight]) -> None:
        self.flights = flights
        self.live = len(flights)
        self.revoked = False
        self.awaited: Awaitable[bytes] | None = None
        self.task: asyncio.Task[None] | None = None


class Batcher:
    """See the module. ``release`` gives one place back; ``suspect`` hears that the poster should be
    looked at, and ``died`` that Ray called it dead. ``interval`` (seconds) paces repeated confirmations."""

    def __init__(
        self,
        name: str,
        wire: Wire,
        *,
        release: Callable[[], None],
        suspect: Callable[[], None],
        died: Callable[[CodedError], None],
        interval: float,
    ) -> None:
        self._name = name
        self._wire = wire
        self._release = release
        self._suspect = suspect
        self._died = died
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._flights: dict[int, _Flight] = {}
        self._outbox: list[_Flight] = []
        self._calls: set[_Call] = set()
        self._held: set[int] = set()  # ended for their callers, not yet known to have stopped
        self._drops: list[int] = []
        self._confirming: set[asyncio.Task[None]] = set()
        self._acknowledged: list[int] = []
        self._again = False
        self._failures = 0
        self._paused = False
        self._end: CodedError | None = None
        self._over = False
        self._due: dict[int, set[int]] = {}  # by when to look, in units of `COARSE`
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._flushing: asyncio.Handle | None = None
        self._soon = False

    async def run(self, item: Item, budget: float) -> Answer:
        """One attempt, within ``budget`` seconds. Raises CodedError, or `Unsent`. Its place is released, at
        once or when the remote end is known to have stopped, in every case but `Unsent`."""
        if self._end is not None:
            raise Unsent
        flight = _Flight(item, self._loop.time() + budget, self._loop)
        self._look_later(flight)
        self._flights[item.attempt] = flight
        self._outbox.append(flight)
        self._flush_soon(len(self._flights) <= FEW)
        try:
            outcome = await flight.future
        except asyncio.CancelledError:
            if flight.handed_back():
                self._release()  # in the instant of the cancellation: nobody else will
            self._abandon(flight)
            raise
        finally:
            self._look_no_more(flight)
        if outcome is None:
            raise Unsent
        if isinstance(outcome, CodedError):
            raise outcome
        return outcome

    def resume(self) -> None:
        """The poster answers (again)."""
        if self._paused:
            self._paused = False
            self._flush_soon(True)

    def hand_back(self) -> None:
        """The poster does not answer: what was not handed to Ray yet goes elsewhere. What was may run."""
        unsent = [flight for flight in self._flights.values() if not flight.sent]
        for flight in reversed(unsent):  # each goes before the others where it has to wait
            del self._flights[flight.item.attempt]
            if flight.future.done():
                self._release()  # cancelled, and about to hear of it
            self._finish(flight, None)
        self._outbox = [flight for flight in self._outbox if flight.sent]

    def settle(self, error: CodedError) -> None:
        """End everything in flight with ``error``, and take nothing more. Places stay taken until `over`."""
        if self._end is None:
            self._end = error
        self.hand_back()
        flights, self._flights, self._outbox = list(self._flights.values()), {}, []
        for flight in flights:
            self._held.add(flight.item.attempt)
            data = {**error.data, "poster": self._name, **_about(flight)}
            self._finish(flight, CodedError(error.code, error.detail, data))

    def over(self) -> None:
        """The poster is gone with everything in it: nothing of this can run any more."""
        self._over = True
        for call in self._calls:
            if call.task is not None:
                call.task.cancel()
        for task in self._confirming:
            task.cancel()
        for timer in self._timers.values():
            timer.cancel()
        if self._flushing is not None:
            self._flushing.cancel()
        held, self._held = self._held, set()
        for _ in held:
            self._release()

    # -- to the poster

    def _flush_soon(self, soon: bool) -> None:
        if self._flushing is not None:
            if self._soon or not soon:
                return
            self._flushing.cancel()
        self._soon = soon
        self._flushing = (
            self._loop.call_soon(self._flush) if soon else self._loop.call_later(GATHER, self._flush)
        )

    def _flush(self) -> None:
        self._flushing = None
        if self._drops:
            drops, self._drops = self._drops, []
            self._spawn(self._confirm(drops))
        # Somebody has to be there to bring the outcomes back, or to ask again for lost ones: a call without
        # requests, if need be.
        while not self._paused and len(self._calls) < MAX_CALLS:
            batch = self._batch()
            if not batch and (not self._flights or (self._calls and not self._again)):
                return
            self._send(batch)

    def _batch(self) -> list[_Flight]:
        size = 0
        most = max(FEW, len(self._flights) // PARTS)
        batch: list[_Flight] = []
        for taken, flight in enumerate(self._outbox, 1):
            if not flight.future.done():
                batch.append(flight)
                size += len(flight.item.body)
                if size >= MAX_BYTES or len(batch) == most:
                    del self._outbox[:taken]
                    return batch
        self._outbox.clear()
        return batch

    def _send(self, flights: list[_Flight]) -> None:
        call = _Call(flights)
        now = self._loop.time()
        items = [(flight.item, max(flight.ends - now, 0.001)) for flight in flights]
        message = Message(items, self._acknowledged, self._again)
        self._acknowledged, self._again = [], False
        for flight in flights:
            flight.call, flight.sent = call, True
        self._calls.add(call)
        call.task = asyncio.create_task(self._call(call, message))

    async def _call(self, call: _Call, message: Message) -> None:
        failure: Exception | None = None
        number = 0
        outcomes: list[tuple[int, Outcome]] = []
        try:
            call.awaited = self._wire.send(pack(message))
            number, outcomes = unpack_reply(await answered(call.awaited, CALL_TIMEOUT))
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait for the call have to hear it
            failure = exc
        finally:
            self._calls.discard(call)
        if failure is not None:
            self._failed(call, failure)
        else:
            self._failures = 0
            self._acknowledged.append(number)
            for attempt, outcome in outcomes:
                self._settle(attempt, outcome)
        if self._flights and not self._over:
            self._flush_soon(bool(self._outbox))

    # -- from the poster

    def _settle(self, attempt: int, outcome: Outcome) -> None:
        flight = self._flights.pop(attempt, None)
        if flight is not None:
            self._finish(flight, outcome)
            self._release()
        else:  # too late for its caller, but now it is known to have stopped
            self._stopped((attempt,))

    def _failed(self, call: _Call, exc: Exception) -> None:
        self._again = True  # outcomes, of whatever requests, may have been on their way back with it
        if call.revoked:
            return
        fault = classify(exc)
        if fault.code in DEAD:
            error = CodedError.from_exception(exc, fault.code, data={"poster": self._name})
            self.settle(error)
            self._died(error)
            return
        self._suspect()
        if not self._paused:  # those that were under way together fail together
            self._failures += 1
        away = fault.code in AWAY  # Ray's own patience with it ends one day; a bug's may not
        self._paused = True  # until a probe says that it answers
        if away or (fault.code.family in LOST and self._failures < FAILURES):
            self._send_again(call)
            return
        code: str = fault.code
        if call.awaited is not None and fault.outcome.value == "not_run":
            code = "ACTOR.UNAVAILABLE"  # true of what failed (no room for the reply), and not of its requests
        for flight in call.flights:
            if flight.item.attempt in self._flights:
                self._finish(flight, CodedError.from_exception(exc, code, data=_about(flight)))
                self._abandon(flight)

    def _send_again(self, call: _Call) -> None:
        """Whether the call arrived is not known; the poster runs no attempt twice."""
        self._outbox[:0] = [f for f in call.flights if f.call is call and f.item.attempt in self._flights]
        for flight in call.flights:
            flight.call = None

    def _look_later(self, flight: _Flight) -> None:
        """Look at it when its deadline and the grace have passed. Those whose time is nearly the same share
        a timer: one each would cost more than all else here."""
        slot = flight.slot
        due = self._due.get(slot)
        if due is None:
            due = self._due[slot] = set()
            self._timers[slot] = self._loop.call_at(slot * COARSE, self._look, slot)
        due.add(flight.item.attempt)

    def _look_no_more(self, flight: _Flight) -> None:
        due = self._due.get(flight.slot)
        if due is None:
            return
        due.discard(flight.item.attempt)
        if not due:  # a set keeps the room that it once needed, and a deadline may be hours away
            del self._due[flight.slot]
            self._timers.pop(flight.slot).cancel()

    def _look(self, slot: int) -> None:
        del self._timers[slot]
        for attempt in self._due.pop(slot):
            flight = self._flights.get(attempt)
            if flight is not None:
                self._overdue(flight)

    def _overdue(self, flight: _Flight) -> None:
        self._suspect()  # the poster should have ended it by itself
        detail = f"{self._name} gave no verdict by {GRACE} s after the deadline"
        self._finish(flight, CodedError("TIMEOUT.DEADLINE", detail, _about(flight)))
        self._abandon(flight)

    def _finish(self, flight: _Flight, outcome: Outcome | None) -> None:
        if not flight.future.done():
            flight.future.set_result(outcome)

    # -- the remote end

    def _abandon(self, flight: _Flight) -> None:
        """Nobody waits for it any more: have the poster stop it, and hold its place until it has."""
        attempt = flight.item.attempt
        if self._flights.pop(attempt, None) is None:
            return  # its outcome came in the same instant
        if not flight.sent:
            self._release()
            return
        self._held.add(attempt)
        self._drops.append(attempt)
        call = flight.call
        if call is not None and call in self._calls:
            call.live -= 1
            if call.live == 0 and call.awaited is not None:
                call.revoked = True
                self._wire.cancel(call.awaited)
        self._flush_soon(True)

    async def _confirm(self, attempts: list[int]) -> None:
        while left := [attempt for attempt in attempts if attempt in self._held]:
            with contextlib.suppress(TimeoutError, RayError, CodedError):
                async with asyncio.timeout(CONFIRM):
                    if await self._wire.drop(left):
                        self._stopped(left)
                        return
            self._suspect()  # where it cannot be learned, the poster's end tells (`over`)
            await asyncio.sleep(self._interval)

    def _stopped(self, attempts: Iterable[int]) -> None:
        for attempt in attempts:
            if attempt in self._held:
                self._held.remove(attempt)
                self._release()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)


async def answered(call: Awaitable[T], timeout: float) -> T:
    """What ``call`` brings within ``timeout`` seconds; else TimeoutError. What came in time counts, however
    late this loop looks: when it had stood still, each call would seem lost, and its poster silent."""
    reply = asyncio.ensure_future(call)
    try:
        await asyncio.wait({reply}, timeout=timeout)
        if not reply.done():
            raise TimeoutError(f"no answer within {timeout:g} s")
        return reply.result()
    finally:
        if not reply.cancel() and not reply.cancelled():
            reply.exception()  # looked at, even where a cancelled owner never asks for the result


def _about(flight: _Flight) -> dict[str, Any]:
    return {"url": flight.item.url, "request_id": flight.item.id}
