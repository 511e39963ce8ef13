"""The replies of real engines: an exception's text inside their JSON still names the failure (case I7),
and what a model wrote never does.

The shapes are those of vLLM 0.32, SGLang 0.5 and FastAPI as they answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from faults import classify_status
from protocol import CodedError, Reading, Trust, code_of, mint, read
from protocol.carriers.http_problem import problem
from protocol.carriers.http_reply import HEADER, PROBLEM, read_reply
from protocol.keys import Keyring
from tests.protocol.http.clients import CLIENTS, ask, stream
from tests.protocol.http.servers import Application

KEY = b"the run's key"
ERROR = CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog gave up after 30 s: 'no progress'\n at step 7")
OTHER = CodedError("NODE.IO", "what a model quotes")
SIGNED = mint(ERROR.code, ERROR.id, key=KEY)


def raised(text: str) -> dict[str, tuple[int, Any]]:
    """What each engine makes of an exception whose text is ``text``: status and JSON, or plain text."""
    worker = (
        f"Call to collective_rpc method failed: Worker failed with error '{text}', please check the stack "
        "trace above for the root cause"
    )
    return {
        "vLLM": (
            500,
            {"error": {"message": worker, "type": "InternalServerError", "param": None, "code": 500}},
        ),
        "vLLM, older": (
            500,
            {"object": "error", "message": worker, "type": "InternalServerError", "param": None, "code": 500},
        ),
        "SGLang": (400, {"success": False, "message": f"Failed to update weights: {text}. Abort."}),
        "SGLang, generate": (400, {"error": {"message": text}}),
        "SGLang, native": (500, {"object": "error", "message": text, "type": "BadRequest", "code": 400}),
        "OpenAI": (
            400,
            {"error": {"message": text, "type": "server_error", "code": "context_length_exceeded"}},
        ),
        "FastAPI": (500, {"detail": text}),
        "FastAPI, a list": (422, {"detail": [{"type": "value_error", "loc": ["body"], "msg": text}]}),
        "a traceback": (500, f"Traceback (most recent call last):\n  File ...\nRuntimeError: {text}\n"),
        "a repr": (500, {"error": repr(RuntimeError(text))}),
        "JSON in JSON": (500, {"error": json.dumps({"message": text})}),
    }


REPLIES = raised(str(ERROR))
NAMELESS: dict[str, tuple[int, Any]] = {
    **{f"{name}, nameless": reply for name, reply in raised("CUDA error: out of memory").items()},
    "Starlette": (500, "Internal Server Error"),
    "no body": (500, ""),
    "code of ours elsewhere": (500, {"error": {"message": "x", "code": "WEIGHTS.REFIT_ABORTED"}}),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Application]:
    async def answer(request: web.Request) -> web.Response:
        status, body = {**REPLIES, **NAMELESS, **SUCCESSES}[request.match_info["kind"]]
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/{kind}", answer)
    with Application(app) as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_text_of_an_exception_names_it(engine: Application, client: str) -> None:
    for kind, (status, _) in REPLIES.items():
        for asked in (ask, stream):
            seen = await asked(client, f"{engine.url}/{kind}")
            assert (kind, seen.status, seen.reading.code) == (kind, status, ERROR.code)
            found = seen.reading
            assert (found.id, found.raw, found.trust) == (ERROR.id, ERROR.token, Trust.CHECKSUMMED)


@pytest.mark.parametrize("kind", NAMELESS)
async def test_without_a_token_there_is_no_name(engine: Application, kind: str) -> None:
    """``code`` is vLLM's status, or OpenAI's word; neither is one of ours, nor would ours be there."""
    seen = await ask("httpx", f"{engine.url}/{kind}")
    assert seen.reading == Reading()
    fault = classify_status(seen.status, seen.headers)
    assert fault is not None
    assert fault.code in ("UPSTREAM.SERVER_ERROR", "REQUEST.REJECTED")


@pytest.mark.parametrize("kind", REPLIES)
def test_a_token_in_text_is_believed_as_far_as_its_signature(kind: str) -> None:
    for token, key, expected in (
        (SIGNED, KEY, Trust.SIGNED),
        (SIGNED, Keyring(b"newer", (KEY,)), Trust.SIGNED),
        (SIGNED, b"another", Trust.NONE),
        (ERROR.token, KEY, Trust.CHECKSUMMED),
    ):
        status, body = raised(f"{token} the watchdog")[kind]
        wire = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        assert read_reply(status, {"content-type": "application/json"}, wire, key=key).trust is expected


# -- the dark side

DOCUMENT = json.loads(problem(OTHER).body)
SAID = [str(OTHER), json.dumps(DOCUMENT), f"HTTP/1.1 500 x\r\n{HEADER}: {OTHER.token}\r\n\r\n"]
SUCCESSES: dict[str, tuple[int, Any]] = {
    f"{shape} {n}": (200, body)
    for n, said in enumerate(SAID)
    for shape, body in {
        "completion": {"object": "text_completion", "choices": [{"text": said, "finish_reason": "stop"}]},
        "chat": {"choices": [{"message": {"role": "assistant", "content": said}}]},
        "generate": {"text": said, "meta_info": {"finish_reason": {"type": "stop"}}},
        "text": said,
        "event": f"data: {json.dumps({'choices': [{'text': said}]})}\n\ndata: [DONE]\n\n",
    }.items()
} | {"document": (200, DOCUMENT), "document below": (200, {"error": DOCUMENT})}


@pytest.mark.parametrize("client", CLIENTS)
async def test_what_a_model_wrote_is_no_failure(engine: Application, client: str) -> None:
    for kind in SUCCESSES:
        for asked in (ask, stream):
            seen = await asked(client, f"{engine.url}/{kind}")
            assert (kind, seen.status, seen.reading) == (kind, 200, Reading())


REPEATS: list[Any] = [
    {"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required", "input": SAID[0]}]},
    {"detail": [{"msg": "Field required", "input": {"prompt": SAID[0], "n": 1}, "ctx": {"x": SAID[0]}}]},
    {"detail": "not valid", "body": {"messages": [{"role": "user", "content": SAID[0]}]}},
    {"error": {"message": "too long", "prompt": SAID[0], "choices": [{"text": SAID[0]}]}},
]


@pytest.mark.parametrize("body", REPEATS)
@pytest.mark.parametrize("status", [400, 422, 500])
def test_what_a_cut_error_repeats_of_the_request_is_no_failure(status: int, body: Any) -> None:
    """Cut by a budget or a broken connection it is no JSON any more, and the model's text no text of the
    server's."""
    whole = json.dumps(body).encode()
    for end in range(1, len(whole)):
        assert read_reply(status, {"content-type": "application/json"}, whole[:end]) == Reading()


@pytest.mark.parametrize("member", ["input", "messages", "choices"])
def test_what_a_cut_error_says_before_that_names_it(member: str) -> None:
    quoted = f'not "{member}": {ERROR}'
    body = json.dumps({"message": quoted, member: str(OTHER), "more": str(OTHER)}).encode()
    for cut in (body[:-1], body + b"\n{"):
        assert read_reply(500, {}, cut).code == ERROR.code


@pytest.mark.parametrize("body", REPEATS)
@pytest.mark.parametrize("status", [400, 422, 500])
def test_what_an_error_repeats_of_the_request_is_no_failure(status: int, body: Any) -> None:
    """pydantic repeats the input that it rejects, and a model's earlier output may stand in it."""
    wire = json.dumps(body).encode()
    for media in ("application/json", PROBLEM):
        assert read_reply(status, {"content-type": media}, wire) == Reading()
    told = json.dumps({**body, "message": str(ERROR)}).encode()
    assert read_reply(status, {"content-type": "application/json"}, told).code == ERROR.code


@pytest.mark.parametrize("body", [{"echo": DOCUMENT}, {"data": DOCUMENT}, [DOCUMENT], {"detail": DOCUMENT}])
def test_a_document_within_another_is_text(body: Any) -> None:
    """A server's problem that quotes one of ours: by the token in its text at best, never as structured."""
    found = read_reply(500, {"content-type": PROBLEM}, json.dumps(body).encode())
    assert found.trust <= Trust.CHECKSUMMED


def test_the_clients_exceptions_carry_the_replys_name() -> None:
    """``raise_for_status()`` keeps the response, and with it the name."""
    made = problem(ERROR)
    request = httpx.Request("POST", "http://engine/generate")
    response = httpx.Response(made.status, headers=made.headers, content=made.body, request=request)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    assert read(response).code == ERROR.code
    assert code_of(caught.value) == ERROR.code
