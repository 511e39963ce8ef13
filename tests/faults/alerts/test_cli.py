"""``failsoft alerts``: output, exit statuses, and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from failsoft.cli.alerts import app
from tests.faults.alerts.helpers import POSTER, Recorder, append, died, event, ready

cli = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text(POSTER)
    append(tmp_path / "ok.jsonl", died(), ready())
    append(tmp_path / "down.jsonl", died(), ready(), died("poster/1"))
    (tmp_path / "bad.jsonl").write_text("rubbish\n")
    return tmp_path


@pytest.mark.parametrize(("file", "status", "left"), [("ok", 0, 0), ("down", 1, 1), ("bad", 0, 0)])
def test_once(folder: Path, file: str, status: int, left: int) -> None:
    result = cli.invoke(
        app, ["run", str(folder / f"{file}.jsonl"), "--rules", str(folder / "rules.toml"), "--once"]
    )
    assert result.exit_code == status, result.output
    assert f"{left} left firing" in result.stdout
    assert ("FIRING critical poster-died poster/0 (ACTOR.DIED)" in result.stdout) is (file != "bad")


def test_the_default_rules_are_used_when_none_are_given(folder: Path) -> None:
    result = cli.invoke(app, ["run", str(folder / "down.jsonl"), "--once"])
    assert result.exit_code == 1
    assert "FIRING warning poster-died" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "none.jsonl", "--once"],
        ["run", "ok.jsonl", "--once", "--rules", "none.toml"],
        ["run", "ok.jsonl", "--once", "--webhook", "nope"],
        ["run", "ok.jsonl", "--once", "--alertmanager", "ftp://x"],
        ["check", "none.toml"],
        ["check", "ok.jsonl"],
        ["check", "rules.toml", "--events", "none.jsonl"],
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(folder: Path, arguments: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = cli.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("CONFIG.INVALID: ")
    assert result.stdout == ""


def test_check(folder: Path) -> None:
    result = cli.invoke(app, ["check", str(folder / "rules.toml")])
    assert result.exit_code == 0
    assert result.stdout == (
        "poster-died | any | critical | match event=poster.died | by key | resolve event=poster.ready\n"
    )


def test_check_says_how_often_each_would_have_fired(folder: Path) -> None:
    more = '[[rule]]\nname = "f"\ntype = "frequency"\nmatch = { event = "a|b*" }\ncount = 2\nwithin = 5\n'
    (folder / "rules.toml").write_text(POSTER + more)
    append(folder / "bad.jsonl", died(), event("other"))
    result = cli.invoke(app, ["check", str(folder / "rules.toml"), "--events", str(folder / "bad.jsonl")])
    first, second = result.stdout.splitlines()
    assert first.endswith("| fired 1 times, resolved 0")
    assert second.endswith("2 within 5 s | resolve after 5 s | fired 0 times, resolved 0")
    assert "1 lines were no events" in result.stderr


def test_lost_deliveries_are_one_line_and_change_no_status(folder: Path) -> None:
    url = "http://127.0.0.1:9"  # the discard port: nothing listens there
    result = cli.invoke(app, ["run", str(folder / "ok.jsonl"), "--once", "--webhook", url])
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"alert sink webhook {url}/ lost deliveries: 2 failed")
    assert "TRANSPORT.CONNECT" in line


@pytest.mark.parametrize(("name", "why"), [("typo.jsonl", "No such file"), (".", "it is not a regular file")])
async def test_it_says_what_it_waits_for(folder: Path, name: str, why: str) -> None:
    """The file may appear later, and its name may be wrong: nobody sees the difference in silence."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from failsoft.cli.alerts import app; app()", "run", str(folder / name)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), 20.0)
        assert f"waiting for the events file {folder / name}: {why}" in line.decode()
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20.0) == 143


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_ctrl_c_flushes_first(folder: Path, signum: int, status: int) -> None:
    async with Recorder() as server:
        server.gate.clear()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from failsoft.cli.alerts import app; app()",
            "run",
            str(folder / "down.jsonl"),
            "--rules",
            str(folder / "rules.toml"),
            "--webhook",
            server.url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert b"FIRING" in await asyncio.wait_for(process.stdout.readline(), 30.0)
            process.send_signal(signum)
            server.gate.set()
            _, err = await asyncio.wait_for(process.communicate(), 30.0)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == status, err
    assert [body["status"] for body in server.bodies] == ["firing", "resolved", "firing"]
    assert err == b""
