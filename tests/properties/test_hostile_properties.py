"""Reading never fails: whatever an exception or a value does, `read`, `classify` and the rest answer, and
nothing foreign passes for ours.

What no reader in the same process can bound is a ``__str__`` that never returns (``while True: pass``): a
thread cannot be ended from outside. A deadline for that is the caller's, in another process. A
KeyboardInterrupt or SystemExit that comes out of a foreign ``__str__`` is passed on: it cannot be told
from the operator's own.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import strategies as st

from faults import classify
from faults.classify import classify_text
from faults.fault import Fault
from protocol import Code, CodedError, Reading, Trust, code_of, read
from protocol.safe import MAX_DETAIL
from tests.properties.examples import prop
from tests.properties.hostile import (
    CONTAINERS,
    OVERRUN,
    VALUES,
    Recipe,
    build,
    coded_recipes,
    panicking_recipes,
    panicking_values,
    recipes,
    values,
)
from tests.properties.strategies import PIECES

Answer = TypeVar("Answer")


def answered(call: Callable[..., Answer], *args: Any) -> Answer:
    """What ``call`` answers. What it raises is told anew, without the hostile values that pytest and
    Hypothesis would trip over when they print them."""
    __tracebackhide__ = True
    OVERRUN.clear()
    try:
        answer = call(*args)
        if not OVERRUN:
            return answer
        told = f"{call.__name__} {OVERRUN[0]}"
    except BaseException as exc:  # noqa: BLE001 - none of them may get out; the message keeps what it was
        frames = traceback.extract_tb(exc.__traceback__)[1:]
        where = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[:12])
        told = f"{call.__name__} raised {type(exc).__name__}: {where}"
    raise AssertionError(told)


def sound(fault: Fault) -> None:
    assert type(fault) is Fault
    assert (type(fault.code), type(fault.evidence), type(fault.id)) == (Code, str, str)
    assert type(fault.retry_after) in (float, NoneType)
    assert type(fault.status) in (int, NoneType)
    assert len(fault.evidence) <= MAX_DETAIL
    fault.evidence.encode()


def whole(found: Reading) -> None:
    assert type(found) is Reading
    assert type(found.code) in (Code, NoneType)
    assert (type(found.id), type(found.detail), type(found.raw)) == (str, str, str)
    assert type(found.data) is dict
    assert type(found.trust) is Trust


def reads(recipe: Recipe) -> None:
    exc = build(recipe)
    found = answered(read, exc)
    whole(found)
    assert answered(code_of, exc) == found.code
    if recipe.base != "CodedError":  # nothing here holds a token, and an attribute called code is foreign
        assert found == Reading()


def names(recipe: Recipe, where: str) -> None:
    exc = build(recipe)
    if where == "exception":
        error = answered(CodedError.from_exception, exc, "TASK.FAILED")
    elif where == "cause":
        error = CodedError("TASK.FAILED")
        error.__cause__ = exc
    elif where == "data":
        error = answered(CodedError, "TASK.FAILED", "", {"exc": exc, "list": [exc]})
    else:
        error = answered(CodedError, "TASK.FAILED", exc)
    assert answered(read, error).code == "TASK.FAILED"
    made, its_arguments = answered(error.__reduce__)
    assert error == made(*its_arguments)
    assert msgspec.json.encode([error.detail, error.data, error.origin, error.chain])


places = st.sampled_from(["exception", "cause", "data", "detail"])


@prop(recipes)
def test_classify_answers_whatever_it_is_given(recipe: Recipe) -> None:
    sound(answered(classify, build(recipe)))


@prop(recipes)
def test_read_answers_whatever_it_is_given(recipe: Recipe) -> None:
    reads(recipe)


@prop(recipes, places)
def test_a_coded_error_is_made_of_whatever_it_is_given(recipe: Recipe, where: str) -> None:
    names(recipe, where)


@prop(coded_recipes, places)
def test_a_badly_written_coded_error_is_read_all_the_same(recipe: Recipe, where: str) -> None:
    sound(answered(classify, build(recipe)))
    reads(recipe)
    names(recipe, where)


@prop(panicking_recipes, places)
def test_what_is_no_exception_does_not_get_out_either(recipe: Recipe, where: str) -> None:
    # pyo3's PanicException, for one: a Rust extension that panics inside a __str__ or a property.
    sound(answered(classify, build(recipe)))
    reads(recipe)
    names(recipe, where)


containers = st.sampled_from(sorted(CONTAINERS))


def reads_thing(outer: str, value: str, inner: str) -> None:
    thing = CONTAINERS[outer](CONTAINERS[inner](VALUES[value]()))
    found = answered(read, thing)
    whole(found)
    assert answered(code_of, thing) == found.code


@prop(containers, values, containers)
def test_read_answers_for_any_object(outer: str, value: str, inner: str) -> None:
    reads_thing(outer, value, inner)


@prop(containers, panicking_values, containers)
def test_read_answers_for_an_object_that_panics(outer: str, value: str, inner: str) -> None:
    reads_thing(outer, value, inner)


@prop(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=10)), max_size=12).map("".join))
def test_classify_text_answers_for_any_text(text: str) -> None:
    sound(classify_text(text))
    sound(classify_text(f"Traceback (most recent call last):\n{text}\nhttpx.ReadTimeout: {text}"))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("reader", [read, classify])
def test_what_may_be_the_operators_own_is_passed_on(kind: type[BaseException], reader: Any) -> None:
    def interrupted(self: object) -> str:
        raise kind

    with pytest.raises(kind):
        reader(type("Interrupted", (Exception,), {"__str__": interrupted})("x"))
