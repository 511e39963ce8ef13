"""retrying: as often as decide says, every failure is heard, and a cancellation is never ours."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from faults import Action, Backoff, Decision, Fault, retrying
from protocol import CodedError


class Waits:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Attempts:
    """Fails with ``failures`` in turn, then answers."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.numbers: list[int] = []

    async def __call__(self, number: int) -> str:
        self.numbers.append(number)
        if self.failures:
            raise self.failures.pop(0)
        return "answer"


DOWN = httpx.ConnectError("refused")


@pytest.fixture
def waits() -> Waits:
    return Waits()


async def test_a_first_success_is_returned(waits: Waits) -> None:
    attempts = Attempts()
    assert await retrying(attempts, sleep=waits) == "answer"
    assert (attempts.numbers, waits.seconds) == ([1], [])


async def test_it_goes_on_until_it_succeeds(waits: Waits) -> None:
    attempts = Attempts(DOWN, DOWN, DOWN)
    assert await retrying(attempts, sleep=waits, backoff=Backoff(1.0, 3.0)) == "answer"
    assert attempts.numbers == [1, 2, 3, 4]
    assert len(waits.seconds) == 3
    assert all(0.5 * most <= got <= most for got, most in zip(waits.seconds, (1.0, 2.0, 3.0), strict=True))


@pytest.mark.parametrize("most", [1, 2, 5])
async def test_the_last_exception_is_raised_as_it_is(waits: Waits, most: int) -> None:
    failures = [httpx.ConnectError(str(n)) for n in range(9)]
    attempts = Attempts(*failures)
    with pytest.raises(httpx.ConnectError) as caught:
        await retrying(attempts, max_attempts=most, sleep=waits)
    assert caught.value is failures[most - 1]
    assert attempts.numbers == list(range(1, most + 1))


async def test_on_failure_hears_of_each(waits: Waits) -> None:
    heard: list[tuple[Fault, Decision, int, Exception]] = []
    failures = [httpx.ConnectError("a"), httpx.ReadTimeout("b"), ValueError("c")]
    with pytest.raises(ValueError, match="c"):
        await retrying(Attempts(*failures), sleep=waits, on_failure=lambda *what: heard.append(what))
    assert [str(one[0].code) for one in heard] == ["TRANSPORT.CONNECT", "TIMEOUT.READ", "UNKNOWN.EXCEPTION"]
    assert [one[1].action for one in heard] == [
        Action.RETRY_ELSEWHERE,
        Action.RETRY_ELSEWHERE,
        Action.GIVE_UP,
    ]
    assert [one[2] for one in heard] == [1, 2, 3]
    assert [one[3] for one in heard] == failures
    assert waits.seconds == [one[1].delay for one in heard[:2]]


async def test_what_is_not_idempotent_is_sent_again_only_if_it_did_not_run(waits: Waits) -> None:
    attempts = Attempts(DOWN, httpx.ReadTimeout("it may have run"), DOWN)
    with pytest.raises(httpx.ReadTimeout):
        await retrying(attempts, idempotent=False, sleep=waits)
    assert attempts.numbers == [1, 2]


async def test_retry_after_is_waited_for(waits: Waits) -> None:
    full = CodedError("BACKPRESSURE.RATE_LIMITED", data={"status": 429, "retry_after": 7})
    assert await retrying(Attempts(full), sleep=waits) == "answer"
    assert waits.seconds == [7.0]


async def test_the_deadline_ends_it(waits: Waits) -> None:
    left = iter([10.0, 0.01])
    attempts = Attempts(DOWN, DOWN, DOWN)
    with pytest.raises(httpx.ConnectError):
        await retrying(attempts, remaining=lambda: next(left), sleep=waits)
    assert attempts.numbers == [1, 2]


async def test_final_takes_the_permission_away(waits: Waits) -> None:
    attempts = Attempts(DOWN, DOWN)
    with pytest.raises(httpx.ConnectError):
        await retrying(attempts, sleep=waits, final=lambda exc, fault: fault.code == "TRANSPORT.CONNECT")
    assert attempts.numbers == [1]


@pytest.mark.parametrize("control", [asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_control_flow_passes_at_once(waits: Waits, control: type[BaseException]) -> None:
    heard: list[object] = []
    attempts = Attempts(control())
    with pytest.raises(control):
        await retrying(attempts, sleep=waits, on_failure=lambda *what: heard.append(what))
    assert (attempts.numbers, heard, waits.seconds) == ([1], [], [])


async def test_a_cancellation_from_outside_ends_an_attempt() -> None:
    began = asyncio.Event()
    ended = asyncio.Event()

    async def attempt(number: int) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(retrying(attempt))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_cancellation_from_outside_ends_a_wait() -> None:
    waiting = asyncio.Event()

    async def wait(seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    attempts = Attempts(DOWN)
    task = asyncio.create_task(retrying(attempts, sleep=wait))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attempts.numbers == [1]


async def test_many_at_once_do_not_share_their_count(waits: Waits) -> None:
    many = [Attempts(*[DOWN] * (n % 4)) for n in range(40)]
    assert await asyncio.gather(*(retrying(one, sleep=waits) for one in many)) == ["answer"] * 40
    assert [len(one.numbers) for one in many] == [n % 4 + 1 for n in range(40)]
