"""What came through Ray goes on by something else: Ray's `RayTaskError(CodedError)` can be imported from
nowhere, so that only cloudpickle can send it."""

from __future__ import annotations

import pickle
import traceback

import pytest
import ray
from ray.exceptions import RayTaskError

from faults import Blame, classify
from protocol import CodedError, coded
from protocol.boundary import named
from protocol.errors import NESTED
from tests.protocol.badly_written import RequiredArguments

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def far_away(error: CodedError) -> None:
    raise error


def dual_of(error: CodedError) -> CodedError:
    with pytest.raises(CodedError) as caught:
        ray.get(ray.remote(num_cpus=0, max_retries=0)(far_away).remote(error), timeout=60)
    assert isinstance(caught.value, RayTaskError)
    return caught.value


@pytest.fixture(scope="module", params=["CodedError", "subclass", "local class"])
def error(request: pytest.FixtureRequest) -> CodedError:
    class Local(CodedError):
        pass

    caused = Local("ACTOR.DIED", "the engine's owner", {"node": "n1"})
    caused.__cause__ = ConnectionResetError("by peer")
    return {
        "CodedError": CodedError("ACTOR.DIED", "the engine's owner", {"node": "n1"}),
        "subclass": RequiredArguments("sglang", 30000),
        "local class": caused,
    }[request.param]


@pytest.fixture
def dual(ray_local: None, error: CodedError) -> CodedError:
    return dual_of(error)


def test_why(dual: CodedError) -> None:
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(dual)


@coded
def passed_on(error: CodedError) -> None:
    raise error


@coded
async def passed_on_later(error: CodedError) -> None:
    raise error


async def left(dual: CodedError, how: str) -> CodedError:
    """What comes of it at one of the boundaries."""
    if how == "named":
        return named(dual)
    try:
        if how == "coded":
            passed_on(dual)
        await passed_on_later(dual)
    except CodedError as gone_on:
        return gone_on
    raise AssertionError("it fails")


@pytest.mark.parametrize("how", ["named", "coded", "coded coroutine"])
async def test_it_can_be_pickled_and_is_the_same(error: CodedError, dual: CodedError, how: str) -> None:
    gone_on = await left(dual, how)
    assert type(gone_on) is type(error)
    assert gone_on.data == {**error.data, NESTED: True}
    for protocol in PROTOCOLS:
        back = pickle.loads(pickle.dumps(gone_on, protocol))
        assert type(back) is type(error)
        assert back == gone_on
        del back.data[NESTED]
        assert back == error
        assert str(back) == str(error)


@pytest.mark.parametrize("how", ["named", "coded", "coded coroutine"])
async def test_it_means_the_same_as_before(dual: CodedError, how: str) -> None:
    """What died is not whom we called: the retry must not replace that."""
    before = classify(dual)
    after = classify(pickle.loads(pickle.dumps(await left(dual, how))))
    for one in ("code", "kind", "blame", "outcome", "trust"):
        assert getattr(after, one) == getattr(before, one)
    assert before.code != "ACTOR.DIED" or before.blame is Blame.NESTED


async def test_its_far_traceback_is_still_printed(dual: CodedError) -> None:
    text = "".join(traceback.format_exception(await left(dual, "coded")))
    assert "in far_away" in text


async def test_a_long_one_is_kept_as_data(ray_local: None) -> None:
    """As everywhere: Ray could not carry the texts of a live chain of megabytes."""

    def fails() -> None:
        local_text = "x" * 200_000
        raise CodedError("TASK.FAILED", "long") from RuntimeError(local_text)

    with pytest.raises(CodedError) as caught:
        ray.get(ray.remote(num_cpus=0, max_retries=0)(fails).remote(), timeout=60)
    gone_on = await left(caught.value, "coded")
    assert gone_on.__cause__ is None
    assert [link.type for link in gone_on.chain] == ["RuntimeError"]


def test_one_whose_parts_somebody_replaced(dual: CodedError) -> None:
    vars(dual)["cause"].data = "no data"
    assert named(dual).code == dual.code
    vars(dual)["cause"] = None
    assert named(dual) is dual
