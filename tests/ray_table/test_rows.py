"""What Ray really does, row by row of the table in the design, and what is said of it.

Each test is one row. Where a newer Ray behaves otherwise, the row's test is the place that shows it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions as rex

from faults import Action, Blame, Kind, Outcome, classify, decide
from protocol import Trust, code_of
from tests.ray_table.actors import AsyncActor, PlainInit, SyncActor
from tests.ray_table.helpers import SOON, WAIT, actor, alive, both, caught, said_of_text, touch, until

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def shared(ray_local: None) -> Any:
    """One actor for the rows that leave it alive."""
    made = AsyncActor.remote()
    ray.get(made.pid.remote(), timeout=WAIT)
    return made


def test_ordinary_exception(shared: Any) -> None:
    exc = caught(shared.ordinary.remote())
    assert isinstance(exc, rex.RayTaskError)
    assert isinstance(exc, ValueError)
    assert isinstance(exc.cause, ValueError)
    assert exc.__cause__ is exc.cause.__cause__ is None
    assert exc.cause.extra == 5  # type: ignore[attr-defined]
    assert exc.cause.__notes__ == ["a note"]
    fault = both(exc)
    assert (fault.code, fault.kind, fault.blame, fault.outcome) == (
        "TASK.FAILED", Kind.RAISED, Blame.CALLEE, Outcome.RAN,
    )  # fmt: skip
    assert decide(fault).action is Action.GIVE_UP


def test_inner_actor_died_while_our_callee_awaited_it(shared: Any) -> None:
    exc = caught(shared.await_one_that_dies.remote())
    assert isinstance(exc, rex.RayActorError)
    assert isinstance(exc, rex.RayTaskError)
    assert ray.get(shared.pid.remote(), timeout=WAIT), "our callee is alive"
    fault = both(exc)
    assert (fault.code, fault.blame) == ("ACTOR.NESTED_DIED", Blame.NESTED)
    assert decide(fault).action is Action.RETRY_ELSEWHERE


def test_inner_call_timed_out(shared: Any) -> None:
    exc = caught(shared.get_one_that_hangs.remote())
    assert isinstance(exc, rex.GetTimeoutError)
    assert isinstance(exc, rex.RayTaskError)
    assert ray.get(shared.pid.remote(), timeout=WAIT), "our callee is alive"
    fault = both(exc)
    assert (fault.code, fault.blame) == ("TIMEOUT.NESTED", Blame.NESTED)


@pytest.mark.parametrize("method", ["keyword_only", "two_required"])
def test_arguments_that_pickle_cannot_give(shared: Any, method: str) -> None:
    exc = caught(getattr(shared, method).remote())
    assert isinstance(exc, rex.UnserializableException)
    assert not isinstance(exc, rex.RayTaskError)
    assert exc.__cause__ is None
    assert {"keyword_only": "status 503", "two_required": "one and two"}[method] in str(exc)
    fault = both(exc)
    assert (fault.code, fault.trust) == ("TASK.FAILED", Trust.HEURISTIC)


def test_arguments_that_pickle_cannot_give_httpx(shared: Any) -> None:
    exc = caught(shared.httpx_status.remote(400))
    assert isinstance(exc, rex.UnserializableException)
    fault = both(exc)
    assert (fault.code, fault.status, fault.trust) == ("REQUEST.REJECTED", 400, Trust.HEURISTIC)


def test_attribute_that_cannot_be_pickled(shared: Any) -> None:
    exc = caught(shared.aiohttp_status.remote(503))
    assert type(exc) is rex.RayTaskError
    assert type(exc.cause) is rex.RayError
    fault = both(exc)
    assert (fault.code, fault.status, fault.trust) == ("BACKPRESSURE.OVERLOADED", 503, Trust.HEURISTIC)
    assert decide(fault).action is Action.WAIT


def test_one_bad_leaf_in_a_group(shared: Any) -> None:
    exc = caught(shared.bad_leaf.remote())
    assert isinstance(exc, rex.UnserializableException)
    assert not isinstance(exc, ExceptionGroup)
    assert "a good leaf" in str(exc)
    assert "status 500" in str(exc)
    assert classify(exc).trust is Trust.HEURISTIC
    whole = caught(shared.good_leaves.remote())
    assert isinstance(whole, ExceptionGroup)
    assert code_of(whole) == "BACKPRESSURE.OVERLOADED"
    fault = classify(whole)
    assert (fault.code, fault.trust) == ("BACKPRESSURE.OVERLOADED", Trust.STRUCTURED)


@pytest.mark.parametrize("how", ["plain", "refused", "keyword only"])
def test_anything_raised_in_init(how: str) -> None:
    with actor(PlainInit, how) as made:
        exc = caught(made.ping.remote())
    assert isinstance(exc, rex.ActorDiedError)
    assert exc.__cause__ is None
    assert {"plain": "a plain failure", "refused": "nobody listens", "keyword only": "status 503"}[
        how
    ] in str(exc)
    fault = both(exc)
    assert (fault.code, fault.outcome) == ("ACTOR.INIT_FAILED", Outcome.NOT_RUN)
    assert decide(fault).action is Action.GIVE_UP


@pytest.mark.parametrize("how", ["kill", "segfault", "exit"])
def test_killed_segfault_or_exited(how: str) -> None:
    with actor(AsyncActor) as made:
        exc = caught(made.die.remote(how))
    assert type(exc) is rex.ActorDiedError
    fault = both(exc)
    assert (fault.code, fault.kind, fault.blame, fault.outcome) == (
        "ACTOR.DIED", Kind.DIED, Blame.CALLEE, Outcome.UNKNOWN,
    )  # fmt: skip
    assert decide(fault).action is Action.RECREATE
    assert decide(fault, idempotent=False).action is Action.GIVE_UP


def test_killed_with_restarts_left() -> None:
    with actor(AsyncActor, max_restarts=1) as made:
        assert ray.get([made.counted.remote() for _ in range(3)], timeout=WAIT) == [1, 2, 3]
        exc = caught(made.die.remote("kill"))
        assert type(exc) is rex.ActorUnavailableError
        fault = both(exc)
        assert (fault.code, fault.kind, fault.outcome) == (
            "ACTOR.UNAVAILABLE",
            Kind.UNAVAILABLE,
            Outcome.UNKNOWN,
        )
        assert decide(fault).action is Action.WAIT
        assert _answer(made) == 1, "it answers again, with its state reset"


def _answer(made: Any) -> int:
    got: list[int] = []

    def answers() -> bool:
        try:
            got.append(ray.get(made.counted.remote(), timeout=WAIT))
        except rex.ActorUnavailableError:
            return False
        return True

    until(answers)
    return got[0]


def test_sys_exit() -> None:
    with actor(SyncActor) as made:
        exc = caught(made.sys_exit.remote())
    assert type(exc) is rex.ActorDiedError
    assert "exit code 3" in str(exc)
    assert both(exc).code == "ACTOR.DIED"


def test_sys_exit_inside_an_async_method() -> None:
    """The table says ActorDiedError. On an async actor of 2.60 the exit ends the thread of the loop
    alone: the call never settles, other concurrency groups are silent too, and the process lives."""
    _wedges("sys_exit")


def test_keyboard_interrupt_inside_an_async_method() -> None:
    """The table says RayTaskError(TaskCancelledError), and a wedged actor. The actor is wedged, but
    the call itself never settles either, and other concurrency groups are as silent."""
    _wedges("interrupted")


def _wedges(method: str) -> None:
    with actor(AsyncActor) as made:
        pid = ray.get(made.pid.remote(), timeout=WAIT)
        exc = caught(getattr(made, method).remote(), timeout=SOON)
        assert type(exc) is rex.GetTimeoutError
        assert both(exc).code == "TIMEOUT.RAY_GET"
        after = [made.pid.remote(), made.control.remote()]
        assert ray.wait(after, num_returns=1, timeout=SOON)[0] == []
        assert alive(pid)
    until(lambda: not alive(pid))


def test_keyboard_interrupt_in_a_sync_actor() -> None:
    """Where the row of the table is still true: the call ends as a cancellation that nobody asked
    for; but a sync actor goes on answering."""
    with actor(SyncActor) as made:
        exc = caught(made.interrupted.remote())
        assert isinstance(exc, rex.TaskCancelledError)
        assert isinstance(exc, rex.RayTaskError)
        assert both(exc).code == "CANCEL.REMOTE"
        assert ray.get(made.pid.remote(), timeout=WAIT)


@pytest.mark.parametrize("why", ["blocked", "stopped", "full"])
def test_blocked_stopped_and_full_look_alike(why: str) -> None:
    options = {"max_concurrency": 2} if why == "full" else {}
    with actor(AsyncActor, **options) as made:
        pid = ray.get(made.pid.remote(), timeout=WAIT)
        if why == "blocked":
            made.block.remote()
        elif why == "stopped":
            os.kill(pid, signal.SIGSTOP)
        else:
            for n in range(2):
                made.wait.remote(str(n))
        try:
            exc = caught(made.pid.remote(), timeout=SOON)
            assert type(exc) is rex.GetTimeoutError
            fault = both(exc)
            assert (fault.code, fault.kind, fault.outcome) == (
                "TIMEOUT.RAY_GET",
                Kind.TIMEOUT,
                Outcome.UNKNOWN,
            )
            assert decide(fault).action is Action.CANCEL
            probe = made.control.remote()
            answered = bool(ray.wait([probe], timeout=SOON if why == "stopped" else WAIT)[0])
            assert answered == (why != "stopped"), "only the probe in its own group tells them apart"
        finally:
            os.kill(pid, signal.SIGCONT)
            if why == "blocked":
                os.kill(pid, signal.SIGUSR1)


def test_get_expires_and_the_call_keeps_running(shared: Any) -> None:
    ref = shared.wait.remote("get")
    assert isinstance(caught(ref, timeout=0.2), rex.GetTimeoutError)
    _still_running_until_cancelled(shared, ref, "get")


async def test_wait_for_expires_and_the_call_keeps_running(shared: Any) -> None:
    ref = shared.wait.remote("wait_for")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ref, 0.2)
    await asyncio.to_thread(_still_running_until_cancelled, shared, ref, "wait_for")


async def test_the_awaiting_task_is_cancelled_and_the_call_keeps_running(shared: Any) -> None:
    ref = shared.wait.remote("task")

    async def await_it() -> None:
        await ref

    task = asyncio.create_task(await_it())
    await asyncio.to_thread(until, lambda: "task" in _seen(shared)["ran"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(_still_running_until_cancelled, shared, ref, "task")


def _seen(made: Any) -> dict[str, Any]:
    seen: dict[str, Any] = ray.get(made.control.remote(), timeout=WAIT)
    return seen


def _still_running_until_cancelled(made: Any, ref: Any, name: str) -> None:
    until(lambda: name in _seen(made)["ran"])
    assert name not in _seen(made)["cancelled"]
    assert ray.wait([ref], timeout=0)[0] == []
    ray.cancel(ref)
    until(lambda: name in _seen(made)["cancelled"])


def test_cancel_of_a_running_async_call(shared: Any) -> None:
    ref = shared.wait.remote("running")
    until(lambda: "running" in _seen(shared)["ran"])
    ray.cancel(ref)
    exc = caught(ref)
    assert isinstance(exc, rex.TaskCancelledError)
    assert isinstance(exc, rex.RayTaskError)
    assert "running" in _seen(shared)["cancelled"], "a real asyncio cancellation"
    fault = both(exc)
    assert (fault.code, fault.kind, fault.blame) == ("CANCEL.REMOTE", Kind.CANCELLED, Blame.CALLER)
    assert decide(fault).action is Action.CANCEL


def test_cancel_of_a_queued_async_call() -> None:
    with actor(AsyncActor, max_concurrency=1) as made:
        made.wait.remote("first")
        until(lambda: "first" in _seen(made)["ran"])
        ref = made.wait.remote("queued")
        ray.cancel(ref)
        exc = caught(ref)
        assert isinstance(exc, rex.TaskCancelledError)
        assert both(exc).code == "CANCEL.REMOTE"
        assert "queued" not in _seen(made)["ran"]


def test_cancel_with_force_on_an_actor_call(shared: Any) -> None:
    ref = shared.wait.remote("forced")
    with pytest.raises(ValueError, match="force"):
        ray.cancel(ref, force=True)
    ray.cancel(ref)


def test_cancel_on_a_sync_actor(tmp_path: Path) -> None:
    """The running call runs to its end; the caller sees TaskCancelledError all the same."""
    with actor(SyncActor) as made:
        ray.get(made.pid.remote(), timeout=WAIT)
        gate = tmp_path / "gate"
        running = made.until.remote(str(gate), "running")
        queued = made.until.remote(str(gate), "queued")
        assert ray.wait([running], timeout=0.5)[0] == [], "it has begun, or will"
        ray.cancel(running)
        ray.cancel(queued)
        touch(gate)
        for ref in (running, queued):
            exc = caught(ref)
            assert isinstance(exc, rex.TaskCancelledError)
            fault = classify(exc)
            assert (fault.code, fault.outcome) == ("CANCEL.REMOTE", Outcome.UNKNOWN)
            assert said_of_text(exc).code == "CANCEL.REMOTE"
            assert not decide(fault).action.sends_again
        assert "running ended" in ray.get(made.log.remote(), timeout=WAIT), "what was cancelled ran"


def test_get_timeout_error_is_a_timeout_is_an_oserror() -> None:
    exc = rex.GetTimeoutError("x")
    assert isinstance(exc, TimeoutError)
    assert isinstance(exc, OSError)
    assert classify(exc).code == "TIMEOUT.RAY_GET"
    assert classify(TimeoutError("x")).code == "TIMEOUT.DEADLINE"
    assert classify(OSError(5, "x")).code == "NODE.IO"


def test_a_probe_answers_while_the_loop_is_blocked_and_not_when_stopped() -> None:
    """Below the table: a method in its own group runs on its own loop and thread."""
    with actor(AsyncActor) as made:
        pid = ray.get(made.pid.remote(), timeout=WAIT)
        made.block.remote()
        assert _seen(made)["pid"] == pid
        os.kill(pid, signal.SIGUSR1)
        assert ray.get(made.pid.remote(), timeout=WAIT) == pid
