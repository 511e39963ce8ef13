"""Being full, being left, being aborted and being paused, seen from outside."""

import json
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.dispatch.embedded.conftest import StartEngine
from tests.dispatch.embedded.engine_under_test import EngineUnderTest, wait_until

ENDLESS = {"max_new_tokens": 1_000_000, "ignore_eos": True}


def endless(
    pool: ThreadPoolExecutor, engine: EngineUnderTest, count: int, first: int = 0
) -> list[Future[httpx.Response]]:
    """Requests that end only when somebody ends them."""
    return [
        pool.submit(engine.generate, "The", rid=f"r{number}", **ENDLESS)
        for number in range(first, first + count)
    ]


def finish_of(asked: Future[httpx.Response]) -> str:
    response = asked.result(10)
    assert response.status_code == 200
    return str(response.json()["meta_info"]["finish_reason"]["type"])


def test_running_and_waiting_are_bounded_and_the_rest_is_turned_away(
    start_engine: StartEngine, pool: ThreadPoolExecutor
) -> None:
    engine = start_engine("--max-running", "3", "--max-queue", "2")
    asked = endless(pool, engine, 5)
    loads = engine.loads
    wait_until(lambda: (loads()["num_running"], loads()["num_waiting"]) == (3, 2), "three run, two wait")
    refused = engine.generate("The", rid="late")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "full" in refused.json()["error"]["message"]
    openai = engine.post("/v1/completions", {"prompt": "The"})
    assert (openai.status_code, openai.json()["error"]["code"]) == (503, 503)
    assert engine.get("/health").status_code == engine.get("/health_generate").status_code == 200
    assert engine.post("/abort_request", {"rid": "r0"}).json() == {"aborted": 1}
    engine.post("/abort_request", {"abort_all": True})
    assert [finish_of(one) for one in asked] == ["abort"] * 5
    counts = engine.wait_counts(in_flight=0)
    assert counts["max_in_flight"] in (5, 6)
    assert (counts["aborted"], counts["refused"], counts["requests"]) == (5, 2, 7)
    assert counts["arrived"] == {**{f"r{number}": 1 for number in range(5)}, "late": 1}


def test_every_request_has_exactly_one_outcome(start_engine: StartEngine) -> None:
    engine = start_engine("--faults", "--token-rate", "5000")
    engine.generate("The", rid="same")
    engine.generate("The", rid="same")
    engine.generate("The", n=2)
    engine.faults("status")
    engine.generate("The", rid="faulted")
    engine.client.post(engine.url + "/generate", content=b"{", headers={"X-Request-Id": "broken"})
    counts = engine.counts()
    outcomes = ("in_flight", "completed", "aborted", "disconnected", "refused", "faulted")
    assert [counts[name] for name in outcomes] == [0, 2, 0, 0, 2, 1]
    assert counts["requests"] == sum(counts[name] for name in outcomes)
    assert counts["arrived"] == {"same": 2, "faulted": 1, "broken": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(start_engine: StartEngine, stream: bool) -> None:
    engine = start_engine("--max-running", "1", "--token-rate", "2000")
    body = {"text": "The", "sampling_params": ENDLESS, "stream": stream}
    running = engine.open_request("/generate", body)
    wait_until(lambda: engine.loads()["num_running"] == 1, "the first runs")
    waiting = engine.open_request("/generate", body)
    wait_until(lambda: engine.loads()["num_waiting"] == 1, "the second waits")
    waiting.close()
    running.close()
    counts = engine.wait_counts(in_flight=0)
    assert counts["disconnected"] == 2
    assert (engine.loads()["num_running"], engine.loads()["num_waiting"]) == (0, 0)
    assert engine.generate("The", max_new_tokens=1).status_code == 200


def test_an_aborted_request_keeps_its_partial_text(
    start_engine: StartEngine, pool: ThreadPoolExecutor
) -> None:
    engine = start_engine()
    asked = pool.submit(
        engine.post,
        "/generate",
        {"text": "The harbour", "rid": "body-id", "sampling_params": {"temperature": 0, **ENDLESS}},
        headers={"X-Request-Id": "header-id"},
    )
    wait_until(lambda: engine.loads()["num_tokens_total"] > 2, "some tokens")
    assert engine.post("/abort_request", {"rid": "nobody"}).json() == {"aborted": 0}
    assert engine.post("/abort_request", {"rid": "body-id"}).json() == {"aborted": 1}
    reply = asked.result(10).json()
    assert reply["meta_info"]["id"] == "header-id"
    assert engine.counts()["arrived"] == {"header-id": 1}
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["text"].startswith(" wakes before")


def test_an_aborted_completion_and_stream_say_so(start_engine: StartEngine, pool: ThreadPoolExecutor) -> None:
    engine = start_engine()
    body = {"prompt": "The", "max_tokens": 100_000, "temperature": 1.7}
    whole = pool.submit(engine.post, "/v1/completions", body, headers={"X-Request-Id": "w"})
    streamed = pool.submit(
        engine.post, "/generate", {"text": "The", "rid": "s", "stream": True, "sampling_params": ENDLESS}
    )
    # Not in_flight=2: the completion may end by itself before the other one is there.
    wait_until(lambda: engine.counts()["arrived"] == {"w": 1, "s": 1}, "both were read")
    assert engine.post("/abort_request", {"rid": "s"}).json() == {"aborted": 1}
    *_, last, done = [line for line in streamed.result(10).text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    engine.post("/abort_request", {"rid": "w"})
    assert whole.result(10).json()["choices"][0]["finish_reason"] in ("abort", "stop")


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": 3}, {"abort_all": "x"}])
def test_an_abort_of_nothing_is_a_400(engine: EngineUnderTest, body: object) -> None:
    assert engine.post("/abort_request", body).status_code == 400


def test_pausing_by_abort_ends_everything_and_new_requests_wait(
    start_engine: StartEngine, pool: ThreadPoolExecutor
) -> None:
    engine = start_engine("--token-rate", "2000")
    asked = endless(pool, engine, 2)
    wait_until(lambda: engine.loads()["num_running"] == 2, "two run")
    assert engine.post("/pause_generation", {"mode": "abort"}).status_code == 200
    assert [finish_of(one) for one in asked] == ["abort", "abort"]
    late = pool.submit(engine.generate, "The", max_new_tokens=2, ignore_eos=True)
    wait_until(lambda: engine.loads()["num_waiting"] == 1, "the late one waits")
    assert engine.loads()["paused"] == "abort"
    assert not late.done()
    assert engine.post("/continue_generation").status_code == 200
    assert finish_of(late) == "length"


@pytest.mark.parametrize(
    ("mode", "running", "waiting", "flush"), [("in_place", 2, 0, 400), ("retract", 0, 2, 200)]
)
def test_pausing_keeps_the_work_and_decides_whether_the_cache_can_be_flushed(
    start_engine: StartEngine, pool: ThreadPoolExecutor, mode: str, running: int, waiting: int, flush: int
) -> None:
    engine = start_engine("--faults", "--token-rate", "2000")
    engine.faults("freeze")  # until they are paused, which they may else be too late for
    asked = [
        pool.submit(engine.generate, "The", max_new_tokens=1500, ignore_eos=True, seed=1) for _ in range(2)
    ]
    wait_until(lambda: engine.loads()["num_running"] == 2, "two run")
    engine.post("/pause_generation", {"mode": mode})
    engine.clear_faults()
    loads = engine.loads()
    assert (loads["num_running"], loads["num_waiting"]) == (running, waiting)
    assert engine.loads()["num_tokens_total"] == loads["num_tokens_total"]
    assert engine.post("/flush_cache").status_code == engine.get("/flush_cache").status_code == flush
    engine.post("/continue_generation")
    texts = {one.result(10).json()["text"] for one in asked}
    assert len(texts) == 1


def test_a_paused_engine_answers_no_health_check_but_gives_information(
    start_engine: StartEngine, pool: ThreadPoolExecutor
) -> None:
    engine = start_engine()
    engine.post("/pause_generation", {"mode": "in_place"})
    checks = [pool.submit(engine.get, path) for path in ("/health", "/health_generate")]
    for path in ("/health", "/health_generate"):
        with pytest.raises(httpx.ReadTimeout):
            engine.get(path, timeout=0.1)
    assert engine.get("/model_info").status_code == engine.get("/v1/loads").status_code == 200
    assert not any(check.done() for check in checks)
    engine.post("/continue_generation")
    assert [check.result(10).status_code for check in checks] == [200, 200]


def test_a_health_check_whose_client_left_leaves_nothing_behind(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.post("/pause_generation", {"mode": "in_place"})
    for path in ("/health", "/health_generate"):
        engine.open_request(path).close()
    assert engine.stop() == 0


def test_an_unknown_pause_mode_is_a_400(engine: EngineUnderTest) -> None:
    response = engine.post("/pause_generation", {"mode": "sometimes"})
    assert response.status_code == 400
    assert "mode" in response.json()["error"]["message"]
