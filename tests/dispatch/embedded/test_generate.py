"""`POST /generate` and `POST /v1/completions`: shapes, sampling, streams, and every way to ask wrongly."""

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.dispatch.embedded.engine_under_test import EngineUnderTest

SUM = "Question: What is 3 plus 4? Answer:"


def events(engine: EngineUnderTest, path: str, body: dict[str, Any]) -> list[Any]:
    """A stream's events, decoded; the closing mark stays a string."""
    found: list[Any] = []
    with engine.client.stream("POST", engine.url + path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


def test_a_reply_has_sglangs_shape(engine: EngineUnderTest) -> None:
    reply = engine.generate(SUM, rid="shape-1", temperature=0, max_new_tokens=20).json()
    meta = reply["meta_info"]
    assert reply["text"] == " 3 plus 4 is 7."
    assert meta["id"] == "shape-1"
    assert meta["finish_reason"]["type"] == "stop"
    assert meta["completion_tokens"] == len(reply["output_ids"]) == 7
    assert meta["prompt_tokens"] == 10
    assert meta["weight_version"] == "default"
    assert 0 < meta["e2e_latency"] < 10


def test_the_length_limit_is_named(engine: EngineUnderTest) -> None:
    reply = engine.generate(SUM, temperature=0, max_new_tokens=2).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert reply["text"] == " 3 plus"


def test_ignore_eos_goes_on_to_the_length_limit(engine: EngineUnderTest) -> None:
    reply = engine.generate(SUM, temperature=0, max_new_tokens=30, ignore_eos=True).json()
    assert reply["meta_info"]["completion_tokens"] == 30
    assert reply["text"].startswith(" 3 plus 4 is 7.\n")


@pytest.mark.parametrize("stop", [" is", [" is"], ["never", " is"]])
def test_a_stop_string_ends_the_text_before_itself(engine: EngineUnderTest, stop: Any) -> None:
    reply = engine.generate(SUM, temperature=0, stop=stop).json()
    assert reply["text"] == " 3 plus 4"
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": " is"}


def test_the_same_seed_gives_the_same_text_and_others_do_not(engine: EngineUnderTest) -> None:
    def texts(**sampling: Any) -> set[str]:
        asked = {"max_new_tokens": 40, "ignore_eos": True, **sampling}
        return {engine.generate("The", **asked).json()["text"] for _ in range(5)}

    assert len(texts(seed=7)) == 1
    assert texts(seed=7) == texts(sampling_seed=7)
    assert len(texts(temperature=0)) == 1
    assert len(texts()) > 1
    assert texts(seed=7) != texts(seed=8)


def test_input_ids_mean_the_same_as_their_text(engine: EngineUnderTest) -> None:
    first = engine.generate("The", temperature=0, max_new_tokens=5).json()
    body = {"input_ids": first["output_ids"], "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    by_ids = engine.post("/generate", body).json()
    by_text = engine.generate(first["text"], temperature=0, max_new_tokens=5).json()
    assert by_ids["text"] == by_text["text"]
    assert by_ids["meta_info"]["prompt_tokens"] == 5


def test_unknown_and_unused_fields_are_ignored(engine: EngineUnderTest) -> None:
    body = {
        "text": "The",
        "return_logprob": True,
        "x": 1,
        "sampling_params": {"top_k": 3, "max_new_tokens": 1},
    }
    assert engine.post("/generate", body).status_code == 200


def test_the_id_is_the_header_then_the_rid_then_a_fresh_one(engine: EngineUnderTest) -> None:
    def answered(headers: dict[str, str], **body: Any) -> str:
        reply = engine.post("/generate", {"text": "The", **body}, headers=headers).json()
        return str(reply["meta_info"]["id"])

    assert answered({"X-Request-Id": "head"}, rid="body") == "head"
    assert answered({}, rid="body") == "body"
    assert answered({}) != answered({})


def test_a_stream_grows_and_ends_with_the_finish_and_the_mark(engine: EngineUnderTest) -> None:
    body = {"text": SUM, "sampling_params": {"temperature": 0}, "rid": "s"}
    *parts, done = events(engine, "/generate", body)
    assert done == "[DONE]"
    texts = [part["text"] for part in parts]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == " 3 plus 4 is 7."
    assert [part["meta_info"]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_a_completion_has_openais_shape(engine: EngineUnderTest) -> None:
    body = {"model": "any", "prompt": SUM, "temperature": 0, "max_tokens": 20, "stop": None, "n": 1}
    reply = engine.post("/v1/completions", body, headers={"X-Request-Id": "c-1"}).json()
    choice = reply["choices"][0]
    assert (reply["id"], reply["object"], reply["model"]) == ("c-1", "text_completion", "any")
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (" 3 plus 4 is 7.", "stop", 0)
    assert reply["usage"] == {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}


def test_a_completion_stops_at_sixteen_tokens_unless_told(engine: EngineUnderTest) -> None:
    reply = engine.post("/v1/completions", {"prompt": "The harbour", "temperature": 0}).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 16


def test_a_completion_stream_sends_deltas(engine: EngineUnderTest) -> None:
    body = {"prompt": SUM, "temperature": 0, "stop": [" 7"]}
    *parts, done = events(engine, "/v1/completions", body)
    assert done == "[DONE]"
    assert "".join(part["choices"][0]["text"] for part in parts) == " 3 plus 4 is"
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "stop"


def test_the_openai_client_seed_is_deterministic(engine: EngineUnderTest) -> None:
    body = {"prompt": "The", "seed": 3, "max_tokens": 40}
    texts = {engine.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 1


BAD_GENERATE: list[tuple[Any, str]] = [
    ({}, "exactly one"),
    ({"text": "a", "input_ids": [1]}, "exactly one"),
    ({"text": ["a", "b"]}, "one string"),
    ({"text": 5}, "text"),
    ({"input_ids": [[1]]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [10**9]}, "outside the vocabulary"),
    ({"input_ids": [-1]}, "outside the vocabulary"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"text": "a", "sampling_params": {"n": 2}}, "n must be 1"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "new tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens"),
    ({"text": "a", "sampling_params": {"temperature": -0.1}}, "temperature"),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p"),
    ({"text": "a", "sampling_params": {"stop": [1]}}, "stop"),
    ({"text": "a", "sampling_params": {"stop": ""}}, "stop"),
    ({"text": "a", "sampling_params": {"seed": 1.5}}, "seed"),
    ({"text": "word " * 3000}, "too long"),
    ([], "object"),
    (None, "object"),
]


@pytest.mark.parametrize(("body", "complaint"), BAD_GENERATE)
def test_a_bad_generate_body_is_a_400_that_says_why(
    engine: EngineUnderTest, body: Any, complaint: str
) -> None:
    response = engine.client.post(engine.url + "/generate", content=json.dumps(body))
    assert response.status_code == 400
    assert complaint in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "one string"),
        ({"prompt": [1, 2]}, "one string"),
        ({"prompt": "a", "n": 3}, "n must be 1"),
        ({"prompt": "a", "max_tokens": "x"}, "max_tokens"),
        ({"prompt": "word " * 3000}, "too long"),
    ],
)
def test_a_bad_completion_body_has_openais_error(engine: EngineUnderTest, body: Any, complaint: str) -> None:
    response = engine.post("/v1/completions", body)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400
    assert complaint in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("content", [b"", b"{", b"not json", b'{"text": "\xff"}', b"\x00"])
def test_what_is_not_json_is_a_400(engine: EngineUnderTest, path: str, content: bytes) -> None:
    response = engine.client.post(engine.url + path, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_an_oversized_body_is_a_413(engine: EngineUnderTest) -> None:
    response = engine.client.post(engine.url + "/generate", content=b'{"text": "' + b"a" * (2 << 20) + b'"}')
    assert response.status_code == 413
    assert "error" in response.json()


def test_unknown_paths_and_methods_have_json_errors(engine: EngineUnderTest) -> None:
    assert engine.get("/nowhere").status_code == 404
    assert engine.get("/nowhere").json()["error"]["message"] == "Not Found"
    wrong: httpx.Response = engine.get("/generate")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
