"""``failsoft engines`` from outside: real services, asked over their sockets, ended in every way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dispatch.engines.processes import FAKE
from tests.failsoft.command import Command, argv

pytestmark = pytest.mark.timeout(300)

ENGINE = """
[[engine]]
name = "{name}"
count = {count}
command = ["{{python}}", "-m", "dispatch.engines.embedded", "--port", "{{port}}", "--token-rate", "500"]
"""

STUBBORN = (
    f'[[engine]]\nterm_timeout = 60\ncommand = ["sh", "-c", '
    f'"trap \'\' TERM; exec {{python}} {FAKE} --port $PORT"]\nenv = {{ PORT = "{{port}}" }}\n'
)
"""An engine that would take a minute over TERM."""


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory for sockets. Short: a socket's path is at most 107 bytes, and pytest's are long."""
    folder = Path(tempfile.mkdtemp(prefix="fs"))
    yield folder
    shutil.rmtree(folder)


def up(folder: Path, runtime: Path, text: str, *flags: str) -> Command:
    file = folder / "demo.toml"
    file.write_text(text)
    return Command(folder, "engines", "up", file, *flags, XDG_RUNTIME_DIR=str(runtime))


def ask(runtime: Path, *arguments: object) -> tuple[int, str, str]:
    done = subprocess.run(
        argv("engines", *arguments),
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def status(runtime: Path) -> tuple[int, dict[str, Any]]:
    code, out, err = ask(runtime, "status", "--json")
    return code, json.loads(out) if out else {"error": err}


def until_ready(service: Command, count: int) -> None:
    service.until(lambda: service.stdout.count(" ready at http://") >= count, f"{count} engines are ready")


def test_a_life(tmp_path: Path, runtime: Path) -> None:
    with up(
        tmp_path,
        runtime,
        "[fleet]\nlog_dir = 'logs'\n[router]\nkind = 'static'\nfile = 'urls.json'\n"
        + ENGINE.format(name="small", count=2),
    ) as service:
        until_ready(service, 2)
        code, told = status(runtime)
        assert code == 0
        assert (told["name"], told["state"], told["pid"]) == ("demo", "running", service.process.pid)
        names = [(e["key"], e["name"], e["state"]) for e in told["engines"]]
        assert names == [("engine/0", "small/0", "ready"), ("engine/1", "small/1", "ready")]

        code, out, _ = ask(runtime, "status", tmp_path / "demo.toml")
        assert code == 0
        head, *lines = out.splitlines()
        assert head.startswith("fleet demo running: 2 of 2 engines ready, ")
        assert [line.split()[:3] for line in lines] == [
            ["engine/0", "(small/0)", "ready"],
            ["engine/1", "(small/1)", "ready"],
        ]

        folder = runtime / "failsoft"
        assert folder.stat().st_mode & 0o777 == 0o700
        code, _, err = ask(runtime, "up", tmp_path / "demo.toml")
        assert code == 2
        assert f"fleet 'demo' runs already, as pid {service.process.pid}: " in err
        assert status(runtime)[0] == 0, "the second one has not taken the first one's socket"

        code, _, err = ask(runtime, "drain", "engine/7")
        assert (code, err.count("\n")) == (2, 1)
        assert "there is no engine 'engine/7'; there are engine/0 (small/0), engine/1 (small/1)" in err

        os.kill(told["engines"][0]["pid"], signal.SIGKILL)
        until_ready(service, 3)
        code, told = status(runtime)
        assert (code, told["engines"][0]["restarts"], told["engines"][1]["restarts"]) == (0, 1, 0)
        assert "engine/0 (small/0) dead last failure ENGINE.EXITED: signal 9 (SIGKILL)" in service.stdout

        def published() -> set[str]:
            return set(json.loads((tmp_path / "urls.json").read_text())["urls"])

        service.until(lambda: published() == {e["url"] for e in told["engines"]}, "the router knows both")
        code, out, err = ask(runtime, "drain", "small/1", "--timeout", 60)
        assert (code, err) == (0, "")
        assert "fleet demo running: 1 of 2 engines ready" in out
        code, told = status(runtime)
        assert (code, [e["state"] for e in told["engines"]]) == (1, ["ready", "dead"])
        assert published() == {told["engines"][0]["url"]}
        code, out, err = ask(runtime, "restart", "small/1", "--timeout", 60)
        assert (code, err) == (0, "")
        assert "fleet demo running: 2 of 2 engines ready" in out
        assert ask(runtime, "drain", "small/1", "--timeout", 60)[0] == 0
        told = status(runtime)[1]
        assert not Path(f"/proc/{told['engines'][1]['pid']}").exists() or not told["engines"][1]["pid"]

        code, out, err = ask(runtime, "down", "demo")
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == "fleet demo is down"
        assert not service.alive("failsoft engines up", "engines.embedded"), "down returns when they are gone"
        assert service.wait(20) == 0, service.stderr
        service.gone(15)
        assert not list(folder.glob("*.sock"))
        assert list((tmp_path / "logs").iterdir())
        assert (
            ask(runtime, "status")[0] == ask(runtime, "down", "demo")[0] == ask(runtime, "drain", "x")[0] == 3
        )


def test_signals(tmp_path: Path, runtime: Path) -> None:
    """The first stops in order, the second kills."""
    with up(tmp_path, runtime, STUBBORN, "--json") as service:
        service.until(lambda: '"engine.ready"' in service.stdout, "it is ready")
        service.signal(signal.SIGTERM)
        service.until(lambda: "SIGTERM: stopping" in service.stderr, "it is told")
        code, told = status(runtime)
        assert (code, told["state"], told["engines"][0]["state"]) == (1, "stopping", "stopping")
        service.signal(signal.SIGINT)
        assert service.wait(30) == 0, service.stderr
        service.gone(15)
        events = [json.loads(line)["event"] for line in service.stdout.splitlines()]
        assert events == ["engine.starting", "engine.ready", "engine.stopped"]
        assert service.stderr.splitlines()[-1].endswith("fleet demo ended")


def test_a_signal_while_ray_starts(tmp_path: Path, runtime: Path) -> None:
    """Ray has a handler of its own meanwhile, which ends the process on the spot."""
    with up(tmp_path, runtime, STUBBORN) as service:
        service.until(lambda: service.alive("gcs_server"), "Ray starts")
        service.signal(signal.SIGTERM)
        assert service.wait(60) == 0, service.stderr
        assert "SIGTERM: stopping" in service.stdout
        assert service.stdout.splitlines()[-1].endswith("fleet demo ended")
        service.gone(60)


def test_down_has_a_limit_and_killed_ones_leave_a_stale_socket(tmp_path: Path, runtime: Path) -> None:
    with up(tmp_path, runtime, STUBBORN) as service:
        until_ready(service, 1)
        service.alive()
        service.signal(signal.SIGKILL)
        service.wait(20)
        service.gone(60, "fake_engine.py", "guard.py", "ray::EngineSupervisor")  # Ray and the guard see to it
    assert (runtime / "failsoft" / "demo.sock").exists()
    code, _, err = ask(runtime, "status", "demo")
    assert (code, err.count("\n")) == (3, 1)
    assert "its socket is left from one that was killed" in err
    assert ask(runtime, "status")[0] == 3
    with up(tmp_path, runtime, STUBBORN) as service:
        until_ready(service, 1)
        code, out, err = ask(runtime, "down", "--timeout", 0.5)
        assert (code, err) == (0, ""), out
        assert service.wait(20) == 0
        service.gone(15)


def test_all_given_up(tmp_path: Path, runtime: Path) -> None:
    with up(
        tmp_path, runtime, '[[engine]]\ncount = 2\ncommand = ["/no/such/program", "{port}"]\n'
    ) as service:
        assert service.wait(60) == 1
        assert "ENGINE.SPAWN_FAILED: /no/such/program: No such file or directory" in service.stdout
        assert service.stdout.splitlines()[-1].endswith("fleet demo ended")
        service.gone(15)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[fleet]\nname = 3", "demo.toml: fleet.name: Expected str, got int"),
        (
            "[fleet]\nray = '127.0.0.1:1'\n" + ENGINE.format(name="a", count=1),
            "there is no Ray at 127.0.0.1:1: Connection refused",
        ),
        (
            "[fleet]\nray = 'a..b:6379'\n" + ENGINE.format(name="a", count=1),
            "there is no Ray at a..b:6379: encoding with 'idna' codec failed",
        ),
    ],
)
def test_a_file_that_cannot_work(tmp_path: Path, runtime: Path, text: str, said: str) -> None:
    with up(tmp_path, runtime, text) as service:
        assert service.wait(100) == 2
        assert said in service.stderr
        assert service.stderr.count("\n") == 1
        service.gone(15)


def test_a_temporary_directory_that_ray_refuses(tmp_path: Path, runtime: Path) -> None:
    """Its sockets' paths would be too long (OSError, before anything is started)."""
    deep = runtime / ("x" * 60)
    deep.mkdir()
    file = tmp_path / "demo.toml"
    file.write_text(ENGINE.format(name="a", count=1))
    with Command(
        tmp_path, "engines", "up", file, XDG_RUNTIME_DIR=str(runtime), RAY_TMPDIR=str(deep)
    ) as service:
        assert service.wait(100) == 2
        assert "Ray does not start locally: " in service.stderr
        assert "RAY_TMPDIR" in service.stderr
        assert service.stderr.count("\n") == 1
        service.gone(15)


def test_arguments_that_are_wrong(runtime: Path, tmp_path: Path) -> None:
    assert ask(runtime, "up", tmp_path / "no.toml")[::2] == (
        2,
        f"failsoft engines up: {tmp_path}/no.toml: there is no such file; give an engines file\n",
    )
    assert ask(runtime, "status", "../x")[0] == 3
    assert ask(runtime, "status", "x" * 300)[0] == 3
    code, _, err = ask(runtime, "drain", "engine/0", "--timeout", "inf")
    assert (code, "Invalid value for '--timeout'" in err) == (2, True)
    (runtime / "failsoft").symlink_to(tmp_path)
    code, _, err = ask(runtime, "status")
    assert (code, err.count("\n")) == (2, 1)
    assert "is no directory but a symbolic link" in err
