"""Every fault kind, as a client sees it, and that a fault takes exactly the requests it was armed for."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.dispatch.embedded.conftest import StartEngine
from tests.dispatch.embedded.engine_under_test import EngineUnderTest

LONG = {"max_new_tokens": 60, "ignore_eos": True}


def stream(engine: EngineUnderTest, path: str = "/generate") -> list[str]:
    prompt = {"text": "The", "sampling_params": LONG} if path == "/generate" else {"prompt": "The"}
    response = engine.post(path, {**prompt, "stream": True})
    assert response.status_code == 200
    return [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]


def test_without_the_flag_there_are_no_faults(start_engine: StartEngine) -> None:
    engine = start_engine()
    assert engine.post("/faults", {"kind": "close"}).status_code == 404
    assert engine.get("/faults").status_code == 404
    assert engine.client.delete(engine.url + "/faults").status_code == 404


def test_a_status_with_its_headers_and_body(engine: EngineUnderTest) -> None:
    engine.faults("status", status=429, headers={"Retry-After": "7"}, body={"a": 1})
    response = engine.generate()
    assert (response.status_code, response.headers["retry-after"], response.json()) == (429, "7", {"a": 1})
    engine.faults("status", status=502, body="bad gateway")
    assert engine.generate().text == "bad gateway"
    engine.faults("status")
    assert engine.generate().json() == {"error": {"message": "fault: status 500"}}
    engine.faults("status")
    assert engine.post("/v1/completions", {"prompt": "a"}).json()["error"]["code"] == 500
    assert engine.generate().status_code == 200


def test_an_abort_nobody_asked_for(engine: EngineUnderTest) -> None:
    engine.faults("abort", times=3, after_tokens=2)
    reply = engine.post("/generate", {"text": "The", "sampling_params": LONG}).json()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) == 2
    assert reply["text"]
    *_, last, done = stream(engine)
    assert json.loads(last)["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "[DONE]"
    choice = engine.post("/v1/completions", {"prompt": "The"}).json()["choices"][0]
    assert choice["finish_reason"] == "abort"


def test_a_cut_body_breaks_off_in_the_middle(engine: EngineUnderTest) -> None:
    engine.faults("cut_body")
    with engine.client.stream("POST", engine.url + "/generate", json={"text": "The"}) as response:
        assert response.status_code == 200
        declared = int(response.headers["content-length"])
        got: list[bytes] = []
        with pytest.raises(httpx.RemoteProtocolError):
            got.extend(response.iter_raw())
    assert 0 < sum(map(len, got)) < declared


def test_bodies_that_are_no_answer(engine: EngineUnderTest) -> None:
    engine.faults("not_json")
    response = engine.generate()
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    with pytest.raises(ValueError, match="Unterminated"):
        response.json()
    engine.faults("wrong_shape")
    assert engine.generate().json() == {"result": []}
    engine.faults("wrong_shape", body=[1])
    assert engine.generate().json() == [1]
    engine.faults("html")
    page = engine.generate()
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    engine.faults("html", status=502)
    assert engine.generate().status_code == 502


def test_a_hung_request_is_answered_once_released(engine: EngineUnderTest, pool: ThreadPoolExecutor) -> None:
    engine.faults("hang", contains="harbour")
    asked = pool.submit(engine.generate, temperature=0)
    engine.wait_counts(in_flight=1)
    # Of another text: the first may be in flight and not have taken its fault yet.
    assert engine.generate("water").status_code == 200
    assert not asked.done()
    engine.clear_faults()
    assert asked.result(10).json()["text"].startswith(" wakes before")


def test_a_hung_request_goes_away_with_its_client(start_engine: StartEngine) -> None:
    engine = start_engine("--faults")
    engine.faults("hang", times=None)
    client = engine.open_request("/generate", {"text": "a"})
    engine.wait_counts(in_flight=1)
    client.close()
    assert engine.wait_counts(in_flight=0)["faulted"] == 1


def test_a_slow_body_comes_byte_by_byte(engine: EngineUnderTest) -> None:
    engine.faults("slow", interval=0.0005)
    with engine.client.stream("POST", engine.url + "/generate", json={"text": "The"}) as response:
        parts = list(response.iter_raw())
    assert len(parts) > 20
    assert json.loads(b"".join(parts))["text"]
    engine.faults("slow")
    with pytest.raises(httpx.ReadTimeout):
        engine.post("/generate", {"text": "The"}, timeout=0.2)


@pytest.mark.parametrize(
    ("kind", "error"), [("close", httpx.RemoteProtocolError), ("reset", httpx.ReadError)]
)
def test_a_connection_without_an_answer(engine: EngineUnderTest, kind: str, error: type[Exception]) -> None:
    engine.faults(kind)
    with pytest.raises(error):
        engine.generate()
    assert engine.generate().status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_an_error_event_under_a_200(engine: EngineUnderTest, path: str) -> None:
    engine.faults("stream_error", after_tokens=4)
    *parts, error, done = stream(engine, path)
    assert parts
    assert "message" in json.loads(error)["error"]
    assert done == "[DONE]"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_stream_that_just_ends(engine: EngineUnderTest, path: str) -> None:
    engine.faults("stream_cut", after_tokens=4)
    parts = stream(engine, path)
    assert parts
    assert "[DONE]" not in parts
    assert '"finish_reason":{' not in parts[-1]
    assert stream(engine, path)[-1] == "[DONE]"


def test_a_stream_fault_leaves_whole_replies_alone(engine: EngineUnderTest) -> None:
    engine.faults("stream_cut")
    assert engine.generate().json()["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert len(engine.get("/faults").json()["armed"]) == 1


def test_a_poison_prompt_ends_the_process(start_engine: StartEngine) -> None:
    engine = start_engine("--faults")
    engine.faults("exit", contains="poison", exit_code=7)
    assert engine.generate("water").status_code == 200
    with pytest.raises(httpx.RemoteProtocolError):
        engine.generate("poison")
    assert engine.wait() == 7


def test_a_frozen_scheduler_behind_a_live_server(engine: EngineUnderTest, pool: ThreadPoolExecutor) -> None:
    engine.faults("freeze")
    asked = pool.submit(engine.generate)
    engine.wait_counts(in_flight=1)
    assert engine.get("/health").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        engine.get("/health_generate", timeout=0.1)
    assert not asked.done()
    engine.clear_faults()
    assert asked.result(10).status_code == 200


def test_a_fault_takes_as_many_as_it_was_armed_for(engine: EngineUnderTest) -> None:
    engine.faults("status", times=2)
    assert [engine.generate().status_code for _ in range(3)] == [500, 500, 200]
    engine.faults("status", times=None)
    assert [engine.generate().status_code for _ in range(5)] == [500] * 5


def test_a_fault_takes_only_prompts_with_its_text(engine: EngineUnderTest) -> None:
    engine.faults("status", contains="bad", times=None)
    assert engine.generate("good").status_code == 200
    assert engine.generate("a bad one").status_code == 500
    ids = {"input_ids": list(b"bad")}
    assert engine.post("/generate", ids).status_code == 500


def test_the_oldest_matching_fault_comes_first(engine: EngineUnderTest) -> None:
    engine.faults("status", status=501, contains="x")
    engine.faults("status", status=502)
    engine.faults("status", status=503)
    assert [engine.generate(text).status_code for text in ("a", "x", "b")] == [502, 501, 503]


def test_a_request_that_is_refused_uses_up_no_fault(engine: EngineUnderTest) -> None:
    engine.faults("status")
    assert engine.generate(n=2).status_code == 400
    assert engine.generate().status_code == 500


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "unheard"},
        {"kind": "status", "times": 0},
        {"kind": "status", "status": 99},
        {"kind": "abort", "after_tokens": 0},
        {"kind": "slow", "interval": -1},
        {"kind": "exit", "exit_code": 256},
        {"kind": "close", "colour": "red"},
    ],
)
def test_a_fault_that_makes_no_sense_is_a_400(engine: EngineUnderTest, body: Any) -> None:
    assert engine.post("/faults", body).status_code == 400
