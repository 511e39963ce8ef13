"""CodedError: equal after every round trip, bounded, and without secrets."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import httpx
import pytest
from ray import cloudpickle

from protocol import CodedError, Trust, code_of, mint, read, scan
from protocol.errors import MAX_CHAIN, Link, Origin, walk
from protocol.safe import MAX_DETAIL, MAX_ITEMS, MAX_TEXT, cap, clean, json_safe, scrub
from tests.protocol.badly_written import (
    HOSTILE,
    KeywordOnly,
    RequiredArguments,
    cause_cycle,
    causes_itself,
    coded_errors,
    long_chain,
)

Again = Callable[[CodedError], CodedError]
ROUND_TRIPS: dict[str, Again] = {
    **{
        f"pickle {n}": (lambda e, n=n: pickle.loads(pickle.dumps(e, n)))  # type: ignore[misc]
        for n in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda e: pickle.loads(cloudpickle.dumps(e)),
}


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@pytest.mark.parametrize("error", coded_errors().values(), ids=coded_errors())
def test_equal_after_a_round_trip(error: CodedError, again: Again) -> None:
    back = error
    for _ in range(3):
        back = again(back)
    assert type(back) is type(error)
    assert back == error
    assert hash(back) == hash(error)
    assert (str(back), repr(back), back.args) == (str(error), repr(error), error.args)
    assert back.chain == error.chain
    assert back.origin == error.origin
    before, after = dict(vars(error)), dict(vars(back))
    before.pop("_chain"), after.pop("_chain")
    assert after == before
    assert getattr(back, "__notes__", None) == getattr(error, "__notes__", None)


def test_the_message_does_not_double() -> None:
    error = RequiredArguments("sglang", 30000)
    text = str(error)
    for _ in range(5):
        error = pickle.loads(pickle.dumps(error))
    assert str(error) == text
    assert text.count("sglang:30000") == 1
    assert text.count("FS1.") == 1


def test_a_local_class_goes_through_cloudpickle() -> None:
    class Local(CodedError):
        def __init__(self, *, a: int) -> None:
            super().__init__("TASK.FAILED", f"a={a}")
            self.a = a

    back = pickle.loads(cloudpickle.dumps(Local(a=3)))
    assert (back.a, back.code, back.detail) == (3, "TASK.FAILED", "a=3")


def test_a_round_trip_through_another_process() -> None:
    error = RequiredArguments("sglang", 30000)
    error.__cause__ = KeyError("why")
    script = (
        "import pickle, sys; e = pickle.load(sys.stdin.buffer); e.seen = True; "
        "sys.stdout.buffer.write(pickle.dumps(e))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(error), capture_output=True, check=True, timeout=50
    )
    back = pickle.loads(done.stdout)
    assert back == error
    assert back.seen
    assert back.origin.pid == os.getpid()
    assert back.chain == (Link("KeyError", "'why'"),)


def test_str_begins_with_a_token_that_reads_back() -> None:
    error = CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog")
    assert str(error) == f"{error.token} the watchdog"
    assert str(CodedError("TASK.FAILED")).count(" ") == 0
    found = scan(str(error))[0]
    assert (found.code, found.id) == (error.code, error.id)


def test_ids_are_kept_or_fresh() -> None:
    assert CodedError("TASK.FAILED", id="ABCDEFGH").id == "ABCDEFGH"
    assert CodedError("TASK.FAILED").id != CodedError("TASK.FAILED").id
    assert CodedError("TASK.FAILED") != CodedError("TASK.FAILED")
    assert CodedError("TASK.FAILED") != ValueError("x")


def test_a_malformed_code_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a code"):
        CodedError("nonsense")


def test_from_exception_keeps_type_text_and_causes() -> None:
    try:
        try:
            raise KeyError("below")
        except KeyError as below:
            raise KeywordOnly(status=503) from below
    except KeywordOnly as exc:
        made = CodedError.from_exception(exc, "UPSTREAM.SERVER_ERROR", data={"n": 1})
    name = f"{KeywordOnly.__module__}.KeywordOnly"
    assert made.detail == f"{name}: status 503"
    assert (made.origin.type, made.origin.text, made.origin.pid) == (name, "status 503", os.getpid())
    assert made.chain == (Link(name, "status 503"), Link("KeyError", "'below'"))
    assert made.data == {"n": 1}


def test_from_exception_makes_subclasses_too() -> None:
    class Mine(CodedError):
        pass

    assert type(Mine.from_exception(ValueError("x"), "TASK.FAILED", "said so")) is Mine


@pytest.mark.parametrize("cause", [causes_itself, cause_cycle])
def test_a_cycle_of_causes_ends(cause: Callable[[], Exception]) -> None:
    error = CodedError("TASK.FAILED")
    error.__cause__ = cause()
    assert 1 <= len(error.chain) <= 2
    assert pickle.loads(pickle.dumps(error)) == error


def test_ten_thousand_causes_are_capped() -> None:
    error = CodedError("TASK.FAILED")
    error.__cause__ = long_chain(10_000)
    assert [link.text for link in error.chain] == [f"level {n}" for n in range(9999, 9999 - MAX_CHAIN, -1)]
    assert pickle.loads(pickle.dumps(error)).chain == error.chain
    assert len(list(walk(error))) == 256


def test_the_chain_holds_codes_and_contexts() -> None:
    error = CodedError("TASK.FAILED")
    try:
        try:
            raise CodedError("NODE.IO", "disk")
        except CodedError:
            raise error  # noqa: B904 - the context is what this is about
    except CodedError:
        pass
    assert [(link.code, link.text) for link in error.chain] == [("NODE.IO", "disk")]
    assert code_of(error) == "TASK.FAILED"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_exception_can_be_named(name: str) -> None:
    exc = HOSTILE[name]
    made = CodedError.from_exception(exc, "TASK.FAILED")
    assert type(exc).__qualname__ in made.detail
    assert len(made.detail) <= MAX_DETAIL
    assert len(made.chain) <= MAX_CHAIN
    assert pickle.loads(pickle.dumps(made)) == made
    json.dumps([made.detail, made.data, made.origin.text]).encode()


def test_twenty_megabytes_are_capped_everywhere() -> None:
    big = "x" * 20_000_000
    made = CodedError.from_exception(ValueError(big), "TASK.FAILED", data={"big": big, "list": [big] * 1000})
    assert len(made.detail) <= MAX_DETAIL
    assert len(made.origin.text) <= MAX_TEXT
    assert len(pickle.dumps(made)) < 200_000
    assert "19997" in made.origin.text or "characters cut" in made.origin.text


def test_a_cut_text_says_how_much_is_gone_and_keeps_both_ends() -> None:
    for n in (9_000, 40_000, 20_000_000):
        text = clean("A" + "x" * n + "Z")
        assert len(text) <= MAX_DETAIL
        assert text[0] == "A"
        assert text[-1] == "Z"
        kept = text.count("x") + 2
        assert f"[{n + 2 - kept + text.count('ex')} characters cut]" in text
    assert cap("short") == "short"


SECRETS = {
    "bearer": "Authorization: Bearer s3cr3t-s3cr3t-s3cr3t",
    "basic": "authorization: basic czNjcjN0OnMzY3IzdA==s3cr3t",
    "scheme of its own": "Authorization: Token s3cr3tt",
    "api key header": "x-api-key: s3cr3t-key",
    "headers printed": "{'authorization': 's3cr3t-key', 'accept': '*/*'}",
    "raw headers printed": "[(b'x-api-key', b's3cr3t-key')]",
    "password": "http://user:s3cr3t@host:80/path",
    "password alone": "redis://:s3cr3t@host/0",
    "password with an @": "http://user:s3cr3t@s3cr3t@host/path",
    "token as user": "https://s3cr3t@host/repository.git",
    "query": "http://host/?a=1&access_token=s3cr3t&b=2",
    "api key query": "http://host/?api_key=s3cr3t",
    "signature": "https://bucket/x?X-Amz-Signature=s3cr3t",
    "quoted url": "'http://host/?token=s3cr3t'",
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_secrets_are_scrubbed_from_text(text: str) -> None:
    made = CodedError.from_exception(ValueError(f"before {text} after"), "TASK.FAILED")
    made.__cause__ = ValueError(text)
    whole = f"{made} {made!r} {made.origin} {made.chain} {pickle.dumps(made)!r}"
    assert "s3cr3t" not in whole.replace("s3cr3t-s3cr3t", "s3cr3t")
    assert "[redacted]" in made.detail
    assert made.detail.endswith("after")


@pytest.mark.parametrize(
    "text",
    [
        "http://host/path?max_tokens=5",
        "mail me@host",
        "a/b@c",
        "https://host/@user/x",
        "token: ended",
        "API keys",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrub(text) == text


def test_secrets_at_the_cut_are_cut_off_altogether() -> None:
    url = "http://user:s3cr3ts3cr3ts3cr3ts3cr3ts3cr3ts3cr3t@host/"
    for limit in (MAX_TEXT, MAX_DETAIL):
        half = (limit - 40) // 2
        for shift in range(0, len(url) + 1, 3):
            for size in (limit + 200, 4 * limit - 1, 4 * limit + 1, 12 * limit):
                fill = " " * (size - 2 * half)
                text = " " * (half - shift) + url + fill + url + " " * (half - shift)
                assert "cr3t" not in clean(text, limit), (limit, shift, size)
                assert len(clean(text, limit)) <= limit


def test_secrets_are_redacted_by_key() -> None:
    headers = {
        "Authorization": "Bearer x",
        "X-Api-Key": "x",
        "Cookie": "x",
        "Set-Cookie": "x",
        "proxy-authorization": "x",
        "accept": "*/*",
    }
    data = {
        "headers": headers,
        "password": "x",
        "db_passwd": "x",
        "hf_token": "x",
        "max_tokens": 5,
        "client_secret": 1,
    }
    made = CodedError("TASK.FAILED", data=data).data
    assert made["headers"].pop("accept") == "*/*"
    assert set(made.pop("headers").values()) == {"[redacted]"}
    assert made.pop("max_tokens") == 5
    assert set(made.values()) == {"[redacted]"}


def test_httpx_headers_are_data_without_secrets() -> None:
    made = CodedError("TASK.FAILED", data={"headers": httpx.Headers({"authorization": "Bearer x", "a": "b"})})
    assert made.data["headers"] == {"authorization": "[redacted]", "a": "b"}


def test_data_is_json_safe_whatever_it_was() -> None:
    loop: list[object] = []
    loop.append(loop)
    data = {
        "int": 2**70,
        "huge": 10**5000,
        "inf": float("-inf"),
        "bytes": b"abc",
        "set": {1},
        "tuple": (1, 2),
        "object": object,
        "hostile": HOSTILE["str raises"],
        "deep": {"a": {"b": {"c": {"d": {"e": 1}}}}},
        "loop": loop,
        "wide": list(range(1000)),
        5: "a key that is no text",
        "surrogate": "\ud800",
    }
    made = CodedError("TASK.FAILED", data=data)
    json.dumps(made.data, allow_nan=False).encode()
    assert made.data["bytes"] == "<3 bytes>"
    assert made.data["int"] == str(2**70)
    assert made.data["inf"] == "-inf"
    assert made.data["5"] == "a key that is no text"
    assert len(made.data["wide"]) == MAX_ITEMS + 1
    assert len(json_safe(dict.fromkeys(range(1000)))) == MAX_ITEMS + 1


def test_equality_asks_for_the_same_content() -> None:
    base = CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1))
    assert base == CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1))
    for other in (
        CodedError("TASK.WORKER_CRASHED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "e", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "d", {"a": 2}, id="ABCDEFGH", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGJ", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 2)),
    ):
        assert base != other


def test_foreign_text_in_the_detail_does_not_speak_for_the_error() -> None:
    error = CodedError("TASK.FAILED", f"the model wrote {mint('BACKPRESSURE.OVERLOADED')}")
    assert code_of(str(error)) == "TASK.FAILED"
    assert read(error).trust is Trust.STRUCTURED


def test_data_that_cannot_be_read_is_named_by_its_type() -> None:
    class Unreadable(dict[str, object]):
        def items(self) -> NoReturn:
            raise RuntimeError("no items")

    class Endless(list[object]):
        def __len__(self) -> int:
            raise RuntimeError("no length")

    made = CodedError("TASK.FAILED", data={"a": Unreadable(), "b": Endless(), "c": HOSTILE["class raises"]})
    assert made.data == {
        "a": "<Unreadable that cannot be read>",
        "b": "<Endless that cannot be read>",
        "c": "<ClassRaises that cannot be read>",
    }
