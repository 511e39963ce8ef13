"""What Ray really does: one test for each row of the table that the tables of `faults` rest on.

Each asserts what the caller gets from Ray and what `classify` makes of it. Ray 2.60; where an async
actor behaves otherwise than a sync one, both are here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    UnserializableException,
)

from faults import Action, Blame, Fault, Kind, Outcome, classify, decide
from protocol import Trust
from tests.ray_table.actors import Plain, Sync, TwoRequired
from tests.support.wait import until

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(90)]
LONG = 30.0


async def failure_of(ref: Awaitable[Any], timeout: float = LONG) -> BaseException:
    """The exception that a call ends with."""

    async def get() -> Any:
        return await ref

    try:
        got = await asyncio.wait_for(get(), timeout)
    except BaseException as exc:  # noqa: BLE001 - whatever it is, it is what is looked at
        return exc
    raise AssertionError(f"the call answered {got!r}")


async def silence_of(actor: Any) -> BaseException:
    """What the caller of an actor gets that has fallen silent. Calls of an async actor keep no order: one
    may still overtake those that make it silent."""
    for _ in range(20):
        try:
            return await failure_of(actor.count.remote(), 1.0)
        except AssertionError:
            continue
    raise AssertionError("the actor goes on answering")


async def death_of(dying: Awaitable[Any], again: Callable[[], Awaitable[Any]]) -> BaseException:
    """What the caller gets of whose call an actor dies. Ray waits a second for the word that it is dead
    (timeout_ms_task_wait_for_death_info); where that takes longer the call ends as unavailable, and one of
    those after it as what it is."""
    exc = await failure_of(dying)
    for _ in range(20):
        if not isinstance(exc, ActorUnavailableError):
            break
        exc = await failure_of(again())
    return exc


def meant(exc: BaseException) -> tuple[str, Kind, Blame, Outcome]:
    fault: Fault = classify(exc)
    return str(fault.code), fault.kind, fault.blame, fault.outcome


async def test_an_ordinary_exception_is_a_dual_without_its_cause() -> None:
    exc: Any = await failure_of(Plain.remote().fail_with_cause.remote())
    assert isinstance(exc, RayTaskError)
    assert isinstance(exc, ValueError)
    assert exc.cause.__cause__ is None, "Ray drops the cause"
    assert exc.cause.__notes__ == ["a note"]
    assert exc.attribute == 5
    assert meant(exc) == ("TASK.FAILED", Kind.RAISED, Blame.CALLEE, Outcome.RAN)
    assert decide(classify(exc)).action is Action.GIVE_UP


async def test_an_inner_actor_that_died_is_nested_and_our_callee_is_alive() -> None:
    outer, inner = Plain.remote(), Plain.remote()
    exc = await death_of(
        outer.through.remote(inner, "exit", "sigkill"), lambda: outer.through.remote(inner, "count")
    )
    assert isinstance(exc, RayTaskError)
    assert isinstance(exc, RayActorError)
    assert meant(exc) == ("ACTOR.NESTED_DIED", Kind.DIED, Blame.NESTED, Outcome.UNKNOWN)
    assert decide(classify(exc)).action is not Action.RECREATE
    assert await outer.count.remote() == 1, "our callee is alive"


async def test_an_inner_call_that_timed_out_is_nested() -> None:
    outer, inner = Plain.remote(), Plain.remote()
    exc = await failure_of(outer.get_with_timeout.remote(inner))
    assert isinstance(exc, RayTaskError)
    assert isinstance(exc, GetTimeoutError)
    assert meant(exc)[:3] == ("TIMEOUT.NESTED", Kind.TIMEOUT, Blame.NESTED)


async def test_keyword_only_arguments_leave_text_only() -> None:
    exc = await failure_of(Plain.remote().fail.remote("http_400"))
    assert isinstance(exc, UnserializableException)
    assert not isinstance(exc, RayTaskError)
    fault = classify(exc)
    assert (fault.code, fault.status, fault.trust) == ("REQUEST.REJECTED", 400, Trust.HEURISTIC)


async def test_several_required_arguments_leave_text_only() -> None:
    exc = await failure_of(Plain.remote().fail.remote("two_required"))
    assert isinstance(exc, UnserializableException)
    assert not isinstance(exc, TwoRequired)
    assert "rank 3 failed at step 17" in str(exc)


async def test_an_attribute_that_does_not_pickle_leaves_a_bare_ray_error() -> None:
    """aiohttp's exception with the headers of a real reply; see the server's side in test_identity."""
    exc = await failure_of(Plain.remote().fail.remote("aiohttp_503"))
    assert isinstance(exc, RayTaskError)
    assert type(exc.cause) is RayError
    fault = classify(exc)
    assert (fault.code, fault.status, fault.trust) == ("BACKPRESSURE.OVERLOADED", 503, Trust.HEURISTIC)


async def test_one_bad_leaf_loses_the_whole_group() -> None:
    whole = await failure_of(Plain.remote().fail.remote("group"))
    assert isinstance(whole, ExceptionGroup)
    assert len(whole.exceptions) == 2
    lost = await failure_of(Plain.remote().fail.remote("bad_leaf"))
    assert isinstance(lost, UnserializableException)
    assert not isinstance(lost, ExceptionGroup)
    assert decide(classify(lost)).action is Action.GIVE_UP


async def test_whatever_init_raises_is_an_actor_that_died_as_text() -> None:
    exc = await failure_of(Plain.remote("ordinary").count.remote())
    assert isinstance(exc, ActorDiedError)
    assert exc.actor_init_failed
    assert "KeyError: 'reward'" in str(exc)
    assert meant(exc) == ("ACTOR.INIT_FAILED", Kind.DIED, Blame.CALLEE, Outcome.NOT_RUN)
    assert decide(classify(exc)).action is Action.GIVE_UP, "it would fail the same way again"


@pytest.mark.parametrize("how", ["sigkill", "segfault", "os_exit"])
async def test_deaths_look_alike(how: str) -> None:
    actor = Plain.remote()
    exc = await death_of(actor.exit.remote(how), actor.count.remote)
    assert type(exc) is ActorDiedError
    assert meant(exc) == ("ACTOR.DIED", Kind.DIED, Blame.CALLEE, Outcome.UNKNOWN)
    assert decide(classify(exc)).action is Action.RECREATE


async def test_with_restarts_left_it_is_unavailable_and_then_answers_with_reset_state() -> None:
    actor = Plain.options(max_restarts=1).remote()
    assert await actor.count.remote() == 1
    assert await actor.count.remote() == 2
    exc = await failure_of(actor.exit.remote("sigkill"))
    assert type(exc) is ActorUnavailableError
    assert meant(exc) == ("ACTOR.UNAVAILABLE", Kind.UNAVAILABLE, Blame.CALLEE, Outcome.UNKNOWN)
    assert decide(classify(exc)).action is Action.WAIT, "it is not dead: nobody replaces it"
    answer = None
    for _ in range(200):
        try:
            answer = await asyncio.wait_for(_got(actor.count.remote()), LONG)
            break
        except ActorUnavailableError:
            continue
    assert answer == 1, "its state was reset"


async def test_sys_exit_ends_a_sync_actor_with_its_status_in_the_text() -> None:
    actor = Sync.remote()
    exc = await death_of(actor.exit.remote("sys_exit"), actor.pid.remote)
    assert isinstance(exc, ActorDiedError)
    assert "exit code 3" in str(exc).lower()
    assert classify(exc).code == "ACTOR.DIED"


async def test_keyboard_interrupt_in_a_sync_actor_is_a_cancelled_task() -> None:
    exc = await failure_of(Sync.remote().exit.remote("keyboard_interrupt"))
    assert isinstance(exc, RayTaskError)
    assert isinstance(exc, TaskCancelledError)
    assert classify(exc).kind is Kind.CANCELLED


@pytest.mark.parametrize("how", ["keyboard_interrupt", "sys_exit"])
async def test_keyboard_interrupt_or_sys_exit_in_a_coroutine_wedges_the_actor(how: str) -> None:
    """The loop's thread ends, the process lives and never answers again. The call itself either ends
    as cancelled or never ends; on 2.60 with concurrency groups it never does, and the control group
    falls silent too."""
    actor = Plain.remote()
    pid, _ = await actor.where.remote()
    created = psutil.Process(pid).create_time()
    exc = await failure_of(actor.exit.remote(how), 1.5)
    assert isinstance(exc, TaskCancelledError | TimeoutError)
    assert classify(exc).kind in (Kind.CANCELLED, Kind.TIMEOUT)
    silent = await silence_of(actor)
    assert isinstance(silent, TimeoutError)
    process = psutil.Process(pid)
    assert process.create_time() == created, "its process lives"
    ray.kill(actor)


async def test_blocked_stopped_and_full_are_the_same_silence_and_only_a_probe_tells() -> None:
    blocked, stopped, full = Plain.remote(), Plain.remote(), Plain.options(max_concurrency=2).remote()
    pid, _ = await stopped.where.remote()
    await asyncio.gather(blocked.ping.remote(), stopped.ping.remote(), full.ping.remote())
    busy = [blocked.block.remote(LONG), *(full.sleep.remote(LONG) for _ in range(2))]
    os.kill(pid, signal.SIGSTOP)
    try:
        for actor in (blocked, stopped, full):
            exc = await silence_of(actor)
            assert type(exc) is TimeoutError
            assert classify(exc).kind is Kind.TIMEOUT
        with pytest.raises(GetTimeoutError) as caught:
            ray.get(stopped.count.remote(), timeout=0.2)
        assert meant(caught.value)[:2] == ("TIMEOUT.RAY_GET", Kind.TIMEOUT)
        # In a group of its own a probe is answered while the default group is full or blocked.
        assert await asyncio.wait_for(_got(full.ping.remote()), LONG) == "pong"
        assert await asyncio.wait_for(_got(blocked.ping.remote()), LONG) == "pong"
        assert isinstance(await failure_of(stopped.ping.remote(), 1.0), TimeoutError)
    finally:
        os.kill(pid, signal.SIGCONT)
        for actor in (blocked, stopped, full):
            ray.kill(actor)
    del busy


async def test_a_call_nobody_waits_for_any_more_keeps_running(tmp_path: Path) -> None:
    actor, log = Plain.remote(), tmp_path / "log"
    exc = await failure_of(actor.mark.remote(str(log), 1.5), 0.5)
    assert isinstance(exc, TimeoutError)
    await until(lambda: log.exists() and "ended" in log.read_text(), what="the call ran to its end")


async def test_cancel_on_an_async_actor_is_a_real_cancellation(tmp_path: Path) -> None:
    actor, log = Plain.options(max_concurrency=1).remote(), tmp_path / "log"
    running = actor.mark.remote(str(log), 60.0)
    await until(log.exists, what="the first call began")
    queued = actor.mark.remote(str(tmp_path / "other"), 60.0)  # only now: async actors keep no order
    ray.cancel(queued)
    ray.cancel(running)
    exc = await failure_of(running)
    assert isinstance(exc, TaskCancelledError)
    assert isinstance(exc, RayTaskError)
    assert isinstance(await failure_of(queued), TaskCancelledError)
    await until(lambda: "cancelled" in log.read_text(), what="the coroutine saw a CancelledError")
    assert meant(exc) == ("CANCEL.REMOTE", Kind.CANCELLED, Blame.CALLER, Outcome.UNKNOWN)
    assert decide(classify(exc)).action is Action.CANCEL


async def test_force_on_an_actor_call_is_a_value_error() -> None:
    actor = Plain.remote()
    await actor.count.remote()
    with pytest.raises(ValueError, match="force"):
        ray.cancel(actor.sleep.remote(0.1), force=True)


async def test_cancel_on_a_sync_actor_may_let_the_call_run(tmp_path: Path) -> None:
    actor, log = Sync.remote(), tmp_path / "log"
    await actor.pid.remote()
    first, second = actor.mark.remote(str(log), 1.0), actor.mark.remote(str(log), 0.0)
    ray.cancel(second)
    ray.cancel(first)
    for ref in (first, second):
        ended = (await asyncio.gather(asyncio.wait_for(_got(ref), LONG), return_exceptions=True))[0]
        if ended is not None:
            assert isinstance(ended, TaskCancelledError)
            assert classify(ended).outcome is Outcome.UNKNOWN, "it may have run all the same"
    ran = log.read_text().count("ran") if log.exists() else 0
    assert 0 <= ran <= 2, "either is possible, which is why the outcome is unknown"


async def test_get_timeout_error_is_a_timeout_error_is_an_os_error() -> None:
    assert issubclass(GetTimeoutError, TimeoutError)
    assert issubclass(TimeoutError, OSError)
    assert classify(GetTimeoutError("x")).code == "TIMEOUT.RAY_GET"
    assert classify(TimeoutError()).code == "TIMEOUT.DEADLINE"
    assert classify(OSError(28, "No space left on device")).code == "NODE.DISK_FULL"


@pytest.mark.timeout(300)
def test_a_removed_node_is_unavailable_before_it_is_dead() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray_table.removed_node"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen["first"]["code"] in ("ACTOR.UNAVAILABLE", "ACTOR.DIED"), seen
    if seen["first"]["code"] == "ACTOR.UNAVAILABLE":
        assert seen["first"]["type"] == "ActorUnavailableError"
        assert "may or may not have been executed" in seen["first"]["text"].replace("\n", " ")
        assert seen["first"]["outcome"] == "unknown"
    assert seen["last"]["code"] == "ACTOR.DIED", "in the end Ray says that it is dead"


async def _got(ref: Awaitable[Any]) -> Any:
    return await ref
