"""`failsoft explain` and `failsoft codes`: from what a person has in hand to what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from failsoft.cli.codes import as_dict, codes, markdown
from failsoft.cli.explain import MAX_INPUT, explain
from faults import classify_text
from protocol import Code, CodedError, Events, Family, catalogue, mint

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "faults" / "samples"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.txt"))
FACTS = ("code", "kind", "blame", "outcome", "trust", "advice", "meaning", "runbook", "evidence")

app = typer.Typer()
app.command()(explain)
app.command()(codes)


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


def test_markup_and_secrets_in_the_text_are_plain() -> None:
    text = "httpx.ConnectError: [bold]http://user:s3cr3t@host[/bold] [link=x]\n"
    done = run("explain", "-", stdin=text)
    assert done.exit_code == 0
    assert "[bold]" in done.stdout
    assert "s3cr3t" not in done.stdout


@pytest.mark.parametrize("text", ["all is well\n", "ValueError: x\n", "{}\n", "[1, 2]\n", "\ufffd\n"])
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


def test_memory_is_bounded_on_a_pipe_without_end() -> None:
    """200 MB through a pipe, in a process that may have 1 GB of address space beyond what it maps."""
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
    base: dict[str, Any] = json.loads(
        '{"ts":1,"level":"error","event":"a","code":null,"id":null,"key":"","run":"","role":"","host":"","pid":1,'
        '"detail":"","data":{}}'
    )
    rows = [
        base,
        {**base, "code": 5},
        {**base, "code": "nonsense"},
        {**base, "code": "GPU.ECC"},
        {**base, "level": []},
    ]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {**base, "code": "NODE.IO", "detail": [1]}])
    )
    assert told(str(path))["code"] == "NODE.IO"


# -- the catalogue


def test_codes_lists_every_code() -> None:
    done = run("codes")
    assert done.exit_code == 0
    for entry in catalogue:
        assert str(entry.code) in done.stdout


def test_codes_as_json() -> None:
    done = run("codes", "--json")
    assert json.loads(done.stdout) == [as_dict(entry) for entry in catalogue]
    assert json.loads(run("codes", "node.io", "--json").stdout) == as_dict(catalogue.entry("NODE.IO"))


def test_one_code_in_words() -> None:
    done = run("codes", "NODE.IO")
    assert done.exit_code == 0
    for value in as_dict(catalogue.entry("NODE.IO")).values():
        assert value in done.stdout


@pytest.mark.parametrize("wrong", ["nonsense", "NODE.NEVER_SEEN", "GPU.ECC", "NODE."])
def test_a_code_that_is_none_is_one_line_and_status_2(wrong: str) -> None:
    done = run("codes", wrong)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert wrong.upper() in done.stderr


def test_the_page_is_the_catalogue() -> None:
    page = (ROOT / "docs" / "codes.md").read_text()
    assert page == markdown(), "write it anew: make docs"
    assert run("codes", "--markdown").stdout == page


def test_the_page_holds_every_code_once_in_a_whole_table() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [str(entry.code) for entry in catalogue]
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)
    families = [line[3:] for line in markdown().splitlines() if line.startswith("## ")]
    assert families == [f for f in Family if any(e.code.family is f for e in catalogue)]


def test_the_front_door_has_both_commands() -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    text = f"x {mint(Code('NODE.IO'))}\n"
    done = subprocess.run(
        [sys.executable, "-c", "from failsoft.cli import main; main()", "explain", "-"],
        input=text, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "NODE.IO" in done.stdout
