"""Bad input is one clear CodedError, before anything is sent."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import subprocess
import sys
import uuid
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting import PosterPool
from dispatch.posting.request import (
    KNOWN_URLS,
    MAX_ID,
    MAX_WALK,
    check_deadline,
    check_headers,
    check_id,
    check_url,
    encode,
)
from protocol import CodedError
from tests.support.witness import ROOT

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


# ---- the fast encoder against the standard library's


class Plain(enum.Enum):
    TEXT, NUMBER, NOTHING, NAN, BYTES = "x", 7, None, math.nan, b"x"
    LIST = [1, "a"]  # noqa: RUF012 - a member's value, not a class's


class Whole(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    ONE = "one"


class Text(str):
    __slots__ = ()


class Real(float):
    """As numpy.float64 is: a float's subclass that the standard library takes."""


class Array:
    """As numpy's arrays and scalars are: no container, no number, but a buffer and `tolist`."""

    dtype = "float32"

    def tolist(self) -> list[float]:
        return [1.0]

    def __float__(self) -> float:
        return 1.0

    def __index__(self) -> int:
        return 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Point:
    x: int = 1


def arrays() -> list[Any]:
    """numpy's own where it is installed, for it is what callers get wrong; else what resembles it."""
    try:
        import numpy  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return [Array(), Real(1.5), Real("nan")]
    return [numpy.zeros(2), numpy.float32(1), numpy.float64(1), numpy.float64("nan"), numpy.int64(1)]


HUGE = 10**5000  # it has no text, not even for hypothesis to tell of
NO_TIME = datetime.datetime(2026, 1, 2, 3, 4, 5)
STRANGE: list[Any] = [
    b"x", bytearray(b"x"), set(), {1, 2}, frozenset(), 1j, object(), ..., range(3), print, int,
    math.nan, math.inf, -math.inf, -0.0, 1e400, 5e-324, 1.7976931348623157e308,
    2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**400,
    "\ud800", "x\udfff", "\ud83d\ude00", "\0\x1f\x7f\u2028\uffff", "null", "nan",
    NO_TIME, NO_TIME.date(), NO_TIME.time(), datetime.timedelta(1), decimal.Decimal("1.5"), uuid.UUID(int=5),
    Point(), Pair(1, None), Text("t"), Text("\ud800"), Whole.ONE, Word.ONE, *Plain, (), (1, (2,)),
    collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.deque([1]),
    *arrays(),
]  # fmt: skip
KEYS = [
    "a", "null", "\ud800", "é", "", 1, 0, -1, 2**70, True, False, None, 1.5, -0.0, math.nan,
    math.inf, b"a", (1, 2), Text("k"), Whole.ONE, Word.ONE, Plain.TEXT, uuid.UUID(int=5), NO_TIME, Real(2.5),
    frozenset(),
]  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(STRANGE),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.text() | st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


def strictly(payload: Any) -> bytes:
    """The standard library's verdict, and the two types that are sent beyond it."""

    def also(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        if type(value) is uuid.UUID:
            return str(value)
        raise TypeError(type(value))

    text = json.dumps(payload, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=also)
    return text.encode()


def agree(payload: Any) -> None:
    try:
        expected = strictly(payload)
    except (TypeError, ValueError, RecursionError):
        with pytest.raises(CodedError, match=r"REQUEST\.INVALID") as caught:
            encode(payload)
        assert len(caught.value.detail) < 3000
        return
    if isinstance(payload, bytes | bytearray):
        return
    assert repr(json.loads(encode(payload))) == repr(json.loads(expected))  # as text, for -0.0 and 1 == True


@given(anything)
@settings(max_examples=400)
def test_the_fast_encoder_agrees_with_the_standard_library(payload: Any) -> None:
    agree(payload)


@pytest.mark.parametrize("value", [*STRANGE, HUGE], ids=lambda value: type(value).__name__)
def test_every_strange_value_is_judged_alike_wherever_it_stands(value: Any) -> None:
    for payload in (
        value,
        [value],
        {"a": value},
        {"a": None, "b": [value]},
        {"a": value, 1: 2},
        (value, None),
    ):
        agree(payload)


@pytest.mark.parametrize("key", [*KEYS, HUGE], ids=lambda key: type(key).__name__)
def test_every_strange_key_is_judged_alike_wherever_it_stands(key: Any) -> None:
    for payload in ({key: 1}, [{"a": None, key: None}], {"a": {key: math.nan}}, {key: {key: 1}}):
        agree(payload)


@pytest.mark.parametrize("depth", [1, 100, 253, 254, 255, 256, 400, 900, 5000, 100_000])
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_depth_is_judged_alike(kind: str, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    agree(value)
    while not isinstance(value, int):  # taken apart from outside: deallocation recurses as well
        value = value[0] if kind == "list" else value["a"]


def test_a_nan_among_nones_is_seen() -> None:
    payload = {"a": None, "b": [None] * 100, "c": {"d": None}}
    assert json.loads(encode(payload)) == payload
    payload["b"] = [*[None] * 99, math.nan]
    assert code_from(encode, payload) == "REQUEST.INVALID"


def test_text_that_reads_null_is_text() -> None:
    assert encode({"null": "null", "a": [None, 1.5]}) == b'{"null":"null","a":[null,1.5]}'


def test_common_payloads_take_the_fast_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("the slow encoder was used")

    monkeypatch.setattr(json, "dumps", refuse)
    payload = {
        "input_ids": list(range(100)),
        "stop": None,
        "sampling_params": {"temperature": 1.0, "n": 2**63},
    }
    assert orjson.loads(encode(payload)) == payload


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"sampling_params": {"temperature": math.nan}}, "payload.sampling_params.temperature is nan"),
        ({"a": [0, math.inf]}, "payload.a[1] is inf"),
        ({"a": [0, {"b c": -math.inf}]}, "payload.a[1]['b c'] is -inf"),
        ({"text": "ab\udc00"}, "payload.text holds half a surrogate pair (character 2)"),
        ({"a": None, "x": {1, 2}}, "payload.x is of type set"),
        ({"x": [Plain.NAN]}, "payload.x[0] is nan"),
        ({"x": NO_TIME}, "payload.x is of type datetime"),
        ({"x": Point()}, "payload.x is of type Point"),
        ({"x": {(1, 2): 3}}, "payload.x has a key that is of type tuple"),
        ({"x": {"\ud800": 3}}, "payload.x has a key that holds half a surrogate pair"),
        ({"x": {math.nan: 3}}, "payload.x has a key that is nan"),
        ({5: [{None: b"x"}]}, "payload[5][0][None] is of type bytes"),
        ({"seed": 10**5000}, "payload.seed is an integer of more than 4300 digits"),
        (Loop, "payload[0] holds itself"),
        (math.nan, "payload is nan"),
        ([1, (2, {"k" * 200: 1j})], f"payload[1][1]['{'k' * 64}'] is of type complex"),
    ],
)
def test_a_refusal_says_what_is_wrong_where(payload: Any, said: str) -> None:
    with pytest.raises(CodedError) as caught:
        encode(payload)
    assert caught.value.detail.startswith("the payload is not JSON: ")
    assert said in caught.value.detail


def test_a_refusal_tells_no_values() -> None:
    secret = "a prompt that nobody else may read"
    for payload in (
        {"text": secret + "\ud800"},
        {"text": secret, "x": {secret}},
        {"x": Text(secret + "\udfff")},
    ):
        with pytest.raises(CodedError) as caught:
            encode(payload)
        assert secret not in caught.value.detail


def test_a_refusal_is_bounded() -> None:
    with pytest.raises(CodedError) as caught:  # beyond what is looked at: still refused, less said
        encode([[0] * (MAX_WALK + 10), math.nan])
    assert "Out of range float" in caught.value.detail
    deep: Any = {1}
    for _ in range(200):
        deep = {"k" * 60: deep}
    with pytest.raises(CodedError) as caught:
        encode(deep)
    assert "…185 more…" in caught.value.detail
    assert caught.value.detail.endswith("is of type set: JSON cannot hold that")
    assert len(caught.value.detail) < 2000


def test_a_value_that_stands_in_two_places_does_not_hold_itself() -> None:
    twice = [1]
    with pytest.raises(CodedError, match=r"payload\[2\] is nan"):
        encode([twice, twice, math.nan])


def test_good_urls_are_remembered_and_bad_ones_refused_each_time() -> None:
    for number in range(2 * KNOWN_URLS):
        assert check_url(f"http://h:1/{number}") == f"http://h:1/{number}"
    for _ in range(3):
        assert code_from(check_url, "ftp://h/") == "REQUEST.INVALID"


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


def test_fresh_ids_are_unlike_each_other_in_every_process_and_after_a_fork() -> None:
    assert all(len(check_id(None)) == 32 and check_id(None).isalnum() for _ in range(10))
    script = """
import importlib.util, os, sys
# By its path: the package around it imports Ray, whose threads a fork does not take along.
spec = importlib.util.spec_from_file_location("request", "dispatch/posting/request.py")
request = sys.modules["request"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(request)
def tell():
    ids = [request.check_id(None) for _ in range(100)]
    os.write(1, " ".join([*ids, ""]).encode())  # one write: they do not mix
tell()
for _ in range(3):
    if os.fork() == 0:
        if os.fork() == 0:
            tell()
            os._exit(0)
        os.wait()
        tell()
        os._exit(0)
for _ in range(3):
    os.wait()
tell()
"""
    command = [sys.executable, "-c", script]
    seen: list[str] = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
        seen += done.stdout.split()
    assert len(seen) == 2 * 800
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("name", ["concurrency", "posters_per_node", "max_attempts"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "4", None])
def test_settings_that_are_no_count(name: str, value: Any) -> None:
    assert code_from(lambda: PosterPool(**{name: value})) == "CONFIG.INVALID"


@pytest.mark.parametrize("value", [0, math.nan, "x"])
def test_default_deadline_is_checked_when_the_pool_is_made(value: Any) -> None:
    assert code_from(lambda: PosterPool(deadline=value)) == "REQUEST.INVALID"
