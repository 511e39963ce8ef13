"""Training groups on a real Ray: each way in which a rank can fail, and what restart and close leave."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from dispatch.processes import is_alive
from dispatch.roles import Limits, State, TrainingGroup
from dispatch.roles import epoch as epoch_module
from protocol import CodedError, Events
from tests.dispatch.roles.ranks import AsyncTrainer, Trainer, group_of
from tests.support.events import EventFile
from tests.support.wait import until, until_sync
from tests.support.witness import ROOT

QUICK = Limits(interval=0.1, silence=5.0, unavailable=20.0)
"""A heartbeat at once; but no rank is given up that a busy machine only lets wait."""
CALL = 20.0
Make = Callable[..., TrainingGroup]


@pytest.fixture
def events(tmp_path: Path) -> EventFile:
    return EventFile(tmp_path / "events.jsonl")


@pytest.fixture
async def make(ray_local: None, events: EventFile) -> AsyncIterator[Make]:
    """Makes groups of two ranks; each is closed, and must leave neither processes nor placement groups."""
    made: list[TrainingGroup] = []
    seen: set[tuple[int, float]] = set()

    def one(cls: type = Trainer, **settings: Any) -> TrainingGroup:
        settings = {"name": f"g{len(made)}-{time.monotonic_ns()}", "resources": {"CPU": 0.1}, **settings}
        settings = {"start_timeout": 30.0, "limits": QUICK, **settings}
        group = TrainingGroup(cls, 2, events=Events.to_file(events.path, run="", role="trainer"), **settings)
        made.append(group)
        return group

    yield one
    for group in made:
        seen |= {(info.pid, info.create_time) for info in group.ranks if info is not None}
        await group.close()
        assert group.state is State.CLOSED
        assert group_of(group.name) == []
    assert [pid for pid, create_time in seen if is_alive(pid, create_time)] == []


def processes(group: TrainingGroup) -> list[tuple[int, float]]:
    return [(info.pid, info.create_time) for info in group.ranks if info is not None]


async def failure_of(work: Any) -> CodedError:
    with pytest.raises(CodedError) as raised:
        await work
    return raised.value


async def test_ranks_start_together_meet_at_rank_0_and_answer_by_rank(make: Make, events: EventFile) -> None:
    group = make(args=(-1,), kwargs={"linger": 0.0})
    async with group:
        first = await group.call("where", timeout=CALL)
        assert [(rank, size) for rank, size, _, _ in first] == [(0, 2), (1, 2)]
        assert [pid for *_, pid in first] == [pid for pid, _ in processes(group)]
        meeting = first[0][2]
        assert first[1][2] == meeting == group.rendezvous
        assert (meeting.epoch, meeting.name) == (1, f"{group.name}.1")
        with socket.socket() as free:  # for a store on rank 0 to bind
            free.bind((meeting.address, meeting.port))
        # Two calls at once are run one after another, at every rank.
        assert await asyncio.gather(*(group.call("step", by, timeout=CALL) for by in (1, 10))) == [
            [1, 1],
            [11, 11],
        ]
        assert (await failure_of(group.call("stop", timeout=CALL))).code == "POOL.MISUSE"
        assert (await failure_of(group.start())).code == "POOL.MISUSE"
        before = processes(group)

        # A planned restart ends what is in flight, and the new ranks know nothing of the old.
        slow = asyncio.create_task(group.call("sleep", 30.0, timeout=60.0))
        await asyncio.sleep(0.1)
        one, other = await asyncio.gather(group.restart("new data"), group.restart("so say I"))
        assert one is other
        assert one.epoch == group.epoch == 2
        assert one.name != meeting.name
        assert (await failure_of(slow)).code == "CANCEL.CALLER"
        assert not any(is_alive(*process) for process in before)
        assert await group.call("step", timeout=CALL) == [1, 1]
        assert len(group_of(group.name)) == 1
    await group.close()
    for late in (group.call("step", timeout=CALL), group.restart("too late"), group.failed()):
        assert (await failure_of(late)).code == "POOL.CLOSED"
    told = [event["event"] for event in events.all()]
    assert told.count("group.ready") == 2
    assert told.count("group.restarting") == 1
    assert told[-1] == "group.closed"


HOW_A_RANK_FAILS = {
    "SIGKILL": "ACTOR.DIED",
    "exit": "ACTOR.DIED",
    "SIGSTOP": "ACTOR.WEDGED",
    "raise": "TASK.FAILED",
    "unpicklable": "TASK.FAILED",
    "interrupt": "TASK.FAILED",
}


@pytest.mark.timeout(150)
async def test_one_rank_fails_the_whole_group(
    make: Make, events: EventFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make()
    await group.start()
    for epoch, (how, code) in enumerate(HOW_A_RANK_FAILS.items(), 1):
        before = processes(group)
        # A busy machine tells late of a death; an exception alone is named only when the window is over.
        monkeypatch.setattr(epoch_module, "WINDOW", 15.0 if code == "ACTOR.DIED" else 0.25)
        # The others' sockets break a moment later, except where the neighbour does nothing any more.
        gently = 0.05 if code == "ACTOR.DIED" else 0.0
        error = await failure_of(group.call("fail", 1, how, gently, timeout=CALL))
        assert error.code == "ACTOR.GROUP_FAILED", how
        assert (error.data["rank"], error.data["code"]) == (1, code), how
        assert (error.data["epoch"], error.data["pid"]) == (epoch, before[1][0]), how
        assert group.state is State.FAILED
        assert (await failure_of(group.call("step", timeout=CALL))).id == error.id
        assert (await group.failed()).id == error.id
        assert group.epoch == epoch  # nothing is restarted by itself
        assert is_alive(*before[0])  # nor killed
        assert [event["id"] for event in events.named("group.failed")][epoch - 1 :] == [error.id]
        assert (await group.restart(how)).epoch == epoch + 1
        assert group.failure is None
        assert not any(is_alive(*process) for process in before), how
        assert await group.call("step", timeout=CALL) == [1, 1]


async def test_all_ranks_at_once_and_none_in_a_call(make: Make) -> None:
    group = make()
    await group.start()
    for pid, _ in processes(group):
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(CALL):
        error = await group.failed()
    assert (error.code, error.data["code"]) == ("ACTOR.GROUP_FAILED", "ACTOR.DIED")
    await until(lambda: len(group.consequences) == 1)
    # Asked for by two who noticed at once, or one after the other.
    await asyncio.gather(group.restart("one"), group.restart("two"))
    assert await group.call("step", timeout=CALL) == [1, 1]
    assert group.epoch == 2


@pytest.mark.timeout(120)
async def test_ranks_with_coroutines(make: Make, tmp_path: Path) -> None:
    group = make(AsyncTrainer)
    await group.start()
    assert await group.call("epoch", timeout=CALL) == [1, 1]
    # The others' calls are cancelled for good when one raises.
    error = await failure_of(group.call("raise_if", 1, str(tmp_path / "waiting"), timeout=CALL))
    assert (error.data["rank"], error.data["code"]) == (1, "TASK.FAILED")
    assert "loss is nan" in error.detail
    assert group._epoch is not None
    actor = group._epoch._members[0].actor
    async with asyncio.timeout(CALL):
        for number in itertools.count(1000):  # a number is run once
            if await actor.run.remote(number, 0, "seen"):
                break
    await group.restart("it raised")

    error = await failure_of(group.call("interrupt", 0, timeout=CALL))
    assert (error.data["rank"], error.data["code"]) == (0, "TASK.FAILED")
    assert "KeyboardInterrupt" in error.detail
    await group.restart("it was interrupted")

    # The loop of a rank has ended, and its process lives: no call of it is ever answered again.
    wedged = processes(group)[1]
    error = await failure_of(group.call("interrupt_beside", 1, timeout=CALL))
    assert (error.data["rank"], error.data["code"]) == (1, "ACTOR.WEDGED")
    assert is_alive(*wedged)
    await group.close()
    assert not is_alive(*wedged)


async def test_a_start_that_fails_names_the_rank_and_leaves_nothing(make: Make) -> None:
    group = make(kwargs={"raise_in_init": 1})
    error = await failure_of(group.start())
    assert error.code == "ACTOR.GROUP_FAILED"
    assert (error.data["rank"], error.data["code"]) == (1, "NODE.DISK_FULL")
    assert "no room for the checkpoint" in error.detail
    assert group.state is State.FAILED
    assert not any(is_alive(*process) for process in processes(group))
    assert group_of(group.name) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "options", [{"resources": {"CPU": 0.00001}}, {"runtime_env": {"working_dir": 3}}], ids=str
)
async def test_options_that_ray_refuses_leave_nothing(make: Make, options: dict[str, Any]) -> None:
    group = make(**options)
    refused = r"CONFIG\.INVALID.* Ray takes no rank with these options: "
    with pytest.raises(CodedError, match=refused):
        await group.start()
    assert group.state is State.FAILED
    assert group_of(group.name) == []
    with pytest.raises(CodedError, match=refused):
        await group.restart("it may have been mended")
    assert group.state is State.FAILED


async def test_a_death_during_a_start_and_during_a_restart(make: Make, tmp_path: Path) -> None:
    deadly = tmp_path / "deadly"
    deadly.touch()
    group = make(kwargs={"die_in_init": 0, "only_if": str(deadly)})
    error = await failure_of(group.start())
    assert (error.data["rank"], error.data["code"], error.data["epoch"]) == (0, "ACTOR.DIED", 1)
    assert group_of(group.name) == []
    error = await failure_of(group.restart("perhaps it was nothing"))
    assert (error.data["rank"], error.data["code"], error.data["epoch"]) == (0, "ACTOR.DIED", 2)
    assert group.state is State.FAILED
    assert not any(is_alive(*process) for process in processes(group))
    assert (await failure_of(group.call("step", timeout=CALL))).id == error.id
    deadly.unlink()
    assert (await group.restart("corrected")).epoch == 3
    assert await group.call("step", timeout=CALL) == [1, 1]


async def test_no_room_is_told_with_the_resources_by_the_deadline(make: Make) -> None:
    taken = make(resources={"CPU": 3})
    await taken.start()
    # Long enough for a worker to start that makes the placement group.
    never = make(resources={"CPU": 0.1, "GPU": 4000}, start_timeout=5.0)
    late = make(resources={"CPU": 3}, strategy="STRICT_PACK", start_timeout=5.0)
    error, in_vain = await asyncio.gather(failure_of(never.start()), failure_of(late.start()))
    assert error.code == "TASK.UNSCHEDULABLE"
    assert "GPU: 4000" in error.detail
    assert "CPU: 8" in error.detail  # what the cluster has
    assert group_of(never.name) == []
    assert never.state is State.FAILED

    assert in_vain.code == "TIMEOUT.DEADLINE"
    assert "{CPU: 3}, {CPU: 3}" in in_vain.detail
    assert group_of(late.name) == []
    await taken.close()
    late._start_timeout = 30.0
    assert (await late.restart("there is room now")).epoch == 2


async def test_close_during_a_start_and_during_a_restart(make: Make) -> None:
    group = make(kwargs={"linger": 30.0})
    start = asyncio.create_task(group.start())
    await until(lambda: len(processes(group)) == 2)
    await asyncio.gather(group.close(), group.close())
    assert (await failure_of(start)).code == "CANCEL.CALLER"

    group = make()
    await group.start()
    restart = asyncio.create_task(group.restart("why not"))
    await until(lambda: group.epoch == 2)
    await group.close()
    assert (await failure_of(restart)).code == "CANCEL.CALLER"
    assert group.state is State.CLOSED

    unused = make()
    await unused.close()
    assert (await failure_of(unused.start())).code == "POOL.CLOSED"


async def test_a_start_whose_caller_goes_away_leaves_nothing(make: Make) -> None:
    group = make(kwargs={"linger": 30.0})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await group.start()
    assert group.state is State.CLOSED
    assert group_of(group.name) == []


async def test_a_call_that_is_late_fails_the_group_and_one_that_waits_for_its_turn_does_not(
    make: Make, tmp_path: Path
) -> None:
    group = make()
    await group.start()
    slow = asyncio.create_task(group.call("wait_for", str(tmp_path / "enough"), timeout=CALL))
    await asyncio.sleep(0.1)
    error = await failure_of(group.call("step", timeout=0.2))
    assert error.code == "TIMEOUT.DEADLINE"
    (tmp_path / "enough").touch()
    assert await slow == [0, 1]
    assert group.state is State.READY
    error = await failure_of(group.call("sleep", 30.0, timeout=0.3))
    assert error.code == "ACTOR.GROUP_FAILED"
    assert error.data["code"] == "TIMEOUT.DEADLINE"
    # Of the 0.3 s, what was left when its turn came.
    assert re.search(r"sleep within 0(\.\d+)? s from rank 0, 1", error.detail)


async def test_without_ray_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call would start a Ray of its own accord."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    group = TrainingGroup(Trainer, 2)
    error = await failure_of(group.start())
    assert error.code == "POOL.MISUSE"
    assert "ray.init()" in error.detail
    await group.close()


def test_what_cannot_be_started_is_refused() -> None:
    for wrong, says in (
        ({"cls": Trainer(0, 1, None)}, "not a class"),  # type: ignore[arg-type]  # the wrong thing, on purpose
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 4 / 2}, "world_size is 2.0"),
        ({"strategy": "SPRAED"}, "strategy is 'SPRAED', not PACK, STRICT_PACK, SPREAD or STRICT_SPREAD"),
        ({"resources": {}}, "name at least one"),
        ({"resources": {"CPU": 0}}, "above 0"),
        ({"start_timeout": 0.0}, "start_timeout is 0"),
    ):
        settings: dict[str, Any] = {"cls": Trainer, "world_size": 2, **wrong}
        with pytest.raises(CodedError, match=says) as raised:
            TrainingGroup(**settings)
        assert raised.value.code == "CONFIG.INVALID"


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), None])
async def test_a_call_without_a_deadline_is_none(timeout: Any) -> None:
    error = await failure_of(TrainingGroup(Trainer, 2).call("sleep", timeout=timeout))
    assert (error.code, error.detail) == ("POOL.MISUSE", f"sleep: timeout is {timeout}: seconds, 0 or more")


def test_nothing_outlives_its_owner(ray_local: None) -> None:
    """Another driver of this Ray is SIGKILLed: its ranks end, though they compute, and its room is free."""
    address, name = ray.get_runtime_context().gcs_address, f"orphan-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "tests.dispatch.roles.owner", address, name]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            ranks = [(int(pid), float(since)) for pid, since in json.loads(owner.stdout.readline())]
            assert len(ranks) == 2
            assert all(is_alive(*rank) for rank in ranks)
            assert len(group_of(name)) == 1
        finally:
            owner.kill()
    until_sync(lambda: not any(is_alive(*rank) for rank in ranks), what="the ranks have ended")
    until_sync(lambda: group_of(name) == [], what="the placement group is removed")
