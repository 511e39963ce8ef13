"""Bad input is one clear CodedError, before anything is sent."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.posting import PosterPool
from dispatch.posting.request import MAX_ID, check_deadline, check_headers, check_id, check_url, encode
from protocol import CodedError

Loop: list[Any] = []
Loop.append(Loop)


def code_from(function: Any, *args: Any) -> str:
    with pytest.raises(CodedError) as caught:
        function(*args)
    assert caught.value.detail
    return str(caught.value.code)


@pytest.mark.parametrize(
    "url",
    [
        "", "engine:8000/generate", "//host/path", "/generate", "ftp://host/", "file:///etc/passwd", "http://",
        "http:///path", "http://:80/", "http://host:port/", "http://host:99999/",
        "http://host:-1/", "http://[::1/", "http://host/\ud800",
        None, 5, b"http://host/", ["http://host/"],
    ],
)  # fmt: skip
def test_url_that_cannot_be_posted_to(url: Any) -> None:
    assert code_from(check_url, url) == "REQUEST.INVALID"


@pytest.mark.parametrize(
    "url",
    ["http://h", "https://h:8000/generate?x=1", "http://[::1]:30000/v1", "HTTP://H/", "http://127.0.0.1:1/"],
)
def test_good_url(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize(
    "payload",
    [
        b"{}", bytearray(b"{}"), memoryview(b"{}"), {"a": b"x"}, {1, 2}, {"a": {1}}, object(),
        {"a": object()},
        math.nan, {"a": [math.inf]}, {"a": -math.inf}, "\ud800", {"a": "x\udfff"}, {"\ud800": 1}, 1j,
        {(1, 2): 3}, Loop,
    ],
    ids=repr,
)  # fmt: skip
def test_payload_that_json_cannot_hold(payload: Any) -> None:
    assert code_from(encode, payload) == "REQUEST.INVALID"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(json_values)
def test_what_json_can_hold_arrives_unchanged(value: Any) -> None:
    assert json.loads(encode(value)) == value


@pytest.mark.parametrize(
    "headers",
    [
        {"a": "b\nc"}, {"a": "b\rc"}, {"a\n": "b"}, {"a": "b\0"}, {"a": "é"}, {"é": "b"}, {"a": 1}, {1: "a"},
        {"a": None}, {"": "b"}, {"a b": "c"}, {"a:": "c"}, "text", [("a", "b")], 5,
    ],
    ids=repr,
)  # fmt: skip
def test_headers_that_cannot_be_sent(headers: Any) -> None:
    assert code_from(check_headers, headers) == "REQUEST.INVALID"


def test_headers_that_can_be_sent() -> None:
    assert check_headers(None) == {}
    assert check_headers({"authorization": "Bearer x", "x-n": ""}) == {"authorization": "Bearer x", "x-n": ""}


def test_header_names_are_the_same_in_any_case() -> None:
    assert check_headers({"Content-Type": "a"}) == {"content-type": "a"}


@pytest.mark.parametrize("deadline", [0, -1, -0.0, math.nan, math.inf, -math.inf, "5", None, True, 10**400])
def test_deadline_that_is_none(deadline: Any) -> None:
    assert code_from(check_deadline, deadline) == "REQUEST.INVALID"


@pytest.mark.parametrize("request_id", ["", "x" * (MAX_ID + 1), "a\nb", "é", "\0", 5, b"id"])
def test_bad_request_id(request_id: Any) -> None:
    assert code_from(check_id, request_id) == "REQUEST.INVALID"


def test_good_request_id() -> None:
    assert check_id("x" * MAX_ID) == "x" * MAX_ID
    assert check_id("sample 7/3") == "sample 7/3"
    assert check_id(None) != check_id(None)


@pytest.mark.parametrize("name", ["concurrency", "posters_per_node", "max_attempts"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "4", None])
def test_settings_that_are_no_count(name: str, value: Any) -> None:
    assert code_from(lambda: PosterPool(**{name: value})) == "CONFIG.INVALID"


@pytest.mark.parametrize("value", [0, math.nan, "x"])
def test_default_deadline_is_checked_when_the_pool_is_made(value: Any) -> None:
    assert code_from(lambda: PosterPool(deadline=value)) == "REQUEST.INVALID"
