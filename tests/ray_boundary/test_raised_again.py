"""A failure of its callee that an actor in the middle raises again, as itself or under another."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from faults import classify
from protocol import CodedError, Trust, code_of, read
from tests.ray_boundary.far_side import FarSide
from tests.ray_boundary.near_side import failure_of, meaning_of, name_read
from tests.ray_boundary.shapes import ABORTED, ONE, Means
from tests.ray_boundary.values import CodedMiddle, Middle, get, start_holder

INNER = Means(ABORTED, "upstream", "unknown")
FAILED = Means("TASK.FAILED", "callee", "ran")


@pytest.fixture(scope="module")
def middles(ray_local: None) -> dict[str, Any]:
    return {
        "plain": ray.remote(num_cpus=0)(Middle).remote(),
        "coded": ray.remote(num_cpus=0)(CodedMiddle).remote(),
    }


@pytest.fixture
def below(far_sides: dict[str, FarSide]) -> Any:
    return far_sides["coded"].asynchronous


@pytest.mark.parametrize("kind", ["plain", "coded"])
async def test_raised_again_it_is_the_same(middles: dict[str, Any], below: Any, kind: str) -> None:
    exc = await failure_of(middles[kind].again.remote(below, "coded error"))
    assert name_read(exc) == (ABORTED, Trust.STRUCTURED)
    assert read(exc).id == ONE
    assert meaning_of(exc) == INNER


async def test_a_foreign_one_from_it_keeps_its_name_with_coded(middles: dict[str, Any], below: Any) -> None:
    exc: Any = await failure_of(middles["coded"].another.remote(below, "coded error"))
    assert name_read(exc) == (ABORTED, Trust.STRUCTURED)
    assert (read(exc).id, meaning_of(exc)) == (ONE, INNER)
    assert "the middle's own words" in exc.detail
    assert ABORTED in [link.code for link in exc.chain]


async def test_a_foreign_one_from_it_keeps_a_token_without_coded(middles: dict[str, Any], below: Any) -> None:
    """Ray drops the cause; its text still stands in the traceback."""
    exc = await failure_of(middles["plain"].another.remote(below, "coded error"))
    assert name_read(exc) == (ABORTED, Trust.CHECKSUMMED)
    assert read(exc).id == ONE
    assert meaning_of(exc) == INNER._replace(trust=Trust.CHECKSUMMED)


@pytest.mark.parametrize("kind", ["plain", "coded"])
async def test_a_coded_one_from_it_has_its_own_name(middles: dict[str, Any], below: Any, kind: str) -> None:
    exc = await failure_of(middles[kind].another_coded.remote(below, "coded error"))
    assert isinstance(exc, CodedError)
    assert name_read(exc) == ("ENGINE.EXITED", Trust.STRUCTURED)
    assert read(exc).id != ONE
    assert meaning_of(exc)[:3] == ("ENGINE.EXITED", "upstream", "unknown")
    assert [link.code for link in exc.chain][:1] == [ABORTED], "and what it came from"


@pytest.mark.parametrize("kind", ["plain", "coded"])
async def test_from_none_takes_the_name_away(middles: dict[str, Any], below: Any, kind: str) -> None:
    exc = await failure_of(middles[kind].from_none.remote(below, "coded error"))
    assert name_read(exc) == (("TASK.FAILED", Trust.STRUCTURED) if kind == "coded" else None)
    assert meaning_of(exc) == FAILED


@pytest.mark.parametrize("kind", ["plain", "coded"])
async def test_a_failure_returned_as_a_value_keeps_its_name(
    middles: dict[str, Any], below: Any, kind: str
) -> None:
    """Ray raises what is a RayTaskError, value or not."""
    exc = await failure_of(middles[kind].returned.remote(below, "coded error"))
    assert (code_of(exc), read(exc).id) == (ABORTED, ONE)
    assert meaning_of(exc) == INNER


async def test_a_failure_passed_on_as_an_argument_keeps_its_name(below: Any, ray_local: None) -> None:
    caught = await failure_of(below.run.remote("coded error"))
    holder = start_holder()
    exc = await failure_of(holder.keep.remote(caught))
    assert (code_of(exc), read(exc).id) == (ABORTED, ONE)
    get(holder.keep.remote([caught]))  # inside of something else it is a value
    given = get(holder.give.remote())[0]
    assert (read(given).id, classify(given).id) == (ONE, ONE)
