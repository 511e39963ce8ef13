"""`failsoft explain`: from what a person has in hand to what to do."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from failsoft.cli import app
from failsoft.cli import explain as explaining
from failsoft.reading import CHUNK, MARKS, chunks, lines
from failsoft.story import Story
from faults import classify_text
from protocol import Code, CodedError, Events, catalogue, mint
from protocol.keys import Keyring, hold, save

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "faults" / "samples"
LOGS = Path(__file__).parent / "samples"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.txt"))
FACTS = ("code", "kind", "blame", "outcome", "trust", "advice", "meaning", "runbook", "evidence")
EVENT: dict[str, Any] = {
    "ts": 1, "level": "error", "event": "a", "code": None, "id": None, "key": "", "run": "", "role": "",
    "host": "", "pid": 1, "detail": "", "data": {}, "token": None,
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


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        (gzip.compress(b"x"), "zcat"),
        (b"BZh91AY", "bzcat"),
        (b"\x28\xb5\x2f\xfd\0", "zstdcat"),
        (b"\xfd7zXZ\0", "xzcat"),
    ],
)  # fmt: skip
def test_a_compressed_log_says_how_to_read_it(tmp_path: Path, content: bytes, tool: str) -> None:
    log = tmp_path / "worker.log.gz"
    log.write_bytes(content)
    done = run("explain", str(log))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"failsoft explain: {log} is compressed; use {tool} {log} | failsoft explain -\n"
    assert f"use {tool} FILE | failsoft explain -" in run("explain", "-", stdin=content).stderr


def test_a_fifo_is_read_and_one_that_nobody_writes_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(b"step 1\nhttpx.ConnectError: x\n" * 9000,))
    writer.start()
    assert told(str(fifo))["followed"] == {"TRANSPORT.CONNECT": 8999}
    writer.join(30)
    monkeypatch.setattr("failsoft.reading.FIFO_WAIT", 0.05)
    done = run("explain", str(fifo))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"failsoft explain: {fifo} is a FIFO into which nobody wrote")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_other_encodings_with_their_mark_are_read(tmp_path: Path, encoding: str) -> None:
    error = CodedError("WEIGHTS.REFIT_ABORTED", "größer")
    mark = "" if encoding in ("utf-16", "utf-8-sig") else "\ufeff"
    log = tmp_path / "log"
    text = f"{mark}Exception: {error}\r\n" + "größer\r\n" * CHUNK
    log.write_bytes(text.encode(encoding))
    for read in (told(str(log)), told("-", stdin=log.read_bytes())):
        assert (read["code"], read["id"], read["trust"]) == ("WEIGHTS.REFIT_ABORTED", error.id, "checksummed")
    log.write_bytes(f"Exception: {error}\r\n".encode("utf-16-le"))
    assert "is binary" in run("explain", str(log)).stderr, "without its mark"


@pytest.mark.parametrize("name", NAMES)
def test_the_line_ends_of_windows_change_nothing(name: str) -> None:
    text = (SAMPLES / f"{name}.txt").read_text()
    assert told("-", stdin=text.replace("\n", "\r\n")) == told("-", stdin=text)


def test_a_key_file_that_is_wrong_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("httpx.ConnectError: x\n")
    key = tmp_path / "key"
    done = run("explain", str(log), "--key", str(key))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{key} is not there" in done.stderr
    key.write_text("nonsense\n")
    key.chmod(0o600)
    done = run("explain", str(log), "--key", str(key))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"failsoft explain: {key} is no")


# -- long inputs


def measured(path: Path, *, piped: bool = False) -> tuple[dict[str, Any], int]:
    """What the command told, in a process of its own, and the most memory that it took, in MiB."""
    script = (
        "import json, re, sys; from pathlib import Path; from failsoft.cli.explain import explain_source\n"
        "told = explain_source(sys.argv[1])\n"
        # Not ru_maxrss, which begins with what the process had that forked this one.
        "most = re.search(r'VmHWM:\\s+([0-9]+) kB', Path('/proc/self/status').read_text())\n"
        "print(json.dumps([told, int(most.group(1)) // 1024]))\n"
    )
    with path.open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-c", script, "-" if piped else str(path)],
            stdin=file, stdout=subprocess.PIPE, cwd=ROOT, timeout=55, check=True,
        )  # fmt: skip
    read, most = json.loads(done.stdout)
    return read, most


@pytest.mark.parametrize("piped", [False, True], ids=["file", "pipe"])
def test_of_2_gb_the_first_failure_is_found_in_little_memory(tmp_path: Path, piped: bool) -> None:
    """A sparse file: text, a hole as a truncated log has it, text."""
    log = tmp_path / "log"
    early, late = b"step 1\n" * 1000 + b"httpx.ReadTimeout: early\n", b"\nhttpx.ConnectError: late\n"
    with log.open("wb") as file:
        file.write(early)
        file.truncate(2 << 30)
        file.seek(2 << 30)
        file.write(late)
    read, most = measured(log, piped=piped)
    assert (read["code"], read["line"], read["evidence"]) == (
        "TIMEOUT.READ",
        1001,
        "httpx.ReadTimeout: early",
    )
    assert read["followed"] == {"TRANSPORT.CONNECT": 1}
    assert read["later"][0]["line"] == 1003
    assert most < 150


def test_a_long_log_is_read_whole_in_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = b"2026-11-30 07:06:05 step took 3 s\n"
    count = 40 * CHUNK // len(line)
    log.write_bytes(
        line * count + b"httpx.ReadTimeout: middle\n" + line * count + b"httpx.ConnectError: late\n"
    )
    read, most = measured(log)
    assert (read["code"], read["line"]) == ("TIMEOUT.READ", count + 1)
    assert read["later"] == [{"what": "TRANSPORT.CONNECT", "count": 1, "line": 2 * count + 2, "at": ""}]
    assert most < 150


def test_a_hole_at_the_beginning_is_skipped_and_nothing_but_holes_is_empty(tmp_path: Path) -> None:
    """What logrotate's copytruncate leaves."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(3 * CHUNK + 77)
        file.seek(3 * CHUNK + 77)
        file.write(b"httpx.ConnectError: late\n")
    assert told(str(log))["code"] == "TRANSPORT.CONNECT"
    os.truncate(log, 2 * CHUNK)
    assert "is empty" in run("explain", str(log)).stderr


def story_of(content: bytes) -> Story:
    story = Story()
    for number, line in lines(chunks(io.BytesIO(content), "-", 0), lambda: story.open):
        story.feed(number, line)
    story.end()
    return story


@pytest.mark.parametrize("filler", [b"step took 3 s\n", b"x "], ids=["many lines", "one line"])
def test_a_token_is_read_wherever_a_piece_ends(filler: bytes) -> None:
    """Each way in which a piece can cut a token, and one that is glued to its neighbours, which is none."""
    token = mint("WEIGHTS.REFIT_ABORTED").encode()
    cut = 4096 + CHUNK  # where the first piece of a line without an end ends
    # The next one begins 128 bytes before that.
    for start in (*range(cut - 131, cut - 125), *range(cut - len(token) - 3, cut + 3)):
        before = (filler * CHUNK)[: start - 1]
        story = story_of(b"%s %s %s" % (before, token, filler * 90))
        assert story.first is not None
        assert story.first.fault.code == "WEIGHTS.REFIT_ABORTED"
        assert (story.first.line, story.followed) == (before.count(b"\n") + 1, [])
        for glued in (b"X%s " % token, b" %sX" % token):
            assert story_of(before + glued + filler * 90).first is None


def test_a_log_full_of_failures_is_read_up_to_a_line_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "MAX_LOOKED_AT", 100)
    log = tmp_path / "log"
    log.write_text("step 1\n" * 50 + "httpx.ConnectError: x\n" * 1000)
    read = told(str(log))
    assert read["followed"] == {"TRANSPORT.CONNECT": 99}
    assert read["cut"] == "only the input up to line 150 was looked at: it is full of failures"


def test_every_way_in_which_a_failure_is_named_holds_a_mark() -> None:
    for name in NAMES:
        marks = [mark.decode() for mark in MARKS]
        read = told("-", stdin=(SAMPLES / f"{name}.txt").read_text())
        assert any(mark in read["evidence"] for mark in marks)


# -- whole logs


def test_the_log_of_a_real_ray_driver(tmp_path: Path) -> None:
    """What Ray 2.60 printed to a driver's terminal while two actors, three tasks and an __init__ failed:
    prefixes, colours, lines that stand for others, tracebacks of several processes between each other."""
    log = LOGS / "ray_driver.log"
    read = told(str(log))
    assert (read["code"], read["trust"], read["line"]) == ("ENGINE.EXITED", "structured", 3)
    assert (read["source"], read["key"]) == ("Trainer pid=24188", "engine/0")
    assert read["followed"] == {
        "TRANSPORT.CONNECT": 7,  # twice in the trainer; a task, and the two for which a line stands; 2 more
        "ACTOR.INIT_FAILED": 3,  # at the driver, and by each of two workers
        "TASK.FAILED": 2,  # at the driver, and as an error that nobody fetched
        "ACTOR.DIED": 1,
        "TASK.WORKER_CRASHED": 1,  # as the raylet says it
    }
    text = log.read_text()
    without = told("-", stdin="".join(line for line in text.splitlines(True) if '"ts":' not in line))
    assert (without["code"], without["line"]) == ("TASK.FAILED", 23)
    assert without["evidence"].startswith("ValueError: bad batch [in ray::Trainer.step() (pid=24188, ")
    lines = {kind["what"]: kind["line"] for kind in read["later"]}
    assert "ActorDiedError" in text.splitlines()[lines["ACTOR.DIED"] - 1]
    assert "(raylet)" in text.splitlines()[lines["TASK.WORKER_CRASHED"] - 1]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: f"Nov 30 06:59:02 host python[123]: {line}",
        lambda line: f"2026-11-30T07:06:05.351123456Z stderr F {line}",
        lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "t"}, separators=(",", ":")),
    ],
    ids=["journald", "CRI", "docker"],
)
def test_the_same_log_through_what_stores_logs(wrap: Any) -> None:
    text = (LOGS / "ray_driver.log").read_text()
    read, wrapped = told("-", stdin=text), told("-", stdin="\n".join(map(wrap, text.split("\n"))))
    for fact in ("code", "trust", "line", "followed", "id", "events"):
        assert wrapped[fact] == read[fact]
    assert wrapped["source"].endswith("Trainer pid=24188")


def interleaved(*logs: list[str]) -> str:
    """Round robin: one line of each in turn."""
    out = []
    for n in range(max(map(len, logs))):
        out += [log[n] for log in logs if n < len(log)]
    return "\n".join(out) + "\n"


def test_workers_whose_lines_are_interleaved_are_told_apart() -> None:
    logs = []
    for n, name in enumerate(("killed", "an_ordinary_exception", "aiohttp_503", "init_failed")):
        text = (SAMPLES / f"{name}.txt").read_text()
        logs.append([f"(W pid={n}) {line}" for line in text.rstrip("\n").split("\n")])
    alone = {told("-", stdin="\n".join(log))["code"] for log in logs}
    read = told("-", stdin=interleaved(*logs))
    assert {read["code"], *read["followed"]} == alone
    assert len(alone) == 4
    assert set(read["followed"].values()) == {1}


def test_ranks_that_print_over_each_other_are_told_apart() -> None:
    """PyTorch's excepthook puts its rank before each line, but for the empty ones (torch 2.2 and later)."""
    chain = f"{TRACE}ConnectionResetError: by peer\n{CAUSE}{TRACE}RuntimeError: no group\n"
    logs = [[f"[rank{n}]: {line}" if line else "" for line in chain.split("\n")] for n in range(3)]
    read = told("-", stdin=interleaved(*logs) + "TimeoutError: the launcher gave up\n")
    assert (read["code"], read["source"], read["line"]) == ("TRANSPORT.DISCONNECTED", "rank0", 10)
    assert read["followed"] == {"TRANSPORT.DISCONNECTED": 2, "TIMEOUT.DEADLINE": 1}


def test_a_traceback_with_other_lines_of_the_same_process_in_between() -> None:
    text = (SAMPLES / "aiohttp_503.txt").read_text()
    lines = text.splitlines()
    noisy = "\n".join(f"{line}\nstep {n} took 3 s" for n, line in enumerate(lines))
    read = told("-", stdin=noisy)
    assert read["code"] == told("-", stdin=text)["code"]
    assert read["followed"] == {}


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize("chain", [CAUSE, DURING])
def test_of_a_chain_the_cause_comes_first(chain: str) -> None:
    text = f"{TRACE}ConnectionRefusedError: no\n{chain}{TRACE}httpx.ReadTimeout: slow\n"
    read = told("-", stdin=text)
    assert (read["code"], read["line"]) == ("TRANSPORT.CONNECT", 4)
    assert read["followed"] == {"TIMEOUT.READ": 1}
    unknown = told("-", stdin=text.replace("ConnectionRefusedError: no", "KeyError: 'x'"))
    assert (unknown["code"], unknown["followed"]) == ("TIMEOUT.READ", {})
    assert unknown["before"] == "line 4: KeyError: 'x'"
    prefixed = told("-", stdin=_before_each_line("(A pid=1) ", text))
    assert (prefixed["code"], prefixed["followed"]) == (read["code"], read["followed"])


def test_what_a_token_names_is_not_counted_again_by_its_exceptions() -> None:
    error = CodedError("WEIGHTS.REFIT_ABORTED", "httpx.ConnectError: no")
    text = f"{TRACE}httpx.ConnectError: no\n{CAUSE}{TRACE}protocol.errors.CodedError: {error}\n"
    read = told("-", stdin=text + text + f"again {error}\n")
    assert (read["code"], read["id"], read["followed"]) == ("WEIGHTS.REFIT_ABORTED", error.id, {})
    assert read["line"] == 11
    other = CodedError("ENGINE.EXITED", "x")
    read = told("-", stdin=f"{text}{TRACE}protocol.errors.CodedError: {other}\n")
    assert read["followed"] == {"ENGINE.EXITED": 1}


@pytest.mark.parametrize(
    "code",
    ["CANCEL.CALLER", "CANCEL.REMOTE", "POOL.CLOSED", "UPSTREAM.NO_ENGINE", "POOL.NO_POSTER",
     "UNKNOWN.EXCEPTION", "REQUEST.OUTCOME_UNKNOWN", "OBJECT.OWNER_DIED"],
)  # fmt: skip
def test_a_consequence_is_first_only_where_nothing_else_is(tmp_path: Path, code: str) -> None:
    log = tmp_path / "events.jsonl"
    with Events.to_file(log, run="r", role="x") as events:
        events.emit("a", level="error", error=CodedError(code, "gave up"))
        alone = told(str(log))
        events.emit("b", level="error", error=CodedError("ENGINE.EXITED", "signal 9"))
    assert (alone["code"], alone["followed"]) == (code, {})
    read = told(str(log))
    assert (read["code"], read["line"], read["followed"]) == ("ENGINE.EXITED", 2, {f"a {code}": 1})


def test_a_cancellation_that_became_a_timeout_is_a_timeout() -> None:
    text = f"{TRACE}asyncio.exceptions.CancelledError\n{CAUSE}{TRACE}TimeoutError\n"
    assert told("-", stdin=text)["code"] == "TIMEOUT.DEADLINE"


def test_an_exception_that_no_table_names_before_the_first_failure_is_shown() -> None:
    done = run("explain", "-", stdin=f"{TRACE}ValueError: bad batch\nstep 2\nhttpx.ConnectError: x\n")
    assert "before    line 4: ValueError: bad batch" in done.stdout
    assert "line      6" in done.stdout
    assert "before" not in run("explain", "-", stdin=f"httpx.ConnectError: x\n{TRACE}ValueError: y\n").stdout


def test_a_token_that_shows_only_without_its_colours_is_a_guess_in_a_traceback_too() -> None:
    token = mint("WEIGHTS.REFIT_ABORTED")
    text = f"{TRACE}RuntimeError: {token[:2]}\x1b[0m{token[2:]}\n"
    assert told("-", stdin=text)["trust"] == "heuristic"
    assert told("-", stdin=text.replace("\x1b[0m", ""))["trust"] == "checksummed"


def test_a_progress_bar_before_a_traceback_does_not_hide_it() -> None:
    read = told("-", stdin=f" 50%|███   | 1/2 [00:01<00:01]{TRACE}httpx.ConnectError: x\n")
    assert (read["code"], read["line"]) == ("TRANSPORT.CONNECT", 4)


def test_where_and_when_each_failure_stands_is_told() -> None:
    lines = ["httpx.ConnectError: x", "step 1", "httpx.ReadTimeout: y", "httpx.ReadTimeout: z"]
    text = "".join(f"2026-11-30T07:06:0{n}Z stderr F (A pid=1) {line}\n" for n, line in enumerate(lines))
    read = told("-", stdin=text)
    assert (read["at"], read["source"], read["line"]) == ("2026-11-30T07:06:00Z", "stderr A pid=1", 1)
    assert read["later"] == [{"what": "TIMEOUT.READ", "count": 2, "line": 3, "at": "2026-11-30T07:06:02Z"}]
    assert (
        "followed  TIMEOUT.READ ×2 (line 3, 2026-11-30T07:06:02Z)" in run("explain", "-", stdin=text).stdout
    )


def test_signed_tokens_need_the_key_and_it_says_so(tmp_path: Path) -> None:
    ring, other = Keyring.generate(), Keyring.generate()
    log, events_file = tmp_path / "log", tmp_path / "events.jsonl"
    hold(ring)
    try:
        error = CodedError("WEIGHTS.REFIT_ABORTED", "x")
        log.write_text(f"step 1\nException: {error}\n")
        with Events.to_file(events_file, run="r", role="x") as events:
            events.emit("a", level="error", error=error)
    finally:
        hold(None)
    for name, one in (("key", ring), ("other", other)):
        save(one, tmp_path / name)
    read = told(str(log), "--key", str(tmp_path / "key"))
    assert (read["code"], read["trust"], read["id"]) == ("WEIGHTS.REFIT_ABORTED", "signed", error.id)
    assert told(str(events_file), "--key", str(tmp_path / "key"))["trust"] == "structured"
    for arguments in ((), ("--key", str(tmp_path / "other"))):
        read = told(str(log), *arguments)
        assert read["recognised"] is False
        assert read["unread"].startswith("1 tokens that could not be verified")
        assert told(str(events_file), *arguments)["trust"] == "heuristic"


FRAGMENTS = st.sampled_from(
    [
        *("Traceback (most recent call last):", '  File "a.py", line 1, in f', "    ^^^", ""),
        *(CAUSE.strip(), DURING.strip(), "Original exception:", "\t ip: 1", "  | KeyError", "\r", "\x1b[0m"),
        *("httpx.ConnectError: x", "ValueError: y", "(A pid=1) ", " [repeated 2x across cluster]"),
        *("ray.exceptions.RayTaskError(ValueError): ray::A.f() (pid=1)", mint("NODE.IO")),
        *(
            '{"ts":1,"level":"error","event":"x","code":"NODE.IO","id":',
            json.dumps({**EVENT, "code": "NODE.IO"}),
        ),
        "  + Exception Group Traceback (most recent call last):",
        "Unhandled error (suppress with 'X'): ray::f() (pid=1)",
        "Exception raised in creation task: The actor died",
    ]
)


@given(st.lists(st.lists(FRAGMENTS, min_size=1, max_size=3).map("".join), max_size=40))
def test_no_log_is_too_strange(lines: list[str]) -> None:
    """Whatever stands in it, each line of it is read, and what is told can be printed."""
    story = Story()
    for number, line in enumerate(lines, 1):
        story.feed(number, line.encode())
    story.end()
    assert not story.open
    total = sum(kind.count for kind in story.followed)
    assert (total == 0) if story.first is None else (1 <= story.first.line <= len(lines))
    assert all(kind.count > 0 and kind.places for kind in story.followed)


def test_what_never_ends_is_ended() -> None:
    """Tracebacks of many workers that were cut: they are not kept for ever, nor is every line read."""
    story = Story()
    for n in range(3000):
        story.feed(n + 1, f"(W{n} pid={n}) Traceback (most recent call last):".encode())
        assert len(story._open) <= 64
    for n in range(3000, 5000):
        story.feed(n, b"step 1")
    assert not story.open


def test_colours_only_on_a_terminal_and_not_where_they_are_unwanted() -> None:
    """On a real terminal (a pty)."""
    import pty

    def shown(**environment: str) -> str:
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "failsoft", "explain", str(SAMPLES / "killed.txt")],
            stdin=subprocess.DEVNULL, stdout=follower, cwd=ROOT,
            env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **environment},
        )  # fmt: skip
        os.close(follower)
        out = b""
        try:
            while chunk := os.read(leader, 65536):
                out += chunk
        except OSError:  # EIO: the other end is closed
            pass
        os.close(leader)
        assert process.wait(50) == 0
        return out.decode()

    coloured, plain = shown(), shown(NO_COLOR="1")
    assert "\x1b[1;32mrecreate" in coloured
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain), "no colour"
    assert "ACTOR.DIED" in plain


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


def test_a_long_events_file_is_read_whole_when_piped_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Events.to_file(path, run="r1", role="driver") as events:
        events.emit("engine.exited", level="error", error=CodedError("ENGINE.EXITED", "signal 9"))
        events.emit("post.done", detail="x" * 1000)
        events.emit("poster.died", level="error", error=CodedError("ACTOR.DIED"))
    first, line, last = path.read_text().splitlines(keepends=True)
    count = 10 * CHUNK // len(line)
    path.write_text(first + line * count + last)
    for read in (told(str(path)), told("-", stdin=path.read_bytes())):
        assert (read["code"], read["event"]) == ("ENGINE.EXITED", "engine.exited")
        assert (read["events"], read["followed"]) == (count + 2, {"poster.died ACTOR.DIED": 1})


def test_an_occurrence_that_is_reported_again_is_one_failure(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    error = CodedError("ENGINE.EXITED", "signal 9")
    with Events.to_file(path, run="r1", role="driver") as events:
        for event in ("engine.exited", "post.failed", "run.failed"):
            events.emit(event, level="error", error=error)
    path.write_text(f"{path.read_text()}{TRACE}protocol.errors.CodedError: {error}\n")
    read = told(str(path))
    assert (read["event"], read["line"], read["followed"]) == ("engine.exited", 1, {})


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


def test_a_terminal_without_unicode_is_told_all_the_same() -> None:
    """A locale such as en_US.ISO-8859-1, and an exception in another script."""
    done = subprocess.run(
        [sys.executable, "-m", "failsoft", "explain", "-"],
        input=f"{TRACE}ConnectionRefusedError: \u062a\n".encode(), capture_output=True, cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"}, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"ConnectionRefusedError: \\u062a\n" in done.stdout
    assert b"followed  nothing" in done.stdout
