"""``failsoft rollout`` from outside: what it writes, what it says, how it ends, what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.dispatch.embedded.engine_under_test import EngineUnderTest
from tests.dispatch.rollout.servers import OPENAI_ONLY, PAGE, serving
from tests.failsoft.command import Command, argv, keys, prompts_file

pytestmark = pytest.mark.timeout(150)

ENGINE, POSTER = "dispatch.engines.embedded", "ray::Poster"
QUICK = ("--token-rate", 1000, "--max-new-tokens", 24, "--concurrency", 8)
SLOW = ("--token-rate", 60, "--max-new-tokens", 24, "--concurrency", 8)


def expected(prompts: int, n: int) -> set[tuple[str, int]]:
    return {(f"p{p}", i) for p in range(prompts) for i in range(n)}


def complete(command: Command, prompts: int, n: int) -> None:
    """Every sample is there, once."""
    found = keys(command.samples())
    assert len(found) == len(set(found)) == prompts * n
    assert set(found) == expected(prompts, n)


# ---- the demonstration


def test_a_run_in_which_things_die(tmp_path: Path) -> None:
    """A poster and an engine are killed in the middle; nobody loses a sample by it."""
    file = prompts_file(tmp_path / "prompts.jsonl", 40)
    with Command(
        tmp_path,
        "rollout",
        file,
        "--out",
        "out",
        "--token-rate",
        300,
        "--concurrency",
        16,
        "--max-new-tokens",
        32,
    ) as command:
        assert command.wait() == 0, command.stdout + command.stderr
        assert any(POSTER in kind for kind in command.kinds), "the posters were looked for and seen"
        assert any(ENGINE in kind for kind in command.kinds), "the engines were looked for and seen"
        assert any("raylet" in kind for kind in command.kinds), "and so was Ray"
        command.gone(15.0)
        complete(command, 40, 4)
        (result,) = command.told("result")
        lost, posters, engines = map(
            int, re.findall(r"lost (\d+), posters recreated (\d+), engines restarted (\d+)", result)[0]
        )
        assert lost == 0
        assert posters >= 1
        assert engines >= 1
        summary = command.summary()
        assert (summary["lost"], summary["posters_recreated"], summary["engines_restarted"]) == (
            lost,
            posters,
            engines,
        )
        assert (summary["exit"], summary["asked"], summary["completed"], summary["failed"]) == (
            0,
            160,
            160,
            0,
        )
        assert command.told("samples")[0] == "asked 160 · completed 160 · failed 0"
        assert summary["retried"] == sum(summary["retried_by_code"].values()) > 0
        assert [i.split(" (")[0] for i in summary["injuries"]] == [
            f"SIGKILL to {key}" for key in _struck(summary, "poster/", "engine/")
        ]
        alerts = command.told("alerts")
        assert alerts == summary["alerts"]
        for rule in ("poster-died", "engine-died"):
            assert any(re.search(rf"{rule} fired .*resolved after", line) for line in alerts), alerts
        assert summary["stopped_by"] == ""
        assert not (command.out / "failures.jsonl").exists()
        assert all(one["text"] and one["finish_reason"] in ("stop", "length") for one in command.samples())
        events = (command.out / "events.jsonl").read_text().splitlines()
        names = {json.loads(line)["event"] for line in events}
        assert {"chaos.injected", "poster.died", "pool.closed"} <= names


def _struck(summary: dict[str, Any], *prefixes: str) -> list[str]:
    """The keys that recoveries name, in the order in which they were struck."""
    found = [r["key"] for r in summary["recoveries"]]
    return [next(key for key in found if key.startswith(prefix)) for prefix in prefixes]


# ---- engines of one's own


@pytest.mark.parametrize(("api", "extra"), [("auto", []), ("openai", ["--stream"])])
def test_engines_that_run_already(api: str, extra: list[str], tmp_path: Path) -> None:
    """They are used, nothing is killed, and a cluster that RAY_ADDRESS names is left alone: without
    --ray-address the run has a Ray of its own."""
    file = prompts_file(tmp_path / "prompts.jsonl", 6)
    with (
        EngineUnderTest.start("--token-rate", "1000") as one,
        EngineUnderTest.start("--token-rate", "1000") as two,
    ):
        urls = ["--engine", one.url + "/v1/", "--engine", two.url]
        with Command(
            tmp_path,
            *("rollout", file, "--out", "out", *urls, "--api", api, "-n", 3, "--max-new-tokens", 16, *extra),
            RAY_ADDRESS="127.0.0.1:1",
        ) as command:
            assert command.wait() == 0, command.stdout + command.stderr
            command.gone(15.0)
            complete(command, 6, 3)
            assert {s["engine"] for s in command.samples()} == {one.url, two.url}
            summary = command.summary()
            assert (summary["injuries"], summary["engines_restarted"], summary["retried"]) == ([], 0, 0)
        for engine in (one, two):
            counts = engine.wait_counts(in_flight=0)
            assert (counts["disconnected"], counts["aborted"], counts["refused"]) == (0, 0, 0)
        assert sum(e.counts()["completed"] for e in (one, two)) == 18 + 2  # and one to see whether it is one


def test_engines_that_all_die(tmp_path: Path) -> None:
    """The run ends: what came is on disk, what did not is a failure with its name."""
    file = prompts_file(tmp_path / "prompts.jsonl", 12)
    with (
        EngineUnderTest.start("--token-rate", "60") as engine,
        Command(
            tmp_path,
            *("rollout", file, "--out", "out", "--engine", engine.url, "-n", 2, "--max-new-tokens", 24),
            *("--concurrency", 4, "--deadline", 2.5),
        ) as command,
    ):
        command.until_samples(3)
        engine.kill()
        assert command.wait() == 1, command.stdout + command.stderr
        command.gone(15.0)
        failures, samples = command.failures(), command.samples()
        both = keys(samples) + keys(failures)
        assert len(both) == len(set(both)) == 24
        assert set(both) == expected(12, 2)
        known = {"UPSTREAM.NO_ENGINE", "TRANSPORT.CONNECT", "TRANSPORT.DISCONNECTED", "UPSTREAM.TRUNCATED"}
        assert {f["code"] for f in failures} <= known | {"TIMEOUT.DEADLINE"}
        assert all(f["detail"] and f["error_id"] and f["request_id"] for f in failures)
        summary = command.summary()
        assert (summary["exit"], summary["lost"], summary["unfinished"]) == (1, 0, 0)
        assert (summary["completed"], summary["failed"]) == (len(samples), len(failures))
        assert sum(summary["failed_by_code"].values()) == len(failures)
        assert "lost 0" in command.told("result")[0]
        assert str(command.out / "failures.jsonl").endswith(command.told("failures")[0])
        assert "Traceback" not in command.stdout + command.stderr


# ---- bad inputs


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return prompts_file(tmp_path / "good.jsonl", 2)


Bad = Callable[[Path, Path], list[object]]


def _file(name: str, content: bytes | None) -> Bad:
    """A prompts file of this content; None for none."""

    def make(folder: Path, good: Path) -> list[object]:
        if content is not None:
            (folder / name).write_bytes(content)
        return [folder / name]

    return make


def _flags(*flags: object) -> Bad:
    return lambda folder, good: [good, *flags]


def _another_run(folder: Path, good: Path) -> list[object]:
    (folder / "out").mkdir()
    (folder / "out" / "samples.jsonl").write_text('{"prompt_id":"p0","index":0}\n')
    return [good]


BAD: dict[str, tuple[Bad, list[str]]] = {
    "missing": (_file("gone.jsonl", None), ["gone.jsonl", "no such file", "check the path"]),
    "empty": (_file("empty.jsonl", b"\n\n"), ["empty.jsonl", "no prompt", "prompt"]),
    "not-jsonl": (_file("a.jsonl", b"id,prompt\n1,hello\n"), ["a.jsonl, line 1", "one JSON object a line"]),
    "array": (_file("a.jsonl", b'[\n{"prompt": "a"}\n]\n'), ["a.jsonl, line 1", "JSON array", "jq -c"]),
    "no-prompt-field": (
        _file("a.jsonl", b'{"question": "a"}\n'),
        ["a.jsonl, line 1", "'question'", "rename"],
    ),
    "duplicate-ids": (
        _file("a.jsonl", b'{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n'),
        ["a.jsonl, line 2", "line 1", "its own id"],
    ),
    "not-utf8": (
        _file("a.jsonl", b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n'),
        ["a.jsonl, line 2", "0xe9", "iconv"],
    ),
    "odd-name": (_file("a:key:[red].jsonl", None), ["a:key:[red].jsonl", "no such file"]),
    "another-run": (_another_run, ["samples.jsonl", "--resume", "--overwrite"]),
    "url-malformed": (_flags("--engine", "localhost:30000"), ["localhost:30000", "http://127.0.0.1:30000"]),
    "url-refusing": (
        _flags("--engine", "http://127.0.0.1:1"),
        ["http://127.0.0.1:1", "nothing listens", "is the port right"],
    ),
    "n": (_flags("-n", 0), ["-n 0", "at least 1"]),
    "concurrency": (_flags("--concurrency", 0), ["--concurrency 0", "at least 1"]),
    "embedded": (_flags("--embedded", 0), ["--embedded 0", "--engine"]),
    "deadline": (_flags("--deadline", "nan"), ["--deadline nan", "above 0"]),
    "header": (_flags("--header", "Bearer-of-secrets"), ["--header number 1", "NAME: VALUE"]),
    "both-modes": (_flags("--resume", "--overwrite"), ["--resume", "--overwrite", "exclude"]),
}


def refused(folder: Path, *arguments: object) -> str:
    """Run it, and return the one line that it says."""
    done = subprocess.run(
        argv("rollout", *arguments), cwd=folder, capture_output=True, timeout=60.0, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("failsoft rollout: ")
    return line


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line(name: str, good: Path, tmp_path: Path) -> None:
    make, words = BAD[name]
    line = refused(tmp_path, *make(tmp_path, good), "--out", "out")
    for word in words:
        assert word in line
    assert "Bearer-of-secrets" not in line
    made = {p.name for p in (tmp_path / "out").iterdir()} if (tmp_path / "out").exists() else set()
    assert made <= {"samples.jsonl", ".lock"}, "nothing was begun"


def test_what_is_no_engine_gets_one_line(good: Path, tmp_path: Path) -> None:
    with serving({}) as missing, serving({}, otherwise=PAGE) as page:
        line = refused(tmp_path, good, "--out", "out", "--engine", missing.url)
        assert missing.url in line
        assert "404" in line
        line = refused(tmp_path, good, "--out", "out", "--engine", page.url)
        assert page.url in line
        assert "text/html" in line


def test_a_missing_key_names_the_flag(good: Path, tmp_path: Path) -> None:
    with serving(OPENAI_ONLY, authorization="Bearer right") as server:
        line = refused(tmp_path, good, "--out", "out", "--engine", server.url)
        assert "--header" in line
        header = ["--header", "Authorization: Bearer wr0ng"]
        assert "wr0ng" not in refused(tmp_path, good, "--out", "out", "--engine", server.url, *header)


# ---- stopped by a person


def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    """Ctrl-C in the middle, to the whole process group as a terminal sends it; then the rest."""
    file = prompts_file(tmp_path / "prompts.jsonl", 30)
    with Command(tmp_path, "rollout", file, "--out", "out", "-n", 4, *SLOW) as command:
        command.until_samples(20)
        command.signal(signal.SIGINT, group=True)
        assert command.wait(60.0) == 130, command.stdout + command.stderr
        command.gone(15.0)
        first = command.samples()
        assert 20 <= len(first) < 120
        summary = command.summary()
        assert (summary["exit"], summary["completed"], summary["lost"]) == (130, len(first), 0)
        assert (summary["failed"], summary["failed_by_code"]) == (0, {})
        assert summary["unfinished"] == 120 - len(first)
        assert "--resume" in command.told("stopped by")[0]
        assert "Traceback" not in command.stdout + command.stderr
    with Command(
        tmp_path, "rollout", file, "--out", "out", "-n", 4, *QUICK, "--no-chaos", "--resume"
    ) as command:
        assert command.wait() == 0, command.stdout + command.stderr
        command.gone(15.0)
        complete(command, 30, 4)
        assert command.samples()[: len(first)] == first
        summary = command.summary()
        assert (summary["skipped"], summary["completed"]) == (len(first), 120 - len(first))
        assert (command.out / "events.1.jsonl").exists()


def test_sigterm(tmp_path: Path) -> None:
    """A scheduler's TERM is an orderly end with a status of its own."""
    file = prompts_file(tmp_path / "prompts.jsonl", 30)
    with Command(tmp_path, "rollout", file, "--out", "out", *SLOW, "--no-chaos") as command:
        command.until_samples(5)
        command.signal(signal.SIGTERM)
        assert command.wait(60.0) == 143, command.stdout + command.stderr
        command.gone(15.0)
        assert keys(command.samples())
        summary = command.summary()
        assert (summary["exit"], summary["lost"], summary["failed"]) == (143, 0, 0)
        assert "SIGTERM" in command.told("stopped by")[0]
        assert "Traceback" not in command.stdout + command.stderr


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    file = prompts_file(tmp_path / "prompts.jsonl", 30)
    with Command(tmp_path, "rollout", file, "--out", "out", *SLOW, "--no-chaos") as command:
        command.until_samples(5)
        command.signal(signal.SIGINT)
        command.until(lambda: "once more" in command.stdout, "it says how to stop at once")
        command.signal(signal.SIGINT)
        assert command.wait(20.0) == 130
        assert command.told("result") == []  # it did not wait for an orderly end
        command.gone(60.0, ENGINE, POSTER, "guard.py", "ray::EngineSupervisor")
        assert keys(command.samples())  # whole lines, all of them


def test_sigkill(tmp_path: Path) -> None:
    """Nobody can clean up after SIGKILL but those who outlive it."""
    file = prompts_file(tmp_path / "prompts.jsonl", 30)
    with Command(tmp_path, "rollout", file, "--out", "out", *SLOW, "--no-chaos") as command:
        command.until_samples(5)
        assert command.alive(ENGINE)
        assert command.alive(POSTER)
        command.process.kill()
        command.process.wait(20.0)
        command.gone(60.0, ENGINE, POSTER, "guard.py", "ray::EngineSupervisor")  # Ray and the guard see to it


# ---- a full disk


@contextmanager
def _tmpfs(folder: Path, size: int) -> Iterator[bool]:
    """A small disk at ``folder``, where this user may mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _limit_files(command: Command) -> None:
    """No file of the command may grow by more than a sample from here on."""
    size = (command.out / "samples.jsonl").stat().st_size + 600
    psutil.Process(command.process.pid).rlimit(psutil.RLIMIT_FSIZE, (size, size))


def test_a_full_disk(tmp_path: Path) -> None:
    """It ends with what fitted, whole, and one line that says how to go on."""
    file = prompts_file(tmp_path / "prompts.jsonl", 100)
    with (
        _tmpfs(tmp_path / "out", 64 * 1024) as mounted,
        Command(tmp_path, "rollout", file, "--out", "out", *QUICK, "--no-chaos") as command,
    ):
        if not mounted:
            command.until_samples(3)
            _limit_files(command)
        assert command.wait() == 1, command.stdout + command.stderr
        command.gone(15.0)
        said = command.stdout + command.stderr
        assert "Traceback" not in said
        (line,) = [line for line in said.splitlines() if "--resume" in line]
        assert "samples.jsonl could not be written" in line
        assert "free some space" in line or "ulimit" in line
        found = keys(command.samples())
        assert 0 < len(found) == len(set(found)) < 400
        assert f"{len(found)} whole samples" in line
        assert "lost 0" in command.told("result")[0]
        assert {p.name for p in command.out.iterdir()} <= {
            *(".lock", "samples.jsonl", "events.jsonl", "summary.json")
        }, "no temporary file stays"


def test_an_output_folder_that_cannot_be_made(good: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused(tmp_path, good, "--out", "file/out")
    assert "file/out" in line
    assert os.listdir(tmp_path) in (["file", "good.jsonl"], ["good.jsonl", "file"])
