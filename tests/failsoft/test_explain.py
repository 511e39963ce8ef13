"""`failsoft explain`: from what a person has in hand to what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from failsoft.cli import app
from failsoft.cli.explain import MAX_EVENT_INPUT, MAX_INPUT
from faults import classify_text
from protocol import Code, CodedError, Events, catalogue, mint

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "faults" / "samples"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.txt"))
FACTS = ("code", "kind", "blame", "outcome", "trust", "advice", "meaning", "runbook", "evidence")
EVENT: dict[str, Any] = {
    "ts": 1, "level": "error", "event": "a", "code": None, "id": None, "key": "", "run": "", "role": "",
    "host": "", "pid": 1, "detail": "", "data": {},
}  # fmt: skip


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def told(*arguments: str, stdin: str | bytes | None = None) -> dict[str, Any]:
    done = run("explain", *arguments, "--json", stdin=stdin)
    assert done.exit_code in (0, 1), done.output
    read: dict[str, Any] = json.loads(done.stdout)
    return read


# -- tracebacks


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_explained(name: str) -> None:
    text = (SAMPLES / f"{name}.txt").read_text()
    fault = classify_text(text)
    done = run("explain", "-", stdin=text)
    assert done.exit_code == 0
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines() if line.startswith(FACTS))
    assert lines["code"] == str(fault.code)
    assert lines["kind"] == fault.kind
    assert lines["blame"] == fault.blame
    assert lines["outcome"] == fault.outcome
    assert lines["advice"] == catalogue.entry(fault.code).advice
    assert lines["meaning"] == catalogue.entry(fault.code).meaning
    assert lines["runbook"] == catalogue.entry(fault.code).runbook
    assert "\x1b" not in done.stdout, "not a terminal: no colours"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_and_json_say_the_same(name: str) -> None:
    text = (SAMPLES / f"{name}.txt").read_text()
    from_file = told(str(SAMPLES / f"{name}.txt"))
    assert from_file == told("-", stdin=text)
    assert set(FACTS) <= set(from_file)
    assert from_file["recognised"] is True


def test_a_token_in_a_workers_log_is_read() -> None:
    error = CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog")
    text = f"\x1b[36m(Trainer pid=123)\x1b[0m Exception: Call to 10.0.0.1:30000 failed: {error}\n"
    read = told("-", stdin=text)
    assert (read["code"], read["id"], read["trust"]) == ("WEIGHTS.REFIT_ABORTED", error.id, "checksummed")
    assert "\x1b" not in read["evidence"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "prefix", ["(Trainer pid=123) ", "\x1b[36m(Trainer.step pid=123, ip=10.0.0.2)\x1b[0m ", "\x1b[1;31m"]
)
def test_a_logs_prefixes_and_colours_are_read_through(name: str, prefix: str) -> None:
    text = (SAMPLES / f"{name}.txt").read_text()
    plain, prefixed = told("-", stdin=text), told("-", stdin=f"step 1\n{_before_each_line(prefix, text)}")
    for fact in ("code", "kind", "blame", "outcome", "advice", "trust"):
        assert prefixed[fact] == plain[fact]


def _before_each_line(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.split("\n"))


@pytest.mark.parametrize("nasty", ["\x1b[2J", "\x1b]0;a title\x07", "\x9b31m", "\x85", "\x08\x7f", "\r"])
def test_nothing_that_a_terminal_obeys_gets_through(tmp_path: Path, nasty: str) -> None:
    event = {**EVENT, "code": "NODE.IO", "event": f"a{nasty}", "key": f"k{nasty}", "detail": f"d{nasty}"}
    events = tmp_path / "events.jsonl"
    events.write_text(2 * (json.dumps(event) + "\n"))
    for text in (
        events.read_text(),
        f"httpx.ConnectError: {nasty}\n",
        f"{nasty} {mint('NODE.IO')} {nasty}\n",
    ):
        for option in ((), ("--json",)):
            done = run("explain", "-", *option, stdin=text)
            assert done.exit_code == 0
            assert not {c for c in done.stdout if c != "\n" and not c.isprintable()}


def test_markup_and_secrets_in_the_text_are_plain() -> None:
    text = "httpx.ConnectError: [bold]http://user:s3cr3t@host[/bold] [link=x]\n"
    done = run("explain", "-", stdin=text)
    assert done.exit_code == 0
    assert "[bold]" in done.stdout
    assert "s3cr3t" not in done.stdout


@pytest.mark.parametrize(
    "text",
    ["all is well\n", "ValueError: x\n", "{}\n", "[1, 2]\n", "\ufffd\n", "[" * 200_000, '{"a":' * 200_000],
    ids=range(7),
)
def test_nothing_recognised_is_status_1_and_says_what_to_do(text: str) -> None:
    done = run("explain", "-", stdin=text)
    assert done.exit_code == 1
    assert "UNKNOWN.EXCEPTION" in done.stdout
    assert "Paste the whole traceback" in done.stdout
    assert told("-", stdin=text)["recognised"] is False


# -- what cannot be read


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty"), (b" \n\t\n", "is empty"), (b"\x7fELF\0\0\0", "is binary")]
)
def test_input_that_cannot_be_explained_is_one_line_and_status_2(
    tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "input"
    file.write_bytes(content)
    for done, name in (
        (run("explain", str(file)), str(file)),
        (run("explain", "-", stdin=content), "the input"),
    ):
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert name in done.stderr
        assert said in done.stderr


def test_a_file_that_is_missing_a_folder_or_forbidden(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        done = run("explain", str(path))
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1
        assert str(path) in done.stderr
    assert "is not there" in run("explain", str(tmp_path / "nothing")).stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("httpx.ConnectError: x\n")
    file.chmod(0)
    done = run("explain", str(file))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"failsoft explain: {file} cannot be read: Permission denied\n"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no such file here")
def test_a_file_that_refuses_to_be_read_is_one_line() -> None:
    """Opens, and fails at the first read: whoever runs this, root too."""
    done = run("explain", "/proc/self/mem")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "failsoft explain: /proc/self/mem cannot be read: Input/output error\n"


@pytest.mark.parametrize("stdin", ["<&-", "</dev/zero"])
def test_a_closed_input_and_one_without_end_are_refused_at_once(stdin: str) -> None:
    command = [sys.executable, "-m", "failsoft", "explain", "-"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {stdin}', "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("failsoft explain: the input is ")


def test_only_the_tail_of_a_long_log_is_looked_at_and_it_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = "step took 3 s\n"
    log.write_text(
        "httpx.ReadTimeout: early\n" + line * (2 * MAX_INPUT // len(line)) + "httpx.ConnectError: late\n"
    )
    for read in (told(str(log)), told("-", stdin=log.read_bytes())):
        assert read["code"] == "TRANSPORT.CONNECT"
        assert str(MAX_INPUT) in read["cut"]
    log.write_text("httpx.ReadTimeout: early\n" + line * (2 * MAX_INPUT // len(line)))
    assert told(str(log))["recognised"] is False


def test_a_file_of_50_mb_takes_a_few_of_its_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = "step took 3 s\n"
    log.write_text(line * (50 * 2**20 // len(line)) + "httpx.ConnectError: late\n")
    tracemalloc.start()
    try:
        read = told(str(log))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read["code"] == "TRANSPORT.CONNECT"
    assert read["cut"] == f"only {MAX_INPUT} bytes of the input were looked at"
    assert peak < 12 * MAX_INPUT < log.stat().st_size


def test_a_log_in_json_is_no_events_file_and_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = '{"ts":1,"level":"info","msg":"%s"}\n' % ("x" * 200)
    log.write_text(line * (MAX_EVENT_INPUT // len(line) + 9) + "httpx.ConnectError: late\n")
    assert told(str(log))["code"] == "TRANSPORT.CONNECT"


def test_memory_is_bounded_on_a_pipe_without_end() -> None:
    """200 MB through a pipe, in a process that may take 150 MB beyond what it has mapped."""
    script = (
        "import resource, sys; from failsoft.cli.explain import explain; import typer\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20,) * 2)\n"
        "try: explain('-', True)\n"
        "except typer.Exit as end: sys.exit(end.exit_code)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    chunk = b"step took 3 s\n" * 75_000
    for _ in range(200):
        process.stdin.write(chunk)
    out, _ = process.communicate(b"\nhttpx.ConnectError: late\n", timeout=50)
    assert process.returncode == 0
    assert json.loads(out)["code"] == "TRANSPORT.CONNECT"


# -- events


@pytest.fixture
def events_file(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    with Events.to_file(path, run="r1", role="driver") as events:
        events.emit("run.started")
        events.emit(
            "engine.exited", level="error", error=CodedError("ENGINE.EXITED", "signal 9"), key="engine/0"
        )
        for n in range(3):
            events.emit("post.failed", level="warning", error=CodedError("TRANSPORT.CONNECT"), key=f"r{n}")
        events.emit("poster.died", level="error", error=CodedError("ACTOR.DIED"), key="poster/1")
        events.emit("run.ended")
    return path


def test_an_events_file_tells_the_first_failure_and_what_followed(events_file: Path) -> None:
    read = told(str(events_file))
    assert (read["code"], read["event"], read["key"]) == ("ENGINE.EXITED", "engine.exited", "engine/0")
    assert (read["evidence"], read["trust"], read["advice"]) == ("signal 9", "structured", "recreate")
    assert read["followed"] == {"post.failed TRANSPORT.CONNECT": 3, "poster.died ACTOR.DIED": 1}
    assert read["events"] == 7
    assert read == told("-", stdin=events_file.read_bytes())


def test_an_events_file_in_words(events_file: Path) -> None:
    done = run("explain", str(events_file))
    assert done.exit_code == 0
    assert "ENGINE.EXITED" in done.stdout
    assert "post.failed TRANSPORT.CONNECT ×3" in done.stdout
    assert catalogue.entry("ENGINE.EXITED").runbook in done.stdout


def test_an_events_file_whose_last_line_is_cut_is_read(events_file: Path) -> None:
    text = events_file.read_text()
    events_file.write_text(text[: text.rindex("run.ended")])
    assert told(str(events_file))["code"] == "ENGINE.EXITED"


def test_an_events_file_without_a_failure_is_status_1(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Events.to_file(path, run="r1", role="driver") as events:
        events.emit("run.started")
    done = run("explain", str(path))
    assert done.exit_code == 1
    assert "no event carries a failure's code" in done.stdout


def test_line_separators_inside_an_event_do_not_end_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Events.to_file(path, run="r1", role="driver") as events:
        events.emit("a", detail="one\u2028two\x85three")
        events.emit("b", level="error", error=CodedError("NODE.IO", "d"))
    read = told(str(path))
    assert (read["code"], read["events"]) == ("NODE.IO", 2)


def test_events_that_are_written_badly_do_not_break_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    rows = [
        EVENT,
        {**EVENT, "code": 5},
        {**EVENT, "code": "nonsense"},
        {**EVENT, "code": "GPU.ECC"},
        {**EVENT, "level": []},
    ]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {**EVENT, "code": "NODE.IO", "detail": [1]}])
    )
    assert told(str(path))["code"] == "NODE.IO"


def test_a_lone_surrogate_in_an_event_can_be_printed(tmp_path: Path) -> None:
    """JSON can hold one, UTF-8 cannot."""
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({**EVENT, "code": "NODE.IO", "detail": "a \ud800 b"}) + "\n")
    assert told(str(path))["evidence"] == "a ? b"
    assert "a ? b" in run("explain", str(path)).stdout


def test_a_long_events_file_is_read_from_its_beginning_when_piped_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Events.to_file(path, run="r1", role="driver") as events:
        events.emit("engine.exited", level="error", error=CodedError("ENGINE.EXITED", "signal 9"))
        events.emit("post.done", detail="x" * 1000)
    first, line = path.read_text().splitlines(keepends=True)
    path.write_text(first + line * (2 * MAX_INPUT // len(line)))
    for read in (told(str(path)), told("-", stdin=path.read_bytes())):
        assert (read["code"], read["event"]) == ("ENGINE.EXITED", "engine.exited")
        assert "cut" not in read
    path.write_text(first + line * (MAX_EVENT_INPUT // len(line) + 9))
    assert told(str(path))["cut"] == f"only {MAX_EVENT_INPUT} bytes of the input were looked at"


# -- the command itself


def test_the_command_itself_explains_what_is_piped_in() -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    text = f"x {mint(Code('NODE.IO'))}\n"
    done = subprocess.run(
        [sys.executable, "-m", "failsoft", "explain", "-"],
        input=text, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "NODE.IO" in done.stdout
