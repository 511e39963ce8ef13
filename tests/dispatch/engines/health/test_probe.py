"""What counts as an answer: a 200 is not enough (P5, L6)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from dispatch.engines import EngineSpec
from dispatch.engines.health import probe
from protocol import CodedError

SGLANG = EngineSpec(command=("x", "{port}"))
OPENAI = EngineSpec(command=("x", "{port}"), api="openai", model="tiny")
URL = "http://engine"


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def sglang(text: object, finish: object) -> dict[str, object]:
    return {"text": text, "meta_info": {"finish_reason": finish, "completion_tokens": 0}}


def openai(text: object, finish: object) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("spec", "body"),
    [
        (SGLANG, sglang("four", {"type": "length", "length": 4})),
        (SGLANG, sglang("four", "stop")),
        (SGLANG, {"text": "", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}),
        (OPENAI, openai("four", "length")),
        (OPENAI, {**openai("", "stop"), "usage": {"completion_tokens": 1}}),
    ],
)
async def test_a_sample(spec: EngineSpec, body: dict[str, object]) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=body)

    async with client(answer) as one:
        await probe.canary(one, spec, URL, 1)
    path, request = asked[0]
    if spec is SGLANG:
        assert path == "/generate"
        assert 1 <= request["sampling_params"]["max_new_tokens"] <= 4
    else:
        assert path == "/v1/completions"
        assert request["model"] == "tiny"
        assert 1 <= request["max_tokens"] <= 4


@pytest.mark.parametrize(
    ("spec", "status", "body", "why"),
    [
        (SGLANG, 200, sglang("fo", {"type": "abort", "message": "x"}), "finish_reason abort"),
        (OPENAI, 200, openai("fo", "abort"), "finish_reason abort"),
        (OPENAI, 200, openai("fo", None), "has no end"),
        (SGLANG, 200, sglang("", {"type": "stop"}), "empty sample"),
        (OPENAI, 200, openai("", "stop"), "empty sample"),
        (SGLANG, 200, sglang(None, {"type": "stop"}), "not with SGLang's"),
        (SGLANG, 200, {"error": {"message": "x"}}, "an error under HTTP 200"),
        (SGLANG, 200, [], "empty stream"),
        (OPENAI, 200, {"choices": []}, "has no end"),
        (OPENAI, 200, None, "not with JSON"),
        (SGLANG, 500, {"error": "broken"}, "answered 500"),
        (OPENAI, 404, {"error": "model"}, "answered 404"),
        (SGLANG, 302, {}, "answered 302"),
    ],
)
async def test_no_sample(spec: EngineSpec, status: int, body: object, why: str) -> None:
    async with client(lambda request: httpx.Response(status, json=body)) as one:
        with pytest.raises(CodedError) as caught:
            await probe.canary(one, spec, URL, 1)
    assert caught.value.code == "ENGINE.CANARY_FAILED"
    assert why in caught.value.detail


async def test_a_body_is_not_a_failure_of_ours() -> None:
    text = "FS1.WEIGHTS.REFIT_ABORTED.AAAAAAAA.BBBBBBBB"
    async with client(lambda request: httpx.Response(500, text=text)) as one:
        with pytest.raises(CodedError) as caught:
            await probe.health(one, URL, 1)
    assert caught.value.data["body"].startswith("FS1:")


Ask = Callable[[httpx.AsyncClient], Awaitable[object]]


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda one: probe.health(one, URL, 0.05), "ENGINE.UNHEALTHY"),
        (lambda one: probe.progress(one, SGLANG, URL, 0.05), "ENGINE.UNHEALTHY"),
        (lambda one: probe.progress(one, OPENAI, URL, 0.05), "ENGINE.UNHEALTHY"),
        (lambda one: probe.weight_version(one, SGLANG, URL, 0.05), "ENGINE.UNHEALTHY"),
        (lambda one: probe.canary(one, SGLANG, URL, 0.05), "ENGINE.CANARY_FAILED"),
    ],
)
@pytest.mark.parametrize(
    "error", [httpx.ReadTimeout, httpx.ConnectError, httpx.RemoteProtocolError, TimeoutError]
)
async def test_no_answer(ask: Ask, code: str, error: type[Exception]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error("no")

    async with client(answer) as one:
        with pytest.raises(CodedError) as caught:
            await ask(one)
    assert caught.value.code == code
    assert "http://engine/" in caught.value.detail


async def test_an_endless_reply_is_not_read() -> None:
    """Each check would take all the memory that comes in within its timeout."""
    sent = 0

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(64):
                sent += 1 << 20
                yield bytes(1 << 20)

    async with client(lambda request: httpx.Response(200, stream=Endless())) as one:
        with pytest.raises(CodedError, match="more than 16777216 bytes") as caught:
            await probe.health(one, URL, 20)
    assert caught.value.code == "ENGINE.UNHEALTHY"
    assert sent <= 2 * probe.MOST


@pytest.mark.parametrize(
    ("status", "body", "version"),
    [
        (200, {"weight_version": "v3"}, "v3"),
        (200, {"weight_version": 3}, "3"),
        (200, {"weight_version": None}, None),
        (200, {}, None),
        (404, {}, None),
    ],
)
async def test_weight_version(status: int, body: object, version: str | None) -> None:
    async with client(lambda request: httpx.Response(status, json=body)) as one:
        assert await probe.weight_version(one, SGLANG, URL, 1) == version
        assert await probe.weight_version(one, OPENAI, URL, 1) is None
