"""What may be carried: bounded, JSON-safe, without secrets, and prompts only up to their budget."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator
from typing import NoReturn

import httpx
import pytest

from protocol import CodedError, mint, safe, scan
from protocol.foreign import excerpt
from protocol.safe import (
    MAX_DETAIL,
    MAX_ITEMS,
    MAX_TEXT,
    PROMPT_BUDGET,
    cap,
    clean,
    json_safe,
    scrub,
    set_prompt_budget,
)
from tests.protocol.badly_written import HOSTILE


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
    "signature of Azure": "https://account/x?sv=1&sig=s3cr3t",
    "key of Google": "https://host/v1/models?key=s3cr3t&alt=json",
    "short password query": "https://host/?user=u&pwd=s3cr3t",
    "in a fragment": "https://host/#access_token=s3cr3t",
    "url in a url": "https://host/?next=https%3A%2F%2Fh%2F%3Ftoken%3Ds3cr3t",
    "token header": "X-Auth-Token: s3cr3t",
    "token header printed": "{'x-vault-token': 's3cr3t'}",
    "key header": "Ocp-Apim-Subscription-Key: s3cr3t",
    "option": "vllm serve m --api-key s3cr3t --port 1",
    "option printed": "Command '['python', '--hf-token', 's3cr3t']' returned 1",
    "quoted url": "'http://host/?token=s3cr3t'",
    "cookie": "Cookie: session=s3cr3t; other=s3cr3t\n",
    "cookie printed": "{'set-cookie': 'id=s3cr3t; Path=/'}",
    "raw cookie printed": "[(b'cookie', b'id=s3cr3t')]",
    "variable": "export HF_TOKEN=s3cr3ts3cr3t",
    "variable printed": "environ({'AWS_SECRET_ACCESS_KEY': 's3cr3ts3cr3t', 'HOME': '/'})",
    "variable as JSON": '{"WANDB_API_KEY": "s3cr3ts3cr3t"}',
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
        "KEYBOARD: qwertyuiop",
        "cookies are allowed",
        "TOKENS_PER_SECOND=12345",
        "http://host/?sort_key=name&sign=minus&author=me",
        "required: --api-key --token --max-token-length 5 --tokenizer gpt2",
        "x-request-id: 5, x-tokens: 12",
        "the KEY is to wait",
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
        "auth": ("user", "x"),
        "private_key": "x",
        "passphrase": "x",
        "aws_access_key_id": "x",
    }
    made = CodedError("TASK.FAILED", data=data).data
    assert made["headers"].pop("accept") == "*/*"
    assert set(made.pop("headers").values()) == {"[redacted]"}
    assert made.pop("max_tokens") == 5
    assert set(made.values()) == {"[redacted]"}


def test_secrets_are_redacted_where_their_name_stands_beside_them() -> None:
    """As HAR has headers, Kubernetes the environment, and a command line its options."""
    data = {
        "env": [{"name": "HF_TOKEN", "value": "x"}, {"name": "HOME", "value": "/root"}],
        "headers": [{"value": "x", "name": "Authorization"}],
        "argv": ["vllm", "serve", "--api-key", "x", "--max-tokens", "5"],
    }
    made = CodedError("TASK.FAILED", data=data).data
    assert made["env"] == [{"name": "HF_TOKEN", "value": "[redacted]"}, {"name": "HOME", "value": "/root"}]
    assert made["headers"] == [{"value": "[redacted]", "name": "Authorization"}]
    assert made["argv"] == ["vllm", "serve", "--api-key", "[redacted]", "--max-tokens", "5"]


def test_secrets_are_redacted_in_pairs() -> None:
    """As ASGI, http.client and ``list(headers.items())`` have headers."""
    pairs = [("Cookie", "session=x"), ["x-api-key", "sk-x"], ("accept", "*/*"), ("authorization", "Token x")]
    made = CodedError("TASK.FAILED", data={"headers": pairs, "said": ["no token", "was given"]}).data
    assert made["headers"] == [
        ["Cookie", "[redacted]"],
        ["x-api-key", "[redacted]"],
        ["accept", "*/*"],
        ["authorization", "[redacted]"],
    ]
    assert made["said"] == ["no token", "was given"]


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


def test_the_values_of_the_environments_secrets_are_found_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEAM_API_KEY", "qwertz-12345")
    monkeypatch.setenv("SHORT_KEY", "is")
    monkeypatch.setattr(safe, "_secrets", (float("-inf"), ()))
    error = CodedError("TASK.FAILED", "sent qwertz-12345 to it", {"command": ["run", "--key=qwertz-12345"]})
    assert error.detail == "sent [redacted] to it"
    assert "qwertz" not in str(error.data)
    assert clean("this is all") == "this is all", "a value that short is an ordinary word"
    monkeypatch.setattr(safe, "_secrets", (float("-inf"), ()))


def test_an_environment_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may remove a variable between its name and its value."""

    class Changing(UserDict[str, str]):  # a MutableMapping, as os.environ is
        def __iter__(self) -> Iterator[str]:
            names = list(self.data)
            self.data.pop("GONE_KEY", None)
            return iter(names)

    monkeypatch.setattr(os, "environ", Changing(GONE_KEY="qwertz-12345", TEAM_KEY="asdfgh-12345"))
    monkeypatch.setattr(safe, "_secrets", (float("-inf"), ()))
    assert CodedError("TASK.FAILED", "sent asdfgh-12345 to it").detail == "sent [redacted] to it"
    monkeypatch.setattr(safe, "_secrets", (float("-inf"), ()))


# -- the prompt budget ---------------------------------------------------------------------------------


@pytest.fixture
def budget() -> Iterator[None]:
    yield
    set_prompt_budget(MAX_TEXT)


PROMPT = "Ada was born in " + "x" * 400 + " the end"


@pytest.mark.parametrize("key", ["prompt", "prompts", "messages", "text", "input_ids", "completion", "body"])
def test_a_budget_of_zero_carries_no_prompt(budget: None, key: str) -> None:
    data = {key: PROMPT, "deep": {key: [{"role": "user", "content": PROMPT}]}, "n": 4}
    assert "Ada" in str(CodedError("TASK.FAILED", data=data).data)
    set_prompt_budget(0)
    made = CodedError("TASK.FAILED", f"HTTP 400: {excerpt(PROMPT)}", data)
    whole = f"{made} {made.data}"
    assert "Ada" not in whole
    assert "xx" not in whole
    assert f"[{len(PROMPT)} characters left out]" in made.detail
    assert made.data["n"] == 4


def test_a_budget_cuts_and_keeps_both_ends(budget: None) -> None:
    set_prompt_budget(100)
    text = CodedError("TASK.FAILED", data={"prompt": PROMPT}).data["prompt"]
    assert len(text) <= 100
    assert text.startswith("Ada")
    assert text.endswith("the end")
    assert CodedError("TASK.FAILED", data={"prompt": "short", "text": 5}).data == {
        "prompt": "short",
        "text": 5,
    }


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="0 characters or more, not -1"):
        set_prompt_budget(-1)


@pytest.mark.parametrize(("value", "kept"), [("", True), ("0", False), ("100000", True), ("plenty", False)])
def test_the_budget_of_the_environment(value: str, kept: bool) -> None:
    script = "from protocol import CodedError; print(CodedError('TASK.FAILED', data={'prompt': 'Ada'}).data)"
    environment = {PROMPT_BUDGET: value}
    told = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert ("Ada" in told) is kept


# -- foreign text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["str", "bytes"])
def test_an_excerpt_has_no_token_no_secret_and_an_end(kind: str) -> None:
    text = f"Authorization: Bearer s3cr3t-s3cr3t {mint('TRANSPORT.CONNECT')} \ud83d\ude00" + "y" * 100_000
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    made = excerpt(text.encode() if kind == "bytes" else text, 300)
    assert len(made) <= 300
    assert scan(made) == []
    assert "s3cr3t" not in made
    assert "TRANSPORT" in made


def test_an_excerpt_of_bytes_that_are_no_text() -> None:
    assert excerpt(b"\xff\xfe\x00ok", 100) == "\ufffd\ufffd\x00ok"
