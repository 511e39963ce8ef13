"""One POST on its way: its attempts, each by a decision, and what is noted of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from dispatch.posting.admission import Admission
from dispatch.posting.batching import Unsent
from dispatch.posting.lane import Lane
from dispatch.posting.request import Item, Reply
from dispatch.posting.stats import Ledger
from faults import Backoff, Blame, Decision, Fault, Outcome, classify, retrying
from protocol import CodedError, Events, catalogue


@dataclass(slots=True)
class Shared:
    """What the POSTs of a pool have in common. ``sequence`` numbers attempts: two POSTs may have one
    request id, two attempts never one name."""

    admission: Admission[Lane]
    ledger: Ledger
    events: Events
    backoff: Backoff
    closing: asyncio.Event
    sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def pause(self, seconds: float) -> None:
        """A retry's wait, which closing the pool ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.closing.wait()


class Post:
    """See the module. ``ends`` is the deadline in loop time."""

    def __init__(
        self,
        shared: Shared,
        id: str,
        url: str,
        body: bytes,
        headers: dict[str, str],
        ends: float,
        idempotent: bool,
        retry_upstream: bool,
    ) -> None:
        self._shared = shared
        self._id = id
        self._url = url
        self._body = body
        self._headers = headers
        self._ends = ends
        self._idempotent = idempotent
        self._retry_upstream = retry_upstream
        self._attempts = 0
        self._avoid: set[str] = set()
        self._last: str = ""

    async def run(self, max_attempts: int) -> Reply:
        try:
            return await retrying(
                self._attempt,
                idempotent=self._idempotent,
                max_attempts=max_attempts,
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
        return self._ends - asyncio.get_running_loop().time()

    async def _attempt(self, number: int) -> Reply:
        shared = self._shared
        ledger = shared.ledger
        while True:
            lane = shared.admission.try_acquire(self._avoid) or await self._place()
            left = self._remaining()
            if left <= 0:
                shared.admission.release(lane)
                raise self._late()
            self._attempts = number
            self._last = lane.name
            ledger.sent += 1
            ledger.retried += number > 1
            ledger.local += lane.via == "local"
            item = Item(self._id, next(shared.sequence), self._url, self._body, self._headers)
            try:
                answer = await lane.run(item, left)
            except Unsent:  # its poster ended first: this was no attempt
                self._avoid.add(lane.name)
                self._attempts -= 1
                ledger.sent -= 1
                ledger.retried -= number > 1
                continue
            return Reply(
                answer.data, answer.status, answer.headers, lane.via, number, answer.seconds, self._id
            )

    async def _place(self) -> Lane:
        try:
            async with asyncio.timeout(max(self._remaining(), 0.0)):
                return await self._shared.admission.acquire(self._avoid)
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> CodedError:
        if not self._shared.admission.lanes:
            return CodedError(
                "POOL.NO_POSTER", f"no poster was healthy before the deadline of {self._url} passed"
            )
        return CodedError(
            "TIMEOUT.DEADLINE",
            "the deadline passed while the request waited for a place in the pool",
            {"url": self._url, "attempts": self._attempts, "waiting": self._shared.admission.waiting},
        )

    def _final(self, exc: Exception, fault: Fault) -> bool:
        if self._shared.closing.is_set():
            return True
        return not self._retry_upstream and fault.blame in (Blame.UPSTREAM, Blame.REQUEST)

    def _failed(self, fault: Fault, decision: Decision, number: int, exc: Exception) -> None:
        if fault.blame in (Blame.CALLEE, Blame.NODE):
            self._avoid.add(self._last)
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
