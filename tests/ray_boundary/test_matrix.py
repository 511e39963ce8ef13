"""Every shape of failure through every boundary of Ray, with `coded` at the raising side and without."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
from ray.exceptions import RayTaskError

from faults import classify
from protocol import CodedError, Trust, read
from tests.ray_boundary.far_side import FarSide
from tests.ray_boundary.near_side import failure_of, meaning_of, name_read
from tests.ray_boundary.shapes import ABORTED, ANOTHER, NO_DUAL, ONE, SHAPES, RefitAborted


async def _streamed(stream: Any, shape: str) -> None:
    arrived: list[int] = []
    try:
        async for ref in stream.options(num_returns="streaming").remote(shape):
            arrived.append(await ref)
    finally:
        assert arrived == [1, 2], "the items before the failure"


BOUNDARIES: Final[dict[str, Callable[[FarSide, str], Awaitable[Any]]]] = {
    "task": lambda far, shape: far.run.remote(shape),
    "sync actor": lambda far, shape: far.sync.run.remote(shape),
    "threaded actor": lambda far, shape: far.threaded.run.remote(shape),
    "async actor": lambda far, shape: far.asynchronous.run.remote(shape),
    "stream of a task": lambda far, shape: _streamed(far.stream, shape),
    "stream of a sync actor": lambda far, shape: _streamed(far.sync.stream, shape),
    "stream of an async actor": lambda far, shape: _streamed(far.asynchronous.stream, shape),
    "actor, actor, actor": lambda far, shape: far.middle.through.remote([far.sync, far.asynchronous], shape),
    "task, actor, task": lambda far, shape: far.by_actor.remote(far.sync, far.run, shape),
    "an argument of a task": lambda far, shape: far.takes.remote(far.run.remote(shape)),
    "an argument of an actor's method": lambda far, shape: far.sync.takes.remote(
        far.asynchronous.run.remote(shape)
    ),
}
# A second each, so only where the way differs.
HEAVY: Final = {"text of 20 MB": ("async actor", "stream of a task", "actor, actor, actor")}

CELLS: Final = [
    pytest.param(shape, boundary, id=f"{shape} - {boundary}")
    for shape in SHAPES
    for boundary in BOUNDARIES
    if boundary in HEAVY.get(shape, BOUNDARIES)
]


@pytest.mark.parametrize(("shape", "boundary"), CELLS)
async def test_coded_keeps_the_name(far_sides: dict[str, FarSide], shape: str, boundary: str) -> None:
    exc = await failure_of(BOUNDARIES[boundary](far_sides["coded"], shape))
    expected = SHAPES[shape]
    assert isinstance(exc, RayTaskError)
    assert shape == NO_DUAL or isinstance(exc, CodedError)
    found = read(exc)
    assert name_read(exc) == (expected.coded.code, Trust.STRUCTURED)
    assert meaning_of(exc) == expected.coded
    assert expected.detail in found.detail
    assert found.data.items() >= expected.data.items()
    assert classify(exc).id == found.id != ""
    if found.code == ABORTED:
        assert found.id == ONE, "the occurrence is the one that was raised"


@pytest.mark.parametrize(("shape", "boundary"), CELLS)
async def test_without_coded(far_sides: dict[str, FarSide], shape: str, boundary: str) -> None:
    """What a CodedError keeps by itself, and what is left of others in text."""
    exc = await failure_of(BOUNDARIES[boundary](far_sides["plain"], shape))
    expected = SHAPES[shape]
    assert name_read(exc) == expected.read
    assert meaning_of(exc) == expected.means
    found = read(exc)
    if found.code is not None:
        assert found.id == (ONE if found.code == ABORTED else ANOTHER)
    if found.trust is Trust.STRUCTURED and not isinstance(exc, BaseExceptionGroup):
        assert expected.detail in found.detail
        assert found.data == expected.data


async def test_what_the_caller_lacks_falls_to_the_nearest_base_that_it_has(
    far_sides: dict[str, FarSide],
) -> None:
    assert importlib.util.find_spec("worker_only") is None, "the caller must not be able to import it"
    exc: Any = await failure_of(far_sides["plain"].run.remote("coded subclass the caller lacks"))
    assert type(exc.cause) is RefitAborted
    assert (exc.cause.rank, exc.cause.step) == (3, 17)


async def test_notes_and_causes_are_carried(far_sides: dict[str, FarSide]) -> None:
    for far in far_sides.values():
        noted: Any = await failure_of(far.sync.run.remote("coded error with notes"))
        assert noted.cause.__notes__ == ["while loading shard 7"]
        caused: Any = await failure_of(far.sync.run.remote("coded error from a foreign one"))
        assert [link.text for link in caused.chain] == ["status 503"]
    named: Any = await failure_of(far_sides["coded"].sync.run.remote("ordinary with notes"))
    assert named.chain[0].notes == ("while loading shard 7",)
