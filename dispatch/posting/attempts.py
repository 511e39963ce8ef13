"""One POST on its way: its attempts, each by a decision, and what is noted of them.

An attempt first gets a lease of its server (`load.targets`), then a place in a lane (`admission`), and
goes. Whoever was there at a death waits for its turn before both, and holds nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dispatch.posting.admission import Admission
from dispatch.posting.load import Deaths, Hedging, Lease, RetryBudget, Strikes, Targets, Verdict, verdict_of
from dispatch.posting.load.listening import Listening
from dispatch.posting.load.suspects import OPEN
from dispatch.posting.load.targets import origin_of
from dispatch.posting.observe.stats import Ledger
from dispatch.posting.posters.batching import Unsent
from dispatch.posting.posters.lane import Lane
from dispatch.posting.request import Item, Reply
from faults import Action, Backoff, Blame, Decision, Fault, Outcome, classify, retrying
from protocol import CodedError, Events, catalogue

BROKE_OFF: Final = ("TRANSPORT.DISCONNECTED", "UPSTREAM.TRUNCATED")
"""How the end of a server looks to a request in flight there."""
PATIENCE: Final = 10.0
"""Seconds that what was in flight when a poster died waits for another one, before it goes to the local
client."""
FORGIVEN: Final = 16
"""Most attempts that died with their poster and do not count: that was no doing of the request, or else
`Strikes` ends it."""
T = TypeVar("T")


@dataclass(slots=True)
class Shared:
    """What the POSTs of a pool have in common.

    ``sequence`` numbers attempts: two POSTs may have one request id, two attempts never one number.
    ``remote`` is set while posters serve. ``pacing`` lets one retry at a time wait for the budget."""

    admission: Admission[Lane]
    ledger: Ledger
    events: Events
    backoff: Backoff
    closing: asyncio.Event
    targets: Targets
    budget: RetryBudget
    hedging: Hedging | None
    poison_after: int
    deaths: Deaths
    remote: asyncio.Event = field(default_factory=asyncio.Event)
    listening: Listening = field(default_factory=Listening)
    pacing: asyncio.Lock = field(default_factory=asyncio.Lock)
    sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def pause(self, seconds: float) -> None:
        """A retry's wait, which closing the pool ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.closing.wait()


class _Unfit(Exception):
    """Only the local client is there, and this must not go there; nothing was sent. See `Post._unfit`."""


class Post:
    """See the module. ``ends`` is the deadline in loop time; ``strikes`` are the caller's, who may send the
    request again, None where this is all that becomes of it; ``on_sent`` hears of each attempt."""

    __slots__ = (
        "_attempts",
        "_avoid",
        "_body",
        "_caller",
        "_died",
        "_ends",
        "_harmless",
        "_headers",
        "_id",
        "_idempotent",
        "_last",
        "_lent",
        "_loop",
        "_on_sent",
        "_paced",
        "_retry_upstream",
        "_shared",
        "_strikes",
        "_url",
    )

    def __init__(
        self,
        shared: Shared,
        id: str,
        url: str,
        body: bytes,
        headers: dict[str, str],
        ends: float,
        *,
        idempotent: bool,
        retry_upstream: bool,
        caller: Hashable,
        strikes: Strikes | None,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        self._shared = shared
        self._id = id
        self._url = url
        self._body = body
        self._headers = headers
        self._ends = ends
        self._idempotent = idempotent
        self._retry_upstream = retry_upstream
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._attempts = 0
        self._avoid: set[str] = set()
        self._last = ""
        self._paced = False
        self._strikes = strikes
        self._lent = strikes is not None
        self._on_sent = on_sent
        self._harmless = False
        self._died = 0

    @property
    def attempts(self) -> int:
        """How often it was sent."""
        return self._attempts

    async def run(self, max_attempts: int) -> Reply:
        try:
            reply = await self._tried(max_attempts)
        except BaseException as exc:  # raised again: a cancelled request is no suspect any more, either
            if self._strikes is not None and not self._lent:
                self._strikes.ended(exc)
            raise
        if self._strikes is not None:
            self._strikes.came_through()
        return reply

    async def _tried(self, max_attempts: int) -> Reply:
        self._shared.budget.deposit()
        try:
            return await self._attempt(1)  # most need no more than this, and no machinery for it
        except Exception as exc:  # noqa: BLE001 - raised again by what follows, where it is judged
            first = exc
        try:
            return await retrying(
                self._attempt,
                first=first,
                idempotent=self._idempotent,
                max_attempts=lambda: max_attempts + min(self._died, FORGIVEN),
                remaining=self._remaining,
                backoff=self._shared.backoff,
                on_failure=self._failed,
                final=self._final,
                sleep=self._shared.pause,
            )
        except CodedError as error:
            fault = classify(error)
            may_have_run = not self._idempotent and fault.outcome is Outcome.UNKNOWN and self._attempts > 0
            if may_have_run and catalogue.entry(fault.code).advice not in ("cancel", "give_up"):
                detail = f"not idempotent, and it may have run: {error.detail}"
                raise CodedError(
                    "REQUEST.OUTCOME_UNKNOWN", detail, {**error.data, "cause": error.code}
                ) from error
            raise

    def _remaining(self) -> float:
        return self._ends - self._loop.time()

    async def _attempt(self, number: int) -> Reply:
        if self._paced:
            await self._in_time(self._pace(), "for the retry budget")
        turn = self._strikes.turn() if self._strikes is not None else OPEN
        if turn is OPEN:
            return await self._judged(number)
        async with contextlib.AsyncExitStack() as entered:
            await self._in_time(entered.enter_async_context(turn), "for its turn as a suspect")
            return await self._judged(number)

    async def _judged(self, number: int) -> Reply:
        """One attempt, and what it says about its server."""
        while True:
            if self._unfit() and not self._shared.remote.is_set():
                # Before there is a lease: whoever waits here keeps nobody from the server.
                await self._in_time(self._a_poster(), "for a poster: it was there when one died")
            try:
                return await self._leased(number)
            except _Unfit:
                continue  # the last poster went meanwhile, or the first came back

    async def _leased(self, number: int) -> Reply:
        targets = self._shared.targets
        lease = targets.try_acquire(self._url)
        if lease is None:
            wait = targets.acquire(self._url, self._caller, fail_fast=not self._retry_upstream)
            lease = await self._in_time(wait, "for its server")
        suspect = self._strikes is not None and self._strikes.weight > 0  # two copies of one may end two
        hedged = self._idempotent and self._shared.hedging is not None and not suspect
        try:
            return await _judging(lease, self._hedged(number) if hedged else self._sent(number))
        except CodedError as error:
            poison = await self._suspected(error)
            if poison is not None:
                raise poison from error
            raise

    async def _hedged(self, number: int) -> Reply:
        hedging = self._shared.hedging
        assert hedging is not None
        origin = origin_of(self._url)
        began = self._loop.time()
        if number == 1:
            hedging.deposit()
        delay = hedging.delay(origin)
        reply = await (self._sent(number) if delay is None else self._raced(number, delay))
        hedging.learn(origin, self._loop.time() - began)
        return reply

    async def _raced(self, number: int, delay: float) -> Reply:
        """The first good reply of two copies, the second sent after ``delay`` seconds where it may."""
        first = asyncio.create_task(self._sent(number))
        copies: set[asyncio.Task[Reply | None]] = {first}
        try:
            await asyncio.wait(copies, timeout=delay)
            if not first.done():
                copies.add(asyncio.create_task(self._second(number)))
            pending = copies
            while pending:  # each ends by its deadline
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for copy in done:
                    if copy.exception() is None and (reply := copy.result()) is not None:
                        return reply
            return first.result()
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.wait(copies)
            for copy in copies:
                if not copy.cancelled():
                    copy.exception()  # looked at, where the other one was good

    async def _second(self, number: int) -> Reply | None:
        """The second copy; None where server, pool or hedging have no room for it now."""
        shared = self._shared
        assert shared.hedging is not None
        lane = shared.admission.try_acquire({self._last})
        if lane is None:
            return None
        lease = shared.targets.try_acquire(self._url)
        if lease is None or not shared.hedging.try_take():
            if lease is not None:
                lease.done(Verdict.NONE)
            shared.admission.release(lane)
            return None
        shared.ledger.hedged += 1
        shared.events.emit("post.hedged", key=self._id, attempt=number, via=lane.name, url=self._url)
        try:
            return await _judging(lease, self._sent(number, lane))
        except CodedError as error:
            if _poster_of(error):  # the race ends with what the first copy ended with
                await self._suspected(error)
            raise

    async def _sent(self, number: int, lane: Lane | None = None) -> Reply:
        shared = self._shared
        ledger = shared.ledger
        on_sent = self._on_sent if lane is None else None  # a second copy begins nothing
        back = False
        while True:
            lane = lane or shared.admission.try_acquire(self._avoid)
            if lane is None:
                place = shared.admission.acquire(self._avoid, self._caller, first=back)
                lane = await self._in_time(place, "for a place in the pool")
            left = self._remaining()
            if left <= 0:
                shared.admission.release(lane)
                raise self._late("for a place in the pool")
            if lane.via == "local" and self._unfit():
                shared.admission.release(lane)
                raise _Unfit
            if on_sent is not None:
                try:
                    on_sent()
                except BaseException:  # raised again: the caller's own code must not keep a place
                    shared.admission.release(lane)
                    raise
            self._attempts = number
            self._last = lane.name
            ledger.sent += 1
            ledger.retried += number > 1
            ledger.local += lane.via == "local"
            item = Item(self._id, next(shared.sequence), self._url, self._body, self._headers)
            try:
                answer = await lane.run(item, left)
            except Unsent:  # its poster ended or fell silent first: this was no attempt
                self._avoid.add(lane.name)
                self._attempts -= 1
                ledger.sent -= 1
                ledger.retried -= number > 1
                lane, back = shared.admission.move(lane, self._avoid), True
                continue
            return Reply(
                answer.data, answer.status, answer.headers, lane.via, number, answer.seconds, self._id
            )

    def _unfit(self) -> bool:
        """Whether it must not go to the local client: what was in flight when posters died may be why, and
        there it would take the pool's own process."""
        return self._strikes is not None and self._strikes.weight > 0 and not self._harmless

    async def _a_poster(self) -> None:
        """Wait until a poster serves again: after one death it goes to the local client only when none comes
        back for a while, after more never."""
        patience = PATIENCE if self._strikes is not None and self._strikes.weight == 1 else None
        try:
            async with asyncio.timeout(patience):
                await self._shared.remote.wait()
        except TimeoutError:
            self._harmless = True

    async def _pace(self) -> None:
        budget = self._shared.budget
        async with self._shared.pacing:
            while not budget.try_take() and not self._shared.closing.is_set():
                await self._shared.pause(budget.wait_for())

    async def _suspected(self, error: CodedError) -> CodedError | None:
        """Whether an engine or a poster died with this in flight, and whether that was once too often."""
        if self._shared.closing.is_set():
            return None
        poster = _poster_of(error)
        if poster:
            what = poster
        elif error.code in BROKE_OFF:
            what = origin_of(self._url)
            if await self._shared.listening.at(what, self._remaining()):
                return None
        else:
            return None
        self._died += bool(poster)
        if self._strikes is None:
            self._strikes = Strikes(self._shared.deaths, self._shared.poison_after)
        return self._strikes.died(what, error.code)

    async def _in_time(self, wait: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(max(self._remaining(), 0.0)):
                return await wait
        except TimeoutError:
            raise self._late(what) from None

    def _late(self, what: str) -> CodedError:
        admission = self._shared.admission
        if not admission.lanes:
            return CodedError(
                "POOL.NO_POSTER", f"no poster was healthy before the deadline of {self._url} passed"
            )
        return CodedError(
            "TIMEOUT.DEADLINE",
            f"the deadline passed while the request waited {what}",
            {"url": self._url, "attempts": self._attempts},
        )

    def _final(self, exc: Exception, fault: Fault) -> bool:
        if self._shared.closing.is_set():
            return True
        return not self._retry_upstream and fault.blame in (Blame.UPSTREAM, Blame.REQUEST)

    def _failed(self, fault: Fault, decision: Decision, number: int, exc: Exception) -> None:
        if fault.blame in (Blame.CALLEE, Blame.NODE):
            self._avoid.add(self._last)
        # What a server asked to wait for is paced by its own limit already.
        self._paced = fault.blame is Blame.UPSTREAM and decision.action is not Action.WAIT
        again = decision.action.sends_again
        if again:
            self._shared.ledger.retried_by_code[str(fault.code)] += 1
        # What its caller may still send to another server is no failure yet.
        handed_back = not again and not self._retry_upstream and fault.blame is Blame.UPSTREAM
        self._shared.events.emit(
            "post.retried" if again else "post.handed_back" if handed_back else "post.failed",
            level="info" if again or handed_back else "warning",
            error=exc,
            key=self._id,
            attempt=number,
            via=self._last,
            url=self._url,
            action=decision.action.value,
            delay=round(decision.delay, 3),
            why=decision.why,
        )


def _poster_of(error: CodedError) -> str:
    """The poster whose death ``error`` tells of, if it does. A server may say ACTOR.DIED too, of an actor of
    its own or to be forgiven: its word has a status."""
    died = error.code == "ACTOR.DIED" and error.data.get("status") is None
    return str(error.data.get("poster", "")) if died else ""


async def _judging(lease: Lease, attempt: Coroutine[None, None, Reply]) -> Reply:
    """Await the attempt, and give its lease back with what became of it."""
    verdict, retry_after = Verdict.NONE, None
    try:
        reply = await attempt
        verdict = Verdict.GOOD
        return reply
    except CodedError as error:
        fault = classify(error)
        verdict, retry_after = verdict_of(fault), fault.retry_after
        raise
    finally:
        lease.done(verdict, retry_after)
