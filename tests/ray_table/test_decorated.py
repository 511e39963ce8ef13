"""`coded` on actors and tasks, in both orders of the decorators (I8), and what stays as it was (L2, L3)."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError

from faults import Action, Kind, classify, classify_text, decide
from protocol import CodedError, Trust, code_of, read
from tests.ray_table import decorated
from tests.ray_table.actors import Plain

pytestmark = pytest.mark.usefixtures("ray_local")
LONG = 30.0
ORDERS = {"coded inside": decorated.Inside, "coded outside": decorated.Outside}


def failure_of(ref: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, is what the tests are about
        ray.get(ref, timeout=LONG)
    return caught.value


@pytest.fixture(scope="module")
def actors(ray_local: None) -> dict[str, Any]:
    return {order: made.remote() for order, made in ORDERS.items()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ["keyword_only", "inherited"])
def test_what_ray_cannot_carry_is_carried(actors: dict[str, Any], order: str, method: str) -> None:
    exc: Any = failure_of(getattr(actors[order], method).remote())
    assert isinstance(exc, CodedError)
    assert isinstance(exc, RayTaskError)
    assert exc.cause.code == "TASK.FAILED"
    assert exc.cause.origin.type.endswith("KeywordOnly")
    assert exc.cause.origin.text == "status 503"
    assert exc.cause.origin.actor, "which actor it was"
    assert read(exc).trust is Trust.STRUCTURED


@pytest.mark.parametrize("order", ORDERS)
def test_what_will_not_load_is_carried(actors: dict[str, Any], order: str) -> None:
    exc: Any = failure_of(actors[order].will_not_load.remote())
    assert exc.cause.origin.text == "what was said"


@pytest.mark.parametrize("order", ORDERS)
def test_a_coded_error_arrives_equal(actors: dict[str, Any], order: str) -> None:
    exc: Any = failure_of(actors[order].named.remote())
    reading = read(exc)
    assert (reading.code, reading.detail, reading.data) == (
        "WEIGHTS.REFIT_ABORTED",
        "the watchdog",
        {"step": 7},
    )
    assert str(exc.cause).count("the watchdog") == 1


@pytest.mark.parametrize("order", ORDERS)
def test_init_keeps_its_code(order: str) -> None:
    exc = failure_of(ORDERS[order].remote(fail=True).works.remote())
    assert isinstance(exc, ActorDiedError)
    assert code_of(exc) == "NODE.IO"
    fault = classify(exc)
    assert (fault.code, fault.outcome, fault.trust) == ("NODE.IO", "not_run", Trust.CHECKSUMMED)
    assert "weights.bin" in str(exc), "what the operator reads"


@pytest.mark.parametrize("order", ORDERS)
async def test_a_stream_is_a_stream_and_its_end_has_a_name(actors: dict[str, Any], order: str) -> None:
    got = []
    with pytest.raises(RayTaskError) as caught:  # noqa: PT012 - the failure comes from the iteration
        async for ref in actors[order].stream.options(num_returns="streaming").remote():
            got.append(await ref)
    assert got == [1]
    assert code_of(caught.value) == "TRANSPORT.DISCONNECTED"


@pytest.mark.parametrize("order", ORDERS)
def test_arguments_groups_and_cancellation_are_as_before(actors: dict[str, Any], order: str) -> None:
    assert ray.get(actors[order].works.remote(n=5), timeout=LONG) == 5
    running = actors[order].forever.remote()
    assert ray.get(actors[order].works.remote(), timeout=LONG) == 1
    ray.cancel(running)
    assert isinstance(failure_of(running), TaskCancelledError)
    with pytest.raises(TypeError):
        actors[order].works.remote(5)


def test_a_sync_actor_and_tasks() -> None:
    threaded = decorated.Threaded.remote()
    assert ray.get(threaded.works.remote(), timeout=LONG) == 1
    for ref in (threaded.sync.remote(), decorated.task_inside.remote(), decorated.task_outside.remote()):  # type: ignore[attr-defined]
        assert read(failure_of(ref)).trust is Trust.STRUCTURED


# -- L2, L3


async def test_l2_unavailable_is_not_death() -> None:
    """A healthy actor that restarts is waited for, never replaced."""
    actor = Plain.options(max_restarts=1).remote()
    assert await actor.count.remote() == 1
    with pytest.raises(ray.exceptions.ActorUnavailableError) as caught:
        await asyncio.wait_for(_await(actor.exit.remote("sigkill")), LONG)
    fault = classify(caught.value)
    assert fault.kind is Kind.UNAVAILABLE
    assert decide(fault).action is Action.WAIT
    assert decide(fault, idempotent=False).action is Action.GIVE_UP, "it may have run"


async def test_l3_a_call_on_an_actor_killed_a_moment_ago_ends() -> None:
    actor = Plain.remote()
    await actor.count.remote()
    running = actor.sleep.remote(600.0)
    ray.kill(actor)
    after = [actor.count.remote() for _ in range(3)]
    for ref in (running, *after):
        with pytest.raises(ActorDiedError):
            await asyncio.wait_for(_await(ref), LONG)


async def _await(ref: Any) -> Any:
    return await ref


# -- what a person pastes says what the exception says


@pytest.fixture(scope="module")
def plain(ray_local: None) -> tuple[Any, Any]:
    return Plain.remote(), Plain.remote()


@pytest.mark.parametrize("name", ["http_400", "two_required", "aiohttp_503", "bad_leaf", "ordinary"])
@pytest.mark.parametrize("hops", [1, 2])
def test_a_pasted_traceback_means_the_same(plain: tuple[Any, Any], name: str, hops: int) -> None:
    outer, inner = plain
    exc = failure_of(inner.fail.remote(name) if hops == 1 else outer.through.remote(inner, "fail", name))
    fault, text = classify(exc), classify_text("".join(traceback.format_exception(exc)))
    assert (text.code, text.kind, text.status) == (fault.code, fault.kind, fault.status)


@pytest.mark.parametrize("how", ["sigkill", "init"])
def test_a_pasted_death_means_the_same(how: str) -> None:
    made = Plain.remote("ordinary") if how == "init" else Plain.remote()
    exc = failure_of(made.exit.remote(how))
    text = classify_text("".join(traceback.format_exception(exc)))
    assert text.code == classify(exc).code
