"""A code is well-formed or it is not a code, and it behaves as the text it is."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from protocol import Code, Family, mint
from protocol.codes import MAX_REASON
from protocol.token import MAX_TOKEN

GOOD = [
    "TASK.FAILED",
    "WEIGHTS.REFIT_ABORTED",
    "ENGINE.X",
    "NODE.A1",
    "UNKNOWN.A_B_C",
    f"TASK.{'A' * MAX_REASON}",
]
BAD = [
    "",
    ".",
    "TASK",
    "TASK.",
    ".FAILED",
    "task.failed",
    "TASK.failed",
    "TASK.FAILED ",
    " TASK.FAILED",
    "TASK.FAILED\n",
    "TASK.FAILED.AGAIN",
    "TASK._FAILED",
    "TASK.FAILED_",
    "TASK.1FAILED",
    "TASK.FAI-LED",
    "TASK.FÄILED",
    "TASK.FAILED١",
    f"TASK.{'A' * (MAX_REASON + 1)}",
]


@pytest.mark.parametrize("text", GOOD)
def test_a_well_formed_code_has_its_parts(text: str) -> None:
    code = Code(text)
    assert code == text
    assert f"{code.family}.{code.reason}" == text
    assert isinstance(code.family, Family)


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_code_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a code") as caught:
        Code(text)
    assert repr(text) in str(caught.value)


def test_an_unknown_family_is_refused_and_the_families_are_named() -> None:
    with pytest.raises(ValueError, match="there is no family 'GPU'") as caught:
        Code("GPU.ECC")
    for family in Family:
        assert family in str(caught.value)


@pytest.mark.parametrize("thing", [None, 5, b"TASK.FAILED", ["TASK.FAILED"]])
def test_what_is_not_text_is_refused(thing: object) -> None:
    with pytest.raises(ValueError, match="is not a code"):
        Code(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_code_pickles(protocol: int) -> None:
    code = Code("TASK.FAILED")
    back = pickle.loads(pickle.dumps(code, protocol))
    assert back == code
    assert type(back) is Code


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda c: pickle.loads(cloudpickle.dumps(c)), Code]
)
def test_a_code_copies(again: object) -> None:
    back = again(Code("TASK.FAILED"))  # type: ignore[operator]
    assert back == "TASK.FAILED"
    assert type(back) is Code


def test_a_code_is_a_dict_key_and_json_text() -> None:
    code = Code("TASK.FAILED")
    assert {code: 1}["TASK.FAILED"] == {"TASK.FAILED": 1}[code] == 1
    assert json.loads(json.dumps({code: [code]})) == {"TASK.FAILED": ["TASK.FAILED"]}
    assert hash(code) == hash("TASK.FAILED")


def test_how_a_code_prints() -> None:
    code = Code("TASK.FAILED")
    assert str(code) == f"{code}" == f"{code:s}" == "TASK.FAILED"
    assert type(str(code)) is str
    assert repr(code) == "Code('TASK.FAILED')"


def test_a_code_takes_no_attributes() -> None:
    with pytest.raises(AttributeError):
        Code("TASK.FAILED").note = "x"  # type: ignore[attr-defined]


def test_every_family_is_short_enough_for_the_longest_token() -> None:
    for family in Family:
        assert len(mint(f"{family}.{'A' * MAX_REASON}")) <= MAX_TOKEN


@given(st.text(max_size=60))
def test_any_text_is_a_code_or_a_value_error(text: str) -> None:
    try:
        code = Code(text)
    except ValueError:
        return
    assert str(code) == text
    assert text.isascii()
