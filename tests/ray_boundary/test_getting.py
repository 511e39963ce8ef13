"""The caller's ways to get a result: whichever it takes, the failure is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
import ray

from faults import classify
from protocol import CodedError, Trust, read
from tests.ray_boundary.far_side import LONG, FarSide
from tests.ray_boundary.near_side import failure_of, meaning_of, name_read
from tests.ray_boundary.shapes import ABORTED, DATA, ONE, Means

MEANS: Final = Means(ABORTED, "upstream", "unknown")


async def _get(ref: Any) -> None:
    await asyncio.to_thread(ray.get, ref, timeout=LONG)


async def _get_list(ref: Any) -> None:
    await asyncio.to_thread(ray.get, [ray.put(1), ref, ray.put(2)], timeout=LONG)


async def _await(ref: Any) -> None:
    await ref


async def _wait_then_get(ref: Any) -> None:
    ready, waiting = await asyncio.to_thread(ray.wait, [ref], timeout=LONG)
    assert (ready, waiting) == ([ref], []), "a failure is an answer"
    ray.get(ready[0], timeout=0)


async def _future(ref: Any) -> None:
    await asyncio.to_thread(ref.future().result, LONG)


async def _wait_for(ref: Any) -> None:
    await asyncio.wait_for(_await(ref), LONG)


async def _gather(ref: Any) -> None:
    await asyncio.gather(_await(ref), asyncio.sleep(0))


async def _gather_exceptions(ref: Any) -> None:
    results = await asyncio.gather(ref, asyncio.sleep(0), return_exceptions=True)
    assert results[1] is None
    assert isinstance(results[0], BaseException)
    raise results[0]


async def _as_completed(ref: Any) -> None:
    for done in asyncio.as_completed([_await(ref)]):
        await done


async def _task_group(ref: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_await(ref))
        group.create_task(asyncio.sleep(LONG))


async def _task_group_in_a_task_group(ref: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_task_group(ref))


WAYS: Final[dict[str, Callable[[Any], Awaitable[None]]]] = {
    "ray.get": _get,
    "ray.get of a list": _get_list,
    "await": _await,
    "ray.wait, then ray.get": _wait_then_get,
    "a concurrent future": _future,
    "asyncio.wait_for": _wait_for,
    "asyncio.gather": _gather,
    "asyncio.gather, exceptions returned": _gather_exceptions,
    "asyncio.as_completed": _as_completed,
    "a TaskGroup": _task_group,
    "a TaskGroup in a TaskGroup": _task_group_in_a_task_group,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", ["coded error", "foreign from a coded error"])
async def test_the_same_failure_by_every_way(far_sides: dict[str, FarSide], way: str, shape: str) -> None:
    exc = await failure_of(WAYS[way](far_sides["coded"].asynchronous.run.remote(shape)))
    assert name_read(exc) == (ABORTED, Trust.STRUCTURED)
    assert meaning_of(exc) == MEANS
    assert read(exc).id == classify(exc).id == ONE
    assert read(exc).data == (DATA if shape == "coded error" else {})
    assert isinstance(exc, CodedError) is ("TaskGroup" not in way)


@pytest.mark.parametrize("way", WAYS)
async def test_a_guess_is_the_same_guess_by_every_way(far_sides: dict[str, FarSide], way: str) -> None:
    exc = await failure_of(WAYS[way](far_sides["plain"].sync.run.remote("keyword-only arguments")))
    assert name_read(exc) is None
    assert meaning_of(exc) == ("BACKPRESSURE.OVERLOADED", "upstream", "not_run", Trust.HEURISTIC)


async def test_two_failures_in_a_task_group_mean_the_stricter(far_sides: dict[str, FarSide]) -> None:
    far = far_sides["coded"]
    refs = [far.sync.run.remote("coded error"), far.asynchronous.run.remote("ordinary")]
    await asyncio.to_thread(ray.wait, refs, num_returns=2, timeout=LONG)
    results = await asyncio.gather(*refs, return_exceptions=True)
    group = BaseExceptionGroup("both", [one for one in results if isinstance(one, BaseException)])
    assert len(group.exceptions) == 2
    assert read(group).code == "TASK.FAILED"
    assert meaning_of(group)[0] == "TASK.FAILED"
    assert classify(group).outcome == "unknown", "it is known of neither alone"


async def test_getting_it_twice_gives_it_twice(far_sides: dict[str, FarSide]) -> None:
    ref = far_sides["coded"].sync.run.remote("ordinary")
    first, second = await failure_of(ref), await failure_of(_get(ref))
    assert read(first) == read(second)
    assert read(first).id
