"""A CodedError as a value: an argument, a result, an object in the store. It is carried, not raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import ray

from protocol import CodedError
from tests.protocol.badly_written import coded_errors
from tests.ray_boundary.shapes import RefitAborted, aborted, worker_only
from tests.ray_boundary.values import echo, get, start_holder

ERRORS: Final = {**coded_errors(), "a subclass of these tests": RefitAborted(3, step=17)}


@pytest.fixture(scope="module")
def holder(ray_local: None) -> Any:
    return start_holder()


def _argument(holder: Any, error: CodedError) -> Any:
    assert get(holder.keep.remote(error)) == str(error), "its text, there"
    assert get(holder.is_equal.remote(error))
    return get(holder.give.remote())


WAYS: Final[dict[str, Callable[[Any, CodedError], Any]]] = {
    "argument of an actor": _argument,
    "argument and result of a task": lambda holder, error: get(echo.remote(error)),
    "ray.put": lambda holder, error: get(ray.put(error)),
    "a reference as an argument": lambda holder, error: get(echo.remote(ray.put(error))),
    "in a list in a mapping": lambda holder, error: get(echo.remote({"errors": [error]}))["errors"][0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ERRORS)
def test_it_arrives_equal_and_is_not_raised(holder: Any, way: str, name: str) -> None:
    error = ERRORS[name]
    arrived = WAYS[way](holder, error)
    assert arrived == error
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.id, arrived.token) == (str(error), error.id, error.token)
    extra = {k: v for k, v in vars(error).items() if not k.startswith("_") or k == "__notes__"}
    assert {k: v for k, v in vars(arrived).items() if k in extra} == extra


def test_one_whose_class_only_the_other_side_has(holder: Any) -> None:
    """Made by the worker, kept there, handed out twice: equal both times, of the nearest class known here."""

    @ray.remote(num_cpus=0)
    def make() -> CodedError:
        made: CodedError = worker_only("WatchdogAborted")(3, step=17)
        return made

    ref = make.remote()
    arrived = get(ref)
    assert type(arrived) is RefitAborted
    assert arrived == get(ref)
    assert get(holder.keep.remote(ref)) == str(arrived)


def test_what_arrived_as_a_value_is_raised_there_as_itself(holder: Any) -> None:
    error = aborted()
    get(holder.keep.remote(error))
    with pytest.raises(CodedError) as caught:
        get(holder.raise_kept.remote())
    assert caught.value == error
