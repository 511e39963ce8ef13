"""An epoch without Ray: which failure is named first, and what an epoch that is over gives back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dispatch.roles.epoch import Epoch, Failure, Limits, _Member, first
from protocol import CodedError
from tests.support.wait import until

DIED = CodedError("ACTOR.DIED", "killed")
RESET = CodedError("TASK.FAILED", "connection reset by peer")


class Heard:
    """An epoch of two ranks whose answers the test gives, and what the epoch told of."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, bool]] = []
        self.verdicts: list[CodedError] = []
        self.epoch = Epoch(
            "trainer",
            3,
            Limits(),
            lambda failure, is_first: self.failures.append((failure.rank, is_first)),
            self.verdicts.append,
        )
        self.answers: list[asyncio.Future[Any]] = []
        for rank in range(2):
            run = SimpleNamespace(remote=self._run)
            self.epoch._members.append(_Member(rank, SimpleNamespace(run=run)))

    def _run(self, *args: Any) -> asyncio.Future[Any]:
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    async def call(self) -> asyncio.Task[list[Any]]:
        before = len(self.answers)
        task = asyncio.create_task(self.epoch.call("step", (), {}, 20.0))
        await until(lambda: len(self.answers) == before + 2)
        return task


@pytest.fixture
async def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr("dispatch.roles.epoch.ray.is_initialized", lambda: True)
    return Heard()


def test_a_rank_that_was_lost_goes_before_those_that_raised() -> None:
    raised, lost = Failure(0, RESET, False), Failure(1, DIED, True)
    assert first([raised, lost]) is lost
    assert first([raised, Failure(1, RESET, False)]) is raised
    assert first([lost, Failure(0, DIED, True)]) is lost


async def test_the_death_that_is_heard_of_a_moment_later_is_named(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.roles.epoch.WINDOW", 20.0)  # not over before the death is told
    call = await heard.call()
    heard.answers[0].set_exception(RESET)
    await until(lambda: heard.failures)
    assert heard.failures == [(0, True)]  # at once, whatever its name will be
    assert heard.verdicts == []
    heard.epoch._fail(Failure(1, DIED, lost=True))
    with pytest.raises(CodedError) as raised:
        await call
    assert raised.value.code == "ACTOR.GROUP_FAILED"
    assert (raised.value.data["rank"], raised.value.data["code"]) == (1, "ACTOR.DIED")
    assert raised.value.data["consequences"] == [[0, "TASK.FAILED"]]
    assert heard.failures == [(0, True), (1, False)]


async def test_a_rank_that_raises_alone_is_named_after_the_window(heard: Heard) -> None:
    call = await heard.call()
    heard.answers[1].set_exception(RESET)
    with pytest.raises(CodedError) as raised:
        await call
    assert raised.value.data["rank"] == 1
    assert heard.answers[0].cancelled()
    with pytest.raises(CodedError) as again:
        await heard.epoch.call("step", (), {}, 1.0)
    assert again.value.id == raised.value.id
    assert again.value is not raised.value
    assert len(heard.answers) == 2  # nothing was asked of a group that has failed


@pytest.mark.parametrize("turns", range(8))
async def test_results_that_are_there_when_the_epoch_ends_are_not_returned(heard: Heard, turns: int) -> None:
    """The fence: a call returns nothing once its epoch is over, even what it has, at whichever turn of the
    loop that is."""
    call = await heard.call()
    for answer in heard.answers:
        answer.set_result("of epoch 3")
    for _ in range(turns):
        await asyncio.sleep(0)
    returned = call.done()
    heard.epoch.end(CodedError("CANCEL.CALLER", "restarted"))
    if returned:
        assert await call == ["of epoch 3"] * 2
    else:
        with pytest.raises(CodedError, match="restarted"):
            await call
    assert returned or turns < 7  # all turns there are have been tried


async def test_a_late_call_and_a_cancelled_one_fail_the_group(heard: Heard) -> None:
    answered = asyncio.get_running_loop().create_future()
    answered.set_result(1)
    heard.epoch._members[0].actor.run.remote = lambda *_: answered
    with pytest.raises(CodedError) as raised:
        await heard.epoch.call("step", (), {}, 0.3)
    assert raised.value.data["code"] == "TIMEOUT.DEADLINE"
    assert raised.value.data["rank"] == 1
    assert "from rank 1" in raised.value.detail


async def test_a_call_that_its_caller_leaves_fails_the_group(heard: Heard) -> None:
    call = await heard.call()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await heard.epoch.failed()).data["code"] == "CANCEL.CALLER"
    assert all(answer.cancelled() for answer in heard.answers)


async def test_a_lost_answer_is_asked_for_again_while_the_rank_is_only_out_of_reach(heard: Heard) -> None:
    heard.epoch._limits = Limits(interval=0.01)
    call = await heard.call()
    heard.answers[0].set_exception(CodedError("ACTOR.UNAVAILABLE", "out of reach"))
    heard.answers[1].set_result("one")
    await until(lambda: len(heard.answers) == 3)
    heard.answers[2].set_result("zero")
    assert await call == ["zero", "one"]
    assert heard.failures == []
