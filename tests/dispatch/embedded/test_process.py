"""The engine as a process: starting, failing to start, and ending with work in flight."""

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.dispatch.embedded.conftest import StartEngine
from tests.dispatch.embedded.engine_under_test import EngineUnderTest, wait_until

ENDLESS = {"max_new_tokens": 1_000_000, "ignore_eos": True}
EXIT_BOUND = 6.0
"""Seconds an exit may take here; about one on an idle machine, and this machine is not idle."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_work_in_flight_as_aborted_and_exits_with_zero(
    start_engine: StartEngine, pool: ThreadPoolExecutor, number: int
) -> None:
    engine = start_engine("--max-running", "2")
    body = {"text": "The harbour", "sampling_params": {"temperature": 0, **ENDLESS}}
    whole = [pool.submit(engine.post, "/generate", body) for _ in range(3)]
    streamed = pool.submit(engine.post, "/generate", {**body, "stream": True})
    # Not in_flight=4: a request whose body was not read yet is refused after the signal.
    loads = engine.loads
    wait_until(lambda: (loads()["num_running"], loads()["num_waiting"]) == (2, 2), "two run, two wait")
    before = loads()["num_tokens_total"]
    wait_until(lambda: loads()["num_tokens_total"] > before, "a token of each that runs")
    began = time.monotonic()
    engine.signal(number)
    replies = [one.result(10) for one in whole]
    assert [reply.status_code for reply in replies] == [200] * 3
    finishes = [reply.json()["meta_info"]["finish_reason"] for reply in replies]
    assert finishes == [{"type": "abort", "message": "the engine is shutting down"}] * 3
    assert any(reply.json()["text"] for reply in replies)
    *_, last, done = [part for part in streamed.result(10).text.split("\n\n") if part]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.wait() == 0
    assert time.monotonic() - began < EXIT_BOUND
    assert engine.stderr() == ""
    with pytest.raises(httpx.ConnectError):
        engine.get("/health")


def test_paused_hung_and_slow_work_does_not_hold_up_the_exit(
    start_engine: StartEngine, pool: ThreadPoolExecutor
) -> None:
    engine = start_engine("--faults")
    engine.faults("hang", contains="hang")
    engine.faults("slow", contains="slow")
    hung = pool.submit(engine.generate, "hang")
    slow = pool.submit(engine.generate, "slow", max_new_tokens=1)
    wait_until(lambda: engine.get("/faults").json() == {"armed": []}, "both have their fault")
    wait_until(lambda: engine.loads()["num_tokens_total"] > 0, "the slow one was generated")
    engine.post("/pause_generation", {"mode": "in_place"})
    health = [pool.submit(engine.get, path) for path in ("/health", "/health_generate")]
    waiting = pool.submit(engine.generate, "The")
    wait_until(lambda: engine.loads()["num_waiting"] == 1, "the last one waits")
    began = time.monotonic()
    assert engine.stop() == 0
    assert time.monotonic() - began < EXIT_BOUND
    assert waiting.result(10).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert hung.result(10).json()["meta_info"]["finish_reason"]["type"] == "abort"
    for check in health:
        # A check that arrived after the signal finds nobody listening; both are an answer.
        error = check.exception(10)
        assert isinstance(error, httpx.TransportError) or check.result().status_code == 503
    assert isinstance(slow.exception(10), httpx.RemoteProtocolError)


def test_an_idle_engine_with_kept_connections_exits_at_once(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.generate(max_new_tokens=1)
    began = time.monotonic()
    assert engine.stop() == 0
    assert time.monotonic() - began < EXIT_BOUND


def test_a_taken_port_is_one_line_and_its_own_exit_status(start_engine: StartEngine) -> None:
    first = start_engine()
    second = start_engine(port=first.port, wait=False)
    assert second.wait() == 98
    lines = second.stderr().splitlines()
    assert lines == [f"embedded engine: address 127.0.0.1:{first.port} is already in use"]
    assert first.get("/health").status_code == 200


def test_an_address_that_is_not_ours_is_one_line(start_engine: StartEngine) -> None:
    engine = start_engine("--host", "192.0.2.1", wait=False)  # TEST-NET-1: never a local address
    assert engine.wait() == 1
    assert len(engine.stderr().splitlines()) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--token-rate", "fast"],
        ["--token-rate", "-1"],
        ["--token-rate", "nan"],
        ["--max-running", "0"],
        ["--max-queue", "-1"],
        ["--start-delay", "inf"],
        ["--unheard-of"],
        ["--port", "70000"],
        ["--model-path", "/nowhere/model.txt"],
    ],
)
def test_a_bad_flag_is_one_line_and_exit_status_two(start_engine: StartEngine, flags: list[str]) -> None:
    engine = start_engine(*flags, wait=False)
    assert engine.wait() == 2
    (line,) = engine.stderr().splitlines()
    assert line.startswith("embedded engine: ")


def test_a_starting_engine_is_unhealthy_turns_work_away_and_can_be_ended(start_engine: StartEngine) -> None:
    engine = start_engine("--start-delay", "30", port=free_port(), wait=False)

    def answered() -> httpx.Response | None:
        try:
            return engine.get("/health")
        except httpx.ConnectError:
            return None

    assert wait_until(answered, "it listens").status_code == 503
    refused = engine.generate()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert engine.post("/update_weights_from_disk", {"model_path": "x"}).status_code == 503
    assert engine.stop() == 0


def test_a_start_delay_is_waited_for(start_engine: StartEngine) -> None:
    began = time.monotonic()
    engine = start_engine("--start-delay", "0.3")
    assert time.monotonic() - began >= 0.3
    assert engine.get("/health").status_code == 200


def test_a_server_seed_makes_unseeded_requests_reproducible(start_engine: StartEngine) -> None:
    def texts(seed: str) -> list[str]:
        with EngineUnderTest.start("--seed", seed, "--token-rate", "0") as engine:
            return [engine.generate("The", max_new_tokens=40).json()["text"] for _ in range(3)]

    first = texts("5")
    assert first == texts("5") != texts("6")
    assert len(set(first)) > 1


def test_the_token_rate_is_kept(start_engine: StartEngine) -> None:
    engine = start_engine("--token-rate", "100")
    reply = engine.generate("The", max_new_tokens=30, ignore_eos=True).json()
    assert reply["meta_info"]["e2e_latency"] >= 0.29


def test_requests_are_logged_only_when_asked(start_engine: StartEngine) -> None:
    engine = start_engine("--log-requests", "--token-rate", "0")
    engine.generate("The", rid="line\nbreak", max_new_tokens=2, ignore_eos=True)
    engine.generate("The", rid="bad", n=2)
    wait_until(lambda: engine.stderr().count("\n") == 2, "two lines")
    assert engine.stderr().splitlines() == [
        "/generate 'line\\nbreak' completed length",
        "/generate '-' refused 400",
    ]


def test_a_reader_of_stdout_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dispatch.engines.embedded", "--port", str(port := free_port())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    try:

        def healthy() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
            except httpx.ConnectError:
                return False

        wait_until(healthy, "it is healthy")
        process.terminate()
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()


def test_starting_the_engine_loads_nothing_heavy() -> None:
    """The start time rests on this: `dispatch/__init__.py` runs too, and must not pull in Ray."""
    heavy = "[name for name in ('ray', 'httpx') if name in sys.modules]"
    code = f"import sys, dispatch.engines.embedded.server; print({heavy})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
