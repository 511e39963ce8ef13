"""classify_text: a pasted traceback or log means what the exception itself would have meant."""

from __future__ import annotations

import random
import time
import traceback
from pathlib import Path

import aiohttp
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults import Blame, Fault, Kind, Outcome, classify, classify_text
from faults.classify import TABLE
from faults.text_faults import BUILTIN, MAX_SEARCH
from protocol import CodedError, Trust, catalogue, mint

SAMPLES = Path(__file__).parent / "samples"
# What Ray 2.60 and Python really printed, one file each: the code, and the HTTP status where there is one.
EXPECTED: dict[str, tuple[str, int | None]] = {
    "aiohttp_400": ("REQUEST.REJECTED", 400),
    "aiohttp_503": ("BACKPRESSURE.OVERLOADED", 503),
    "httpx_400": ("REQUEST.REJECTED", 400),
    "gpu_out_of_memory": ("TASK.GPU_OUT_OF_MEMORY", None),
    "gpu_failed": ("TASK.GPU_FAILED", None),
    "ranks_that_do_not_meet": ("TASK.COLLECTIVE_FAILED", None),
    "an_ordinary_exception": ("TASK.FAILED", None),
    "keyword_only_arguments": ("TASK.FAILED", None),
    "will_not_load_one_hop_further": ("TASK.FAILED", None),
    "a_group": ("TASK.FAILED", None),
    "a_group_with_a_bad_leaf": ("TASK.FAILED", None),
    "an_inner_actor_died": ("ACTOR.NESTED_DIED", None),
    "an_inner_call_timed_out": ("TIMEOUT.NESTED", None),
    "no_answer_in_time": ("TIMEOUT.RAY_GET", None),
    "killed": ("ACTOR.DIED", None),
    "killed_with_restarts_left": ("ACTOR.UNAVAILABLE", None),
    "sys_exit": ("ACTOR.DIED", None),
    "init_failed": ("ACTOR.INIT_FAILED", None),
    "init_failed_with_an_error_of_the_tables": ("ACTOR.INIT_FAILED", None),
    "keyboardinterrupt_in_a_sync_actor": ("CANCEL.REMOTE", None),
    "cancelled_while_running": ("CANCEL.REMOTE", None),
    "cancelled_while_queued": ("CANCEL.REMOTE", None),
}

DECORATIONS = {
    "as it is": lambda text: text,
    "without colours": lambda text: text.replace("\x1b[36m", "").replace("\x1b[39m", ""),
    "from a worker's log": lambda text: _prefixed(text, "(Trainer pid=123) "),
    "from another node": lambda text: _prefixed(text, "(Trainer.step pid=123, ip=10.0.0.2) "),
    "from a coloured log": lambda text: _prefixed(text, "\x1b[36m(Trainer pid=123)\x1b[0m "),
    "all in red": lambda text: "\n".join(f"\x1b[1;31m{line}\x1b[0m" for line in text.split("\n")),
    "with the line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    "after other lines": lambda text: f"step 1 took 3 s\nstep 2 took 4 s\n{text}",
    "before other lines": lambda text: f"{text}\nshutting down\n",
}


def _prefixed(text: str, prefix: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.split("\n"))


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text()


def test_every_sample_is_expected() -> None:
    assert {path.stem for path in SAMPLES.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("decorate", DECORATIONS.values(), ids=DECORATIONS)
@pytest.mark.parametrize("name", EXPECTED)
def test_samples(name: str, decorate: object) -> None:
    fault = classify_text(decorate(sample(name)))  # type: ignore[operator]
    assert (str(fault.code), fault.status) == EXPECTED[name]
    assert fault.trust is Trust.HEURISTIC
    assert fault.evidence
    assert "\x1b" not in fault.evidence


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu_out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("an_ordinary_exception", "ValueError: boom"),
        ("httpx_400", "httpx.HTTPStatusError: Client error '400"),
        ("an_inner_call_timed_out", "ray.exceptions.GetTimeoutError: "),
    ],
)
def test_the_evidence_is_what_the_cause_says(name: str, says: str) -> None:
    assert classify_text(sample(name)).evidence.startswith(says)


def test_the_evidence_names_the_call() -> None:
    assert "[in ray::Trainer.step() (pid=" in classify_text(sample("gpu_out_of_memory")).evidence


WATCHDOG = (
    "[rank1]:[E1218 20:27:21.433063423 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, NumelOut=131072000, "
    "Timeout(ms)=600000) ran for 600081 milliseconds before timing out.\n"
)
TERMINATED = (
    "terminate called after throwing an instance of 'c10::{}'\n  what():  [PG ID 0 Rank 1] Process group\n"
)


@pytest.mark.parametrize("decorate", DECORATIONS.values(), ids=DECORATIONS)
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (WATCHDOG, "TASK.COLLECTIVE_FAILED"),
        (WATCHDOG + TERMINATED.format("DistBackendError"), "TASK.COLLECTIVE_FAILED"),
        (TERMINATED.format("DistBackendError"), "TASK.COLLECTIVE_FAILED"),
        (TERMINATED.format("OutOfMemoryError"), "TASK.GPU_OUT_OF_MEMORY"),
        (TERMINATED.format("AcceleratorError"), "TASK.GPU_FAILED"),
    ],
    ids=["watchdog", "watchdog and its abort", "collective", "memory", "device"],
)
def test_what_pytorch_prints_before_it_aborts(text: str, code: str, decorate: object) -> None:
    fault = classify_text(decorate(text))  # type: ignore[operator]
    assert (str(fault.code), fault.trust) == (code, Trust.HEURISTIC)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "TASK.GPU_OUT_OF_MEMORY"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "TASK.GPU_OUT_OF_MEMORY"),
        ("ray.exceptions.OutOfMemoryError: Task was killed.", "NODE.OUT_OF_MEMORY"),
        ("", "NODE.OUT_OF_MEMORY"),
    ],
)
def test_two_classes_of_one_name(line: str, code: str) -> None:
    """Ray names the cause without its module; only a line that names it in full tells them apart."""
    text = f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=1, ip=10.0.0.1)\n{line}\n"
    assert classify_text(text).code == code
    unhandled = "Unhandled error (suppress with 'RAY_IGNORE_UNHANDLED_ERRORS=1'): ray::f() (pid=1)\n"
    assert not line or classify_text(unhandled + line).code == code


def test_only_died_means_dead_in_text_too() -> None:
    assert classify_text(sample("killed_with_restarts_left")).kind is Kind.UNAVAILABLE
    assert classify_text(sample("killed")).kind is Kind.DIED
    assert classify_text(sample("an_inner_actor_died")).blame is Blame.NESTED
    assert classify_text(sample("init_failed")).outcome is Outcome.NOT_RUN


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_row_is_read_from_the_line_that_python_prints(name: str) -> None:
    fault = classify_text(
        f"Traceback (most recent call last):\n  File 'x.py', line 1, in f\n{name}: it said\n"
    )
    if TABLE[name] == "UPSTREAM.SERVER_ERROR":  # read by its status, and there is none
        assert fault.code == "UNKNOWN.EXCEPTION"
    else:
        assert fault.code == TABLE[name]
    assert fault.trust is Trust.HEURISTIC


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_builtin_exceptions_are_read_with_and_without_a_message(name: str) -> None:
    for line in (name, f"{name}: ", f"{name}: it said", f"{name}: {'long ' * 1000}"):
        assert classify_text(f"Traceback (most recent call last):\n{line}").code == BUILTIN[name]


@pytest.mark.parametrize(
    "exc",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("Server disconnected"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError("cut"),
        ConnectionResetError(104, "Connection reset by peer"),
        TimeoutError(),
        KeyboardInterrupt(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_text_and_exception_agree(exc: BaseException) -> None:
    text = "".join(traceback.format_exception(exc))
    assert classify_text(text).code == classify(exc).code


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "REQUEST.REJECTED"), (429, "BACKPRESSURE.RATE_LIMITED"), (503, "BACKPRESSURE.OVERLOADED")],
)
def test_statuses_are_read_from_what_the_clients_print(status: int, code: str) -> None:
    request = httpx.Request("POST", "http://10.0.0.1:30000/generate")
    with pytest.raises(httpx.HTTPStatusError) as caught:
        httpx.Response(status, request=request).raise_for_status()
    fault = classify_text("".join(traceback.format_exception(caught.value)))
    assert (fault.code, fault.status) == (code, status)


def test_the_last_failure_of_a_log_counts() -> None:
    assert (
        classify_text("httpx.ReadTimeout: a\nretrying\nhttpx.ConnectError: b\n").code == "TRANSPORT.CONNECT"
    )


def test_a_token_beats_the_types() -> None:
    error = CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog")
    text = sample("httpx_400") + f"\nprotocol.errors.CodedError: {error}\n"
    fault = classify_text(text)
    assert (fault.code, fault.id, fault.trust) == ("WEIGHTS.REFIT_ABORTED", error.id, Trust.CHECKSUMMED)
    key = b"key"
    assert classify_text(f"x {mint('NODE.IO', key=key)}", key=key).trust is Trust.SIGNED


def test_what_a_nested_failure_printed_is_nested() -> None:
    """An exception that Ray could not carry, raised from an ActorDiedError: our callee is alive."""
    text = (
        "ray.exceptions.UnserializableException: Failed to deserialize exception.\nOriginal exception:\n"
        "ray.exceptions.RayTaskError: ray::A.f() (pid=1, ip=10.0.0.1)\n"
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "KeywordOnly: an engine is gone\n"
    )
    assert classify_text(text).code == "ACTOR.NESTED_DIED"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "all is well",
        "ValueError: x",
        "Traceback (most recent call last):",
        "mymodule.ReadTimeout: x",
    ],
)
def test_what_no_table_names_is_unknown(text: str) -> None:
    fault = classify_text(text)
    assert (fault.code, fault.trust, fault.evidence) == ("UNKNOWN.EXCEPTION", Trust.NONE, text)


def test_a_type_in_the_middle_of_a_line_is_no_failure() -> None:
    assert classify_text("we handle httpx.ReadTimeout: by waiting").code == "UNKNOWN.EXCEPTION"


def test_only_the_tail_is_searched_for_types_and_evidence_is_capped() -> None:
    fault = classify_text("httpx.ReadTimeout: a\n" + "x" * (MAX_SEARCH + 1))
    assert fault.code == "UNKNOWN.EXCEPTION"
    assert len(fault.evidence) <= 2048


@given(st.text() | st.sampled_from(sorted(EXPECTED)).map(sample), st.integers(0, 5000), st.integers(0, 5000))
def test_any_text_has_a_fault(text: str, start: int, length: int) -> None:
    fault = classify_text(text[start : start + length])
    assert isinstance(fault, Fault)
    assert fault.code in catalogue


@pytest.mark.parametrize(
    "unit", ["ray.exceptions.RayTaskError(X): y\n", "(A pid=1) ", "a" * 121 + "\n", "| " * 30, "\x1b[0"]
)
def test_ten_megabytes_take_seconds_at_most(unit: str) -> None:
    text = unit * (10 * 1024 * 1024 // len(unit))
    began = time.perf_counter()
    classify_text(text)
    assert time.perf_counter() - began < 15


def test_a_shuffled_log_is_read() -> None:
    lines = [line for name in EXPECTED for line in sample(name).splitlines()]
    random.Random(7).shuffle(lines)
    assert classify_text("\n".join(lines)).code in catalogue
