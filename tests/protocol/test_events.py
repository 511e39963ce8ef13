"""Events: one JSON object a line, always with the same keys, whatever goes in and whoever writes."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol import CodedError, Events, Trust, keys, mint, read
from protocol.carriers.log_line import read_line
from protocol.events import KEYS
from protocol.safe import MAX_DETAIL
from tests.protocol.badly_written import HOSTILE
from tests.support.full_disk import file_size_limit


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text("utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_the_keys_are_always_all_there_in_order(path: Path) -> None:
    with Events.to_file(path, run="r1", role="driver") as events:
        events.emit("a.b")
        events.emit("c.d", level="error", error=CodedError("TASK.FAILED", "d"), key="k", n=1)
    bare, full = lines(path)
    assert tuple(bare) == tuple(full) == KEYS
    assert (bare["level"], bare["event"], bare["code"], bare["id"]) == ("info", "a.b", None, None)
    assert (bare["key"], bare["detail"], bare["data"]) == ("", "", {})
    assert (bare["run"], bare["role"], bare["pid"]) == ("r1", "driver", os.getpid())
    assert abs(bare["ts"] - time.time()) < 60
    assert full["data"] == {"n": 1}


def test_an_error_fills_in_code_id_and_detail(path: Path) -> None:
    error = CodedError("ENGINE.EXITED", "signal 9")
    raw = mint("NODE.IO", "ABCDEFGH")
    with Events.to_file(path, run="r", role="x") as events:
        events.emit("a", error=error)
        events.emit("b", error=error, code="TASK.FAILED", detail="said so")
        events.emit("c", error=ValueError("plain"))
        events.emit("d", error=ValueError(f"text {raw}"))
    a, b, c, d = lines(path)
    assert (a["code"], a["id"], a["detail"]) == ("ENGINE.EXITED", error.id, "signal 9")
    assert (b["code"], b["id"], b["detail"]) == ("TASK.FAILED", error.id, "said so")
    assert (c["code"], c["id"], c["detail"]) == (None, None, "plain")
    assert (d["code"], d["id"]) == ("NODE.IO", "ABCDEFGH")
    assert read(a).code == "ENGINE.EXITED"


def test_a_code_that_anybody_could_have_written_is_not_signed(path: Path) -> None:
    """A document of another server without a token: the event must not lend it the run's word."""
    document = b'{"code": "ENGINE.UNHEALTHY", "instance": "7KQ2M9XA", "detail": "said so"}'
    request = httpx.Request("POST", "http://engine")
    reply = httpx.Response(
        503, headers={"content-type": "application/problem+json"}, content=document, request=request
    )
    error = httpx.HTTPStatusError("503", request=request, response=reply)
    keys.hold(keys.Keyring.generate())
    try:
        with Events.to_file(path, run="r", role="x") as events:
            events.emit("a", error=error)
            events.emit("b", error=error, code="ENGINE.EXITED")  # the caller's own word
        theirs, ours = path.read_text().splitlines()
        assert read(error).trust is Trust.CHECKSUMMED
        assert [read_line(line).trust for line in (theirs, theirs[40:])] == [Trust.CHECKSUMMED] * 2
        assert read_line(theirs[40:]).id == "7KQ2M9XA"
        assert read_line(ours[40:]).trust is Trust.SIGNED
    finally:
        keys.hold(None)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_levels(path: Path, level: Any) -> None:
    with Events.to_file(path, run="r", role="x") as events:
        events.emit("a", level=level)
    assert lines(path)[0]["level"] == level


NASTY = ["a\nb", "\r\n", "\u2028 \x85 \x0b", "\0", "\ud800", '{"a": 1}', "\x1b[31m", "x" * 100_000, "ünï"]


@pytest.mark.parametrize("text", NASTY, ids=lambda t: ascii(t[:10]))
def test_one_event_is_one_line(path: Path, text: str) -> None:
    with Events.to_file(path, run="r", role="x") as events:
        events.emit("a", key=text, detail=text, thing=text, nested={text: [text]})
        events.emit("b", error=ValueError(text))
    assert path.read_bytes().count(b"\n") == 2
    a, b = lines(path)
    assert tuple(a) == tuple(b) == KEYS
    assert len(b["detail"]) <= MAX_DETAIL


def test_secrets_are_redacted_by_key_and_in_text(path: Path) -> None:
    with Events.to_file(path, run="r", role="x") as events:
        events.emit(
            "a",
            key="http://user:s3cr3t@host",
            detail="Authorization: Bearer s3cr3ts3cr3t",
            headers={"Authorization": "s3cr3t", "X-Api-Key": "s3cr3t"},
            password="s3cr3t",
            url="http://h/?token=s3cr3t",
        )
        events.emit("b", error=ValueError("http://user:s3cr3t@host"))
    assert "s3cr3t" not in path.read_text()
    assert lines(path)[0]["data"]["password"] == "[redacted]"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_errors_and_values_are_written(path: Path, name: str) -> None:
    with Events.to_file(path, run="r", role="x") as events:
        events.emit("a", error=HOSTILE[name], thing=HOSTILE[name])
    assert tuple(lines(path)[0]) == KEYS


def test_four_processes_and_threads_do_not_interleave(path: Path) -> None:
    count = 400
    command = [sys.executable, "-m", "tests.protocol.writer", str(path)]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen([*command, f"w{n}", str(count)], cwd=root) for n in range(4)]
    with Events.to_file(path, run="r1", role="threads") as events:

        def write(name: str) -> None:
            for n in range(count):
                events.emit("writer.wrote", key=f"{name}/{n}", detail="y" * (n % 4000), n=n)

        threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [process.wait(timeout=50) for process in processes] == [0] * 4
    written = lines(path)
    assert all(tuple(event) == KEYS for event in written)
    counts = Counter(event["key"].partition("/")[0] for event in written if event["event"] == "writer.wrote")
    assert counts == {f"{kind}{n}": count for kind in "tw" for n in range(4)}
    for name in counts:
        numbers = [e["data"]["n"] for e in written if e["key"].startswith(f"{name}/")]
        assert numbers == sorted(numbers), "each writer's events stay in its order"
    assert len({event["pid"] for event in written}) == 5
    assert sum(event["event"] == "writer.done" for event in written) == 4


def test_the_pid_is_that_of_the_process_that_writes(path: Path) -> None:
    with Events.to_file(path, run="r", role="x") as events:
        child = os.fork()
        if child == 0:
            events.emit("child")
            os._exit(0)
        os.waitpid(child, 0)
        events.emit("parent")
    assert {e["event"]: e["pid"] for e in lines(path)} == {"child": child, "parent": os.getpid()}


def test_a_file_is_appended_to_and_closed_once(path: Path) -> None:
    for _ in range(2):
        events = Events.to_file(path, run="r", role="x")
        events.emit("a")
        events.close()
        events.close()
        events.emit("after the end")
    assert [event["event"] for event in lines(path)] == ["a", "a"]


@pytest.mark.parametrize("new", [True, False], ids=["and made anew", "and gone"])
def test_a_file_that_is_rotated(path: Path, new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who follows the name (`faults.alerts.tail`) sees what comes after it."""
    monkeypatch.chdir(path.parent)
    with Events.to_file(Path(path.name), run="r", role="x") as events:
        monkeypatch.chdir("/")
        events.emit("before")
        old = path.rename(path.with_suffix(".1"))
        if new:
            path.touch()
        events.emit("after")
        events.emit("again")
        old.unlink()
        path.parent.rename(path.parent.with_suffix(".gone"))
        events.emit("without a directory")
    lines_of = lines(path.parent.with_suffix(".gone") / path.name)
    assert [event["event"] for event in lines_of] == ["after", "again", "without a directory"]


def test_a_disk_that_is_full_for_a_while(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who reports a failure must not fail for that. What the file misses goes to the log, and the file says
    that it is missing."""
    with Events.to_file(path, run="r", role="x") as events:
        events.emit("first")
        with file_size_limit(path.stat().st_size + 10):
            events.emit("half", level="warning", n=1)
            events.emit("none", level="error", error=CodedError("ACTOR.DIED", "poster/0"))
        events.emit("again")
        events.emit("after it")
    trouble, half, none = caplog.records
    assert trouble.getMessage() == f"{path} cannot be written, events go here until it can: File too large"
    assert json.loads(half.getMessage())["data"] == {"n": 1}
    assert (none.levelname, read(none.getMessage()).code) == ("ERROR", "ACTOR.DIED")
    first, torn, again, missing, after = path.read_text().splitlines()
    assert [json.loads(one)["event"] for one in (first, again, missing, after)] == [
        *("first", "again", "events.missing", "after it"),
    ]
    assert len(torn) == 10
    assert json.loads(missing)["data"] == {"count": 2}
    assert json.loads(missing)["level"] == "warning"


def test_a_full_device(caplog: pytest.LogCaptureFixture) -> None:
    with Events.to_file(Path("/dev/full"), run="r", role="x") as events:
        for _ in range(3):
            events.emit("one", level="warning")
    assert len(caplog.records) == 4
    assert os.strerror(errno.ENOSPC) in caplog.records[0].getMessage()


def test_without_a_file_events_go_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="failsoft"), Events(run="r", role="x") as events:
        events.emit("a.b", level="warning", n=1)
        events.emit("c.d", detail="50 % of {it}")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    for record in caplog.records:
        assert tuple(json.loads(record.getMessage())) == KEYS
