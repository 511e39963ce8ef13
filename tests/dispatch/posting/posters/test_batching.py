"""Batching without Ray: a wire that the test plays, so that calls and replies can be lost, late or double."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectReconstructionFailedError,
    ObjectStoreFullError,
)

import faults
from dispatch.posting.posters import batching
from dispatch.posting.posters.batching import FAILURES, FEW, MAX_CALLS, PARTS, Batcher, Unsent
from dispatch.posting.posters.wire import Message, Outcome, pack_reply, unpack
from dispatch.posting.request import Answer, Item
from faults import classify
from protocol import CodedError
from tests.support.wait import until

ANSWER = Answer(200, {}, {"ok": True}, 0.1)


class PlayedWire:
    """Calls are futures that the test answers; drops are answered as `stopped` says."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[bytes]] = []
        self.messages: list[Message] = []
        self.dropped: list[list[int]] = []
        self.stopped = asyncio.Event()
        self.revoked: list[Any] = []
        self._number = 0

    def send(self, message: bytes) -> Awaitable[bytes]:
        self.messages.append(unpack(message))
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    def cancel(self, call: Awaitable[bytes]) -> None:
        self.revoked.append(call)
        call.set_exception(CodedError("CANCEL.CALLER", "revoked"))  # type: ignore[attr-defined]

    async def drop(self, attempts: list[int]) -> bool:
        self.dropped.append(attempts)
        await self.stopped.wait()
        return True

    def open(self) -> list[asyncio.Future[bytes]]:
        return [call for call in self.calls if not call.done()]

    def answer(self, call: asyncio.Future[bytes], *outcomes: tuple[int, Outcome]) -> int:
        self._number += 1
        call.set_result(pack_reply(self._number, list(outcomes)))
        return self._number

    def attempts(self) -> list[list[int]]:
        """Which attempts each call carried."""
        return [[item.attempt for item, _ in message.items] for message in self.messages]


class Bench:
    """A batcher with the counts of what it told its owner."""

    def __init__(self) -> None:
        self.wire = PlayedWire()
        self.released = 0
        self.suspected = 0
        self.deaths: list[CodedError] = []
        self.batcher = Batcher(
            "poster/0.1",
            self.wire,
            release=self._release,
            suspect=self._suspect,
            died=self.deaths.append,
            interval=0.01,
        )

    def _release(self) -> None:
        self.released += 1

    def _suspect(self) -> None:
        self.suspected += 1

    def run(self, attempt: int, budget: float = 30.0) -> asyncio.Task[Answer]:
        item = Item(f"r{attempt}", attempt, "http://engine/generate", b"{}", {})
        return asyncio.create_task(self.batcher.run(item, budget))


@pytest.fixture
async def bench() -> Any:
    one = Bench()
    yield one
    one.batcher.settle(CodedError("POOL.CLOSED", "the test is over"))
    one.batcher.over()


async def turns(number: int = 5) -> None:
    """Let everything that is ready run."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_one_alone_costs_one_call_and_leaves_none_behind(bench: Bench) -> None:
    task = bench.run(1)
    await turns()
    assert bench.wire.attempts() == [[1]]
    bench.wire.answer(bench.wire.calls[0], (1, ANSWER))
    assert await task == ANSWER
    assert bench.released == 1
    await turns()
    assert len(bench.wire.calls) == 1


async def test_what_becomes_ready_together_travels_together(bench: Bench) -> None:
    tasks = [bench.run(n) for n in range(FEW)]
    await turns()
    assert bench.wire.attempts() == [list(range(FEW))]
    bench.wire.answer(bench.wire.calls[0], *((n, ANSWER) for n in range(FEW)))
    assert await asyncio.gather(*tasks) == [ANSWER] * FEW


async def test_outcomes_come_with_any_call(bench: Bench) -> None:
    first = bench.run(1)
    await turns()
    second = bench.run(2)
    await turns()
    assert bench.wire.attempts() == [[1], [2]]
    bench.wire.answer(bench.wire.calls[0], (2, ANSWER))
    assert await second == ANSWER
    assert not first.done()
    bench.wire.answer(bench.wire.calls[1], (1, CodedError("REQUEST.REJECTED", "no")))
    with pytest.raises(CodedError, match=r"REQUEST\.REJECTED"):
        await first


async def test_while_something_is_in_flight_a_call_waits_for_it(bench: Bench) -> None:
    task = bench.run(1)
    await turns()
    number = bench.wire.answer(bench.wire.calls[0])  # the poster lost patience: nothing to say yet
    await until(lambda: len(bench.wire.calls) == 2)
    assert bench.wire.messages[1].items == []
    assert bench.wire.messages[1].acknowledged == [number]
    bench.wire.answer(bench.wire.calls[1], (1, ANSWER))
    assert await task == ANSWER


async def test_no_more_calls_than_the_bound_and_the_rest_goes_with_the_next(bench: Bench) -> None:
    for n in range(MAX_CALLS + 3):
        bench.run(n)
        await turns()
    assert bench.wire.attempts() == [[n] for n in range(MAX_CALLS)]
    bench.wire.answer(bench.wire.calls[0], (0, ANSWER))
    await until(lambda: len(bench.wire.calls) > MAX_CALLS)
    assert bench.wire.attempts()[-1] == [MAX_CALLS, MAX_CALLS + 1, MAX_CALLS + 2]


async def test_a_wave_goes_in_parts_each_of_which_can_bring_outcomes_back(bench: Bench) -> None:
    for n in range(400):
        bench.run(n)
    await until(lambda: sum(map(len, bench.wire.attempts())) == 400)
    assert max(map(len, bench.wire.attempts())) <= 400 // PARTS
    assert [n for part in bench.wire.attempts() for n in part] == list(range(400))


async def test_a_late_or_second_outcome_changes_nothing(bench: Bench) -> None:
    task = bench.run(1)
    await turns()
    bench.wire.answer(bench.wire.calls[0], (1, ANSWER), (1, CodedError("TASK.FAILED", "twice")), (77, ANSWER))
    assert await task == ANSWER
    assert bench.released == 1


@pytest.mark.parametrize("failure", ["unavailable", "silence", "cancelled"])
async def test_a_lost_call_is_sent_again_with_the_same_numbers(
    bench: Bench, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it arrived is not known; the poster runs no number twice, and answers anew what may be lost."""
    if failure == "silence":
        monkeypatch.setattr(batching, "CALL_TIMEOUT", 0.05)
    task = bench.run(1)
    await turns()
    lost = bench.wire.calls[0]
    if failure == "unavailable":
        lost.set_exception(ActorUnavailableError("away", b"\0" * 16))
    elif failure == "cancelled":
        lost.set_exception(CodedError("CANCEL.CALLER", "as KeyboardInterrupt in a poster looks"))
    await until(lambda: bench.suspected == 1)
    assert not task.done()
    bench.batcher.resume()  # as a probe that is answered does
    await until(lambda: len(bench.wire.calls) == 2)
    assert bench.wire.attempts() == [[1], [1]]
    assert bench.wire.messages[1].again
    bench.wire.answer(bench.wire.calls[1], (1, ANSWER))
    assert await task == ANSWER
    assert bench.released == 1


async def test_nothing_is_sent_to_a_poster_that_is_away(bench: Bench) -> None:
    bench.run(1)
    await turns()
    bench.wire.calls[0].set_exception(ActorUnavailableError("away", b"\0" * 16))
    await until(lambda: bench.suspected == 1)
    bench.run(2)
    await turns()
    assert len(bench.wire.calls) == 1
    bench.batcher.resume()
    await turns()
    assert bench.wire.attempts()[1] == [1, 2]


async def test_replies_that_their_node_took_along_fail_no_request(bench: Bench) -> None:
    """Large replies lie in the object store of the poster's node. When that goes, many are lost at once,
    before Ray calls the poster dead; they brought outcomes of any requests, and each may be sent again."""
    tasks = []
    for number in range(FAILURES + 2):
        tasks.append(bench.run(number))
        await turns()
    assert len(bench.wire.calls) == FAILURES + 2
    for call in bench.wire.calls:
        call.set_exception(ObjectReconstructionFailedError("0" * 56))
    await until(lambda: bench.suspected == FAILURES + 2)
    assert not any(task.done() for task in tasks)
    bench.batcher.settle(CodedError("ACTOR.DIED", "with its node"))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert {error.code for error in errors if isinstance(error, CodedError)} == {"ACTOR.DIED"}


async def test_calls_that_fail_together_have_failed_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those do that a poster which was stopped for long does not answer; no probe has said since that it
    does."""
    monkeypatch.setattr(batching, "CALL_TIMEOUT", 0.05)
    tasks = []
    for number in range(FAILURES + 2):
        tasks.append(bench.run(number))
        await turns()
    await until(lambda: bench.suspected == FAILURES + 2)
    assert not any(task.done() for task in tasks)
    bench.batcher.resume()
    await turns()
    assert sorted(bench.wire.attempts()[-1]) == [number for number, _ in enumerate(tasks)]
    bench.wire.answer(bench.wire.calls[-1], *((number, ANSWER) for number, _ in enumerate(tasks)))
    assert await asyncio.gather(*tasks) == [ANSWER] * len(tasks)


async def test_calls_that_fail_again_and_again_fail_their_requests(bench: Bench) -> None:
    task = bench.run(1)
    for number in range(FAILURES):
        await until(lambda number=number: len(bench.wire.calls) == number + 1)
        bench.wire.calls[number].set_exception(CodedError("CANCEL.CALLER", "somebody's bug"))
        await turns()
        bench.batcher.resume()
    with pytest.raises(CodedError, match=r"CANCEL\.CALLER"):
        await task
    bench.wire.stopped.set()
    await until(lambda: bench.released == 1)


async def test_a_call_that_was_made_is_no_word_that_its_requests_did_not_run(bench: Bench) -> None:
    """A reply for which there is no room in the object store fails its call as something that did not run."""
    task = bench.run(1)
    for number in range(FAILURES):
        await until(lambda number=number: len(bench.wire.calls) == number + 1)
        bench.wire.calls[number].set_exception(ObjectStoreFullError("no room for the reply"))
        await turns()
        bench.batcher.resume()
    with pytest.raises(CodedError, match="no room for the reply") as caught:
        await task
    assert classify(caught.value).outcome is not faults.Outcome.NOT_RUN
    bench.wire.stopped.set()
    await until(lambda: bench.released == 1)


async def test_what_came_while_the_loop_stood_still_came_in_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "CALL_TIMEOUT", 0.6)
    tasks = []
    for number in range(FAILURES + 2):
        tasks.append(bench.run(number))
        await turns()
    assert len(bench.wire.calls) == len(tasks)
    for number, call in enumerate(bench.wire.calls):
        asyncio.get_running_loop().call_later(0.1, bench.wire.answer, call, (number, ANSWER))
    time.sleep(1.0)  # noqa: ASYNC251 - as a caller's own code does that computes
    assert await asyncio.gather(*tasks) == [ANSWER] * len(tasks)
    assert bench.suspected == 0


async def test_a_death_ends_what_was_sent_and_hands_back_what_was_not(bench: Bench) -> None:
    sent = []
    for n in range(MAX_CALLS):
        sent.append(bench.run(n))
        await turns()
    assert len(bench.wire.calls) == MAX_CALLS
    waiting = bench.run(50)
    await turns()
    bench.wire.calls[0].set_exception(ActorDiedError())
    for task in sent:
        with pytest.raises(CodedError, match=r"ACTOR\.DIED"):
            await task
    with pytest.raises(Unsent):
        await waiting
    assert [error.code for error in bench.deaths] == ["ACTOR.DIED"]
    with pytest.raises(Unsent):
        await bench.run(60)
    # The process may still be sending: only its end gives those places back. What is unsent keeps its own.
    assert bench.released == 0
    bench.batcher.over()
    assert bench.released == len(sent)


async def full(bench: Bench) -> list[asyncio.Task[Answer]]:
    """As many calls under way as there may be, with one request each: what comes now has to wait."""
    sent = []
    for n in range(MAX_CALLS):
        sent.append(bench.run(n))
        await turns()
    assert len(bench.wire.calls) == MAX_CALLS
    return sent


async def test_of_a_silent_poster_what_was_not_sent_is_handed_back_and_the_rest_stays(bench: Bench) -> None:
    sent = await full(bench)
    waiting = [bench.run(50 + n) for n in range(3)]
    ended: list[asyncio.Task[Answer]] = []
    for task in waiting:
        task.add_done_callback(ended.append)
    await turns()
    bench.batcher.hand_back()
    await turns()
    assert [type(task.exception()) for task in waiting] == [Unsent] * 3
    assert ended == waiting[::-1]  # the oldest last: it goes before the others where they have to wait
    assert bench.released == 0  # they take their places along
    assert not any(task.done() for task in sent)
    later = bench.run(60)  # it answers again
    await turns()
    bench.wire.answer(bench.wire.calls[0], *((n, ANSWER) for n in range(MAX_CALLS)))
    assert await asyncio.gather(*sent) == [ANSWER] * MAX_CALLS
    await until(lambda: [60] in bench.wire.attempts())
    bench.wire.answer(bench.wire.open()[-1], (60, ANSWER))
    assert await later == ANSWER
    assert bench.released == MAX_CALLS + 1
    assert [n for part in bench.wire.attempts() for n in part] == [*range(MAX_CALLS), 60]


async def test_what_may_have_arrived_is_not_handed_back(bench: Bench) -> None:
    """Its call was lost, and it waits to be sent again."""
    task = bench.run(1)
    await turns()
    bench.wire.calls[0].set_exception(ActorUnavailableError("away", b"\0" * 16))
    await until(lambda: bench.suspected == 1)
    bench.batcher.hand_back()
    await turns()
    assert not task.done()
    bench.batcher.resume()
    await until(lambda: bench.wire.attempts() == [[1], [1]])
    bench.wire.answer(bench.wire.calls[1], (1, ANSWER))
    assert await task == ANSWER


@pytest.mark.parametrize("first", ["cancelled", "handed back"])
@pytest.mark.parametrize("how", ["hand_back", "settle"])
async def test_cancelled_in_the_instant_in_which_it_is_handed_back_its_place_is_released_once(
    bench: Bench, first: str, how: str
) -> None:
    sent = await full(bench)
    waiting = bench.run(50)
    await turns()
    if first == "cancelled":
        waiting.cancel()
    if how == "settle":
        bench.batcher.settle(CodedError("ACTOR.DIED", "dead"))
    else:
        bench.batcher.hand_back()
    if first != "cancelled":
        waiting.cancel()
    await turns()
    assert waiting.cancelled()
    assert bench.released == 1
    if how == "settle":
        assert all(isinstance(task.exception(), CodedError) for task in sent)


async def test_a_cancelled_request_holds_its_place_until_it_has_stopped(bench: Bench) -> None:
    one, other = bench.run(1), bench.run(2)
    await turns()
    one.cancel()
    await turns()
    assert one.cancelled()
    assert bench.wire.dropped == [[1]]
    assert (bench.released, bench.wire.revoked) == (0, [])  # the call brings the other one's outcome
    bench.wire.stopped.set()
    await until(lambda: bench.released == 1)
    bench.wire.answer(bench.wire.calls[0], (2, ANSWER))
    assert await other == ANSWER


async def test_an_outcome_that_comes_too_late_says_that_it_has_stopped(bench: Bench) -> None:
    task = bench.run(1)
    other = bench.run(2)
    await turns()
    task.cancel()
    await turns()
    bench.wire.answer(bench.wire.calls[0], (1, ANSWER))
    await turns()
    assert bench.released == 1
    bench.wire.stopped.set()
    await turns()
    assert bench.released == 1
    other.cancel()


async def test_when_all_of_a_call_are_cancelled_the_call_is_revoked(bench: Bench) -> None:
    tasks = [bench.run(n) for n in range(3)]
    await turns()
    for task in tasks:
        task.cancel()
    await turns()
    assert bench.wire.revoked == [bench.wire.calls[0]]
    assert sorted(attempt for drop in bench.wire.dropped for attempt in drop) == [0, 1, 2]
    bench.wire.stopped.set()
    await until(lambda: bench.released == 3)


async def test_revoking_a_call_loses_no_outcome_of_others(bench: Bench) -> None:
    kept = bench.run(1)
    await turns()
    gone = bench.run(2)
    await turns()
    bench.wire.answer(bench.wire.calls[0])
    gone.cancel()
    await until(lambda: bench.wire.messages[-1].again)
    assert bench.wire.messages[-1].items == []
    bench.wire.answer(bench.wire.open()[0], (1, ANSWER))
    assert await kept == ANSWER


async def test_what_a_revoked_call_may_have_brought_is_asked_for_at_once(bench: Bench) -> None:
    """Not when another call comes back by itself: that takes as long as the poster has patience."""
    kept = bench.run(1)
    await turns()
    gone = bench.run(2)
    await turns()
    gone.cancel()
    await until(lambda: bench.wire.messages[-1].again, 2)
    assert bench.wire.calls[0] in bench.wire.open()
    assert len(bench.wire.calls) == 3
    bench.wire.answer(bench.wire.calls[0], (1, ANSWER))
    assert await kept == ANSWER
    bench.wire.stopped.set()


async def test_cancelled_before_it_was_sent_it_costs_nothing(bench: Bench) -> None:
    task = bench.run(1)
    await asyncio.sleep(0)  # the task has begun, the call has not
    task.cancel()
    await turns()
    assert not any(bench.wire.attempts())
    assert bench.wire.dropped == []
    assert bench.released == 1


async def test_a_storm_of_cancellations_is_one_drop(bench: Bench) -> None:
    tasks = [bench.run(n) for n in range(500)]
    await until(lambda: sum(map(len, bench.wire.attempts())) == 500)
    for task in tasks:
        task.cancel()
    bench.wire.stopped.set()
    await until(lambda: bench.released == 500)
    assert len(bench.wire.dropped) <= 2


@pytest.mark.parametrize("steps", [1, 2, 5])
async def test_the_posters_end_gives_back_what_is_held_however_far_its_drop_came(
    bench: Bench, steps: int
) -> None:
    task = bench.run(1)
    await turns()
    task.cancel()
    await turns(steps)
    bench.batcher.settle(CodedError("ACTOR.DIED", "replaced"))
    bench.batcher.over()
    await turns()
    assert bench.released == 1


async def test_without_a_verdict_it_ends_after_the_grace_and_the_poster_is_suspect(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "GRACE", 0.02)
    monkeypatch.setattr(batching, "COARSE", 0.01)
    task = bench.run(1, budget=0.02)
    with pytest.raises(CodedError, match=r"TIMEOUT\.DEADLINE"):
        await task
    assert bench.suspected >= 1
    assert bench.released == 0
    bench.wire.stopped.set()
    await until(lambda: bench.released == 1)


async def test_a_drop_that_fails_is_repeated(bench: Bench) -> None:
    task = bench.run(1)
    await turns()
    drop, tries = bench.wire.drop, 0

    async def failing(attempts: list[int]) -> bool:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ActorUnavailableError("away", b"\0" * 16)
        return tries > 2 and await drop(attempts)

    bench.wire.drop = failing  # type: ignore[method-assign]
    bench.wire.stopped.set()
    task.cancel()
    await until(lambda: bench.released == 1)
    assert tries == 3
    assert bench.suspected >= 2


async def test_each_caller_gets_an_error_of_its_own(bench: Bench) -> None:
    tasks = [bench.run(n) for n in range(3)]
    await turns()
    bench.batcher.settle(CodedError("POOL.CLOSED", "closed"))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert len({id(error) for error in errors}) == 3
    assert {error.data["request_id"] for error in errors if isinstance(error, CodedError)} == {
        "r0",
        "r1",
        "r2",
    }


async def test_a_call_that_fails_for_good_may_have_brought_outcomes_of_others(bench: Bench) -> None:
    """Its own requests fail with it; what else it was to bring back is asked for again."""
    other = bench.run(1)
    await turns()
    own = bench.run(2)
    await turns()
    bench.wire.calls[1].set_exception(CodedError("TASK.FAILED", "the poster's bug"))
    with pytest.raises(CodedError, match=r"TASK\.FAILED"):
        await own
    bench.wire.answer(bench.wire.calls[0])  # nothing to say: what it had went with the other call
    bench.batcher.resume()
    await until(lambda: len(bench.wire.calls) == 3)
    assert bench.wire.messages[2].again
    bench.wire.answer(bench.wire.calls[2], (1, ANSWER))
    assert await other == ANSWER
    bench.wire.stopped.set()


async def test_a_reply_that_cannot_be_read_is_a_lost_one(bench: Bench) -> None:
    task = bench.run(1)
    await turns()
    bench.wire.calls[0].set_result(b"no reply of a poster")
    with pytest.raises(CodedError):
        await asyncio.wait_for(task, 5)
    assert bench.suspected >= 1
    bench.wire.stopped.set()
    await until(lambda: bench.released == 1)


async def test_a_call_that_cannot_be_made_is_not_tried_in_a_hot_loop(bench: Bench) -> None:
    """Ray refuses at once: until a probe says that the poster answers, nothing more is sent."""
    sent = 0

    def refuse(message: bytes) -> Awaitable[bytes]:
        nonlocal sent
        sent += 1
        raise RuntimeError("Ray does not know this actor")

    bench.wire.send = refuse  # type: ignore[method-assign]
    with pytest.raises(CodedError):
        await asyncio.wait_for(bench.run(1), 5)
    later = bench.run(2)
    await asyncio.sleep(0.1)
    assert sent == 1
    assert not later.done()
    bench.batcher.resume()
    with pytest.raises(CodedError):
        await asyncio.wait_for(later, 5)
    assert sent == 2


async def test_a_message_that_cannot_be_packed_fails_its_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: Message) -> bytes:
        raise MemoryError

    monkeypatch.setattr(batching, "pack", refuse)
    task = bench.run(1)
    for number in range(FAILURES):
        await until(lambda number=number: bench.suspected == number + 1)
        bench.batcher.resume()
    with pytest.raises(CodedError) as caught:
        await asyncio.wait_for(task, 5)
    assert caught.value.code == "NODE.OUT_OF_MEMORY"


async def test_what_is_done_leaves_nothing_until_its_deadline(bench: Bench) -> None:
    for number in range(50):
        task = bench.run(number, budget=600.0 + number)
        await turns()
        bench.wire.answer(bench.wire.open()[0], (number, ANSWER))
        await task
    assert bench.batcher._due == {}
    assert bench.batcher._timers == {}
