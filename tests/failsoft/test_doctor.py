"""``failsoft doctor`` with the real thing there: an orphan, a port, limits, a full disk, a wrong version."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from dispatch.engines.config import parse_engines
from dispatch.engines.traces import leftovers, private
from dispatch.engines.traces.gpu import Device, Look
from dispatch.engines.traces.leftovers import Orphan, Orphans
from failsoft.cli import app
from failsoft.doctor import checks
from failsoft.doctor.checks import gpus, limits, orphans, ports, space, versions
from failsoft.doctor.examine import examine
from failsoft.doctor.finding import Check, Examined, Finding
from tests.failsoft.command import argv
from tests.support.wait import until_sync

OWNER = Path(__file__).with_name("owner.py")
LISTENER = """
import pathlib, socket, sys, time
s = socket.create_server(("127.0.0.1", 0))
pathlib.Path(sys.argv[1]).write_text(str(s.getsockname()[1]))
time.sleep(600)
"""
NOWHERE = {"RAY_ADDRESS": "127.0.0.1:1"}
"""Other Rays may run on this machine, and are none of these tests' business."""


def doctor(
    *arguments: object, before: tuple[str, ...] = (), **environment: str
) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [*before, *argv("doctor", "--json", *arguments)],
        capture_output=True,
        timeout=100,
        env={**os.environ, **NOWHERE, **environment},
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr.decode()
    document = json.loads(done.stdout)
    assert document["checks"] == ["orphans", "gpus", "ray", "ports", "limits", "space", "versions"]
    return done.returncode, document["findings"]


def found(findings: list[dict[str, Any]], check: str, severity: str) -> list[str]:
    return [
        f"{f['what']} [{f['where']}]" for f in findings if (f["check"], f["severity"]) == (check, severity)
    ]


# ---- what engines left


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[tuple[str, int, int]]:
    """An engine's grandchild in a session of its own that listens, after its owner and its guard were
    SIGKILLed at once: marker, pid, port."""
    said = tmp_path / "port"
    owner = subprocess.Popen(
        [
            sys.executable,
            OWNER,
            "sh",
            "-c",
            'setsid -f "$0" -c "$1" "$2"; exec sleep 600',
            sys.executable,
            LISTENER,
            said,
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        told = json.loads(owner.stdout.readline())
        until_sync(lambda: said.exists() and said.read_text(), what="it listens")
        os.kill(told["guard"], signal.SIGSTOP)  # at once: the guard has no time to act on its owner's end
        owner.kill()
        owner.wait(20)
    os.kill(told["guard"], signal.SIGKILL)
    until_sync(lambda: not psutil.pid_exists(told["engine"]), what="the engine ends with its guard")
    (left,) = leftovers.find(told["marker"])
    yield told["marker"], left.pid, int(said.read_text())
    for process in leftovers.find(told["marker"]):
        process.kill()


def test_an_orphan(orphan: tuple[str, int, int], tmp_path: Path) -> None:
    marker, pid, port = orphan
    folder = tmp_path / f"failsoft-engine-{marker}"
    assert folder.is_dir()

    def look() -> Orphans:
        """What the check itself looks for, and of that only this test's: others run engines here, too."""
        seen = leftovers.orphans()
        return Orphans(
            processes=tuple(one for one in seen.processes if one.marker == marker),
            directories=leftovers.orphans(str(tmp_path)).directories,
        )

    (told,) = orphans.check(Examined(), look)
    assert told.severity == "error"
    assert told.where == f"pid {pid} ({sys.executable})"
    assert "--fix" in told.fix
    assert psutil.pid_exists(pid), "looking changes nothing"

    code, findings = doctor()
    assert code == 1
    assert any(f"pid {pid} " in text for text in found(findings, "orphans", "error"))
    assert f"port {port} is held by a process of an engine whose guard is gone [pid {pid}]" in found(
        findings, "ports", "warning"
    )

    mended = orphans.check(Examined(mend=True), look)
    assert [(f.severity, f.where) for f in mended] == [
        ("note", f"pid {pid} ({sys.executable})"),
        ("note", str(folder)),
    ]
    assert leftovers.find(marker) == []
    assert not folder.exists()
    assert orphans.check(Examined(), look) == []


def test_a_directory_that_was_left(tmp_path: Path) -> None:
    folder = tmp_path / "failsoft-engine-0123456789abcdef"
    folder.mkdir()
    code, findings = doctor(TMPDIR=str(tmp_path))
    assert code == 1
    assert found(findings, "orphans", "warning") == [
        f"the private directory of an engine that is gone [{folder}]"
    ]


def test_a_guarded_engine_is_no_orphan(tmp_path: Path) -> None:
    """Also where the guard's command line does not name its marker: another release's."""
    owner = subprocess.Popen(
        [sys.executable, OWNER, "sleep", "600"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        try:
            told = json.loads(owner.stdout.readline())
            process = psutil.Process(told["engine"])
            one = Orphan(pid=process.pid, create_time=process.create_time(), marker="x", command=("sleep",))
            assert not leftovers._is_alone(one)
            assert told["marker"] not in {left.marker for left in leftovers.orphans().processes}
        finally:
            owner.kill()
    until_sync(lambda: not leftovers.find(told["marker"]))
    assert not leftovers._is_alone(one), "gone"


def test_what_comes_and_goes_is_no_orphan() -> None:
    """An engine that is being ended is seen once, and not again."""
    looks = iter([Orphans(processes=(Orphan(pid=1, create_time=1.0, marker="x", command=()),)), Orphans()])
    assert orphans.check(Examined(mend=True), lambda: next(looks)) == []


def test_another_process_with_its_pid_is_not_killed() -> None:
    me = psutil.Process()
    other = Orphan(pid=me.pid, create_time=me.create_time() - 100, marker="x", command=("a",))
    left = Orphans(processes=(other,))
    (told,) = orphans.check(Examined(mend=True), lambda: left)
    assert (told.severity, told.where) == ("note", f"pid {me.pid} (a)"), "it is gone, and we are here"


def test_a_directory_that_stays_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def busy(path: str) -> None:
        raise OSError(errno.EBUSY, "busy", path)

    monkeypatch.setattr(private, "remove", busy)
    (told,) = orphans.check(Examined(mend=True), lambda: Orphans(directories=(str(tmp_path),)))
    assert (told.severity, told.where) == ("warning", str(tmp_path))
    assert "could not be removed" in told.fix


# ---- ports


def test_ports_of_a_file() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        file = parse_engines(
            f"""
[[engine]]
name = "a"
count = 2
command = ["serve", "--port", "{{port}}", "--nccl-port={port}", "--dist-init-addr", "10.0.0.7:{port}"]
env = {{ MASTER_PORT = "{port}", UNRELATED = "{port}" }}
""",
            Path("engines.toml"),
        )
        told = [f for f in ports.check(Examined(file=file)) if str(port) in f.what]
    assert [(f.severity, f.what) for f in told] == [
        ("error", f"port {port}, which --nccl-port of engine a names, is taken"),
        ("warning", f"2 engines alike (a) have port {port} in --nccl-port: all but one cannot bind it"),
        ("error", f"port {port}, which MASTER_PORT of engine a names, is taken"),
    ]
    assert told[0].where == f"pid {os.getpid()} ({psutil.Process().name()})"
    assert not [f for f in ports.check(Examined(file=file)) if "is taken" in f.what]


def test_a_port_that_a_running_engine_has(tmp_path: Path) -> None:
    """A file's own fleet runs: nothing is wrong."""
    said = tmp_path / "port"
    engine = subprocess.Popen(
        [sys.executable, "-c", LISTENER, said], env={**os.environ, leftovers.MARKER: "of-this-test"}
    )
    with engine:
        try:
            until_sync(lambda: said.exists() and said.read_text(), what="it listens")
            port = int(said.read_text())
            text = f'[[engine]]\ncommand = ["serve", "{{port}}", "--x-port", "{port}"]\n'
            file = parse_engines(text, Path("engines.toml"))
            # It has no guard, so it is an orphan to the check; and once it had one, it is none.
            assert [f.severity for f in ports.check(Examined(file=file)) if "names" in f.what] == ["error"]
            assert ports._is_engine(engine.pid)
            assert not ports._is_engine(os.getpid())
            assert not ports._is_engine(None)
        finally:
            engine.kill()


# ---- limits and room


def test_few_descriptors() -> None:
    _, findings = doctor(before=("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh"))
    (text,) = found(findings, "limits", "error")
    assert text.startswith("a process may open 1024 files")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("32768\t60999\n", []),
        ("50000 51000", ["1001 ephemeral ports: so many connections to one server at most"]),
        (
            "1024 65535",
            ["the ephemeral ports 1024 to 65535 overlap with those of Ray's workers, 10002 to 19999"],
        ),
        ("", ["ephemeral ports: not checked"]),
    ],
)
def test_ephemeral_ports(tmp_path: Path, text: str, said: list[str]) -> None:
    path = tmp_path / "range"
    path.write_text(text)
    told = limits._ephemeral(path)
    assert [f.what.split(": a ")[0] for f in told] == said


def test_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process alone: a Ray that begins or ends meanwhile has hundreds."""
    monkeypatch.setattr(limits.psutil, "process_iter", lambda: [psutil.Process()])
    before = limits._threads_of(os.getuid())
    assert before >= 1
    go = threading.Event()
    many = [threading.Thread(target=go.wait, args=(30,)) for _ in range(200)]
    for thread in many:
        thread.start()
    try:
        assert limits._threads_of(os.getuid()) > before + 150
    finally:
        go.set()
        for thread in many:
            thread.join()


def test_a_small_dev_shm_and_a_full_disk(tmp_path: Path) -> None:
    """In a mount namespace of its own: Docker's 64 MiB of shared memory, and a /tmp that is full."""
    script = f"""
set -e
mount -t tmpfs -o size=64m none /dev/shm
mount -t tmpfs -o size=1m none {tmp_path}
head -c 1010000 /dev/zero > {tmp_path}/filler
exec "$@"
"""
    inside = ("unshare", "--mount", "sh", "-c", script, "sh")
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace of our own here")
    code, findings = doctor(before=inside, TMPDIR=str(tmp_path))
    assert code == 1
    errors = found(findings, "space", "error")
    assert any(text.startswith("shared memory is 64 MiB: ") for text in errors)
    assert any("% full, " in text and text.endswith(f"[{tmp_path}]") for text in errors)


def test_a_containers_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB on a machine of a TiB: Ray wants a third of the former."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(space, "LIMITS", (tmp_path / "no", limit))
    monkeypatch.setattr(space.psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 40))
    room = SimpleNamespace(f_blocks=4 << 30, f_bavail=4 << 30, f_frsize=1)
    monkeypatch.setattr(space.os, "statvfs", lambda folder: room)
    limit.write_text(f"{8 << 30}\n")
    assert space._shm(tmp_path) == []
    limit.write_text("max\n")
    (told,) = space._shm(tmp_path)
    assert told.what.startswith("4.0 GiB of shared memory are free; Ray's object store wants 186.3 GiB")


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert space._existing(tmp_path / "a" / "b") == tmp_path
    (told,) = space._shm(tmp_path / "no")
    assert told.severity == "error"


# ---- versions


def test_a_version_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "tenacity-0.1.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: tenacity\nVersion: 0.1\n")
    code, findings = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert found(findings, "versions", "error") == [
        "tenacity is 0.1, and failsoft needs tenacity>=9 [tenacity]"
    ]


def test_the_versions_here_fit() -> None:
    assert versions.check(Examined()) == []
    (told,) = versions._python(">=3.11", "3.10.2")
    assert told.what == "Python is 3.10.2, and failsoft needs >=3.11"


# ---- GPUs


class FakeGpus:
    def __init__(self, *devices: Device, absent: str = "") -> None:
        self.seen = Look(devices=devices, absent=absent)

    def look(self) -> Look:
        return self.seen


def test_no_gpu_is_not_ok() -> None:
    (told,) = gpus.check(Examined(), FakeGpus(absent="no GPU on this machine"))
    assert (told.severity, told.what) == ("note", "not checked: no GPU on this machine")
    assert gpus.check(Examined(), FakeGpus())[0].what == "not checked: no GPU on this machine"


def test_memory_without_an_owner() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    told = gpus.check(
        Examined(),
        FakeGpus(
            Device(name="GPU 0", used=30 << 30, processes={}),
            Device(name="GPU 1", used=30 << 30, processes={os.getpid(): 30 << 30}),
            Device(name="GPU 2", used=30 << 30, processes={gone.pid: 30 << 30}),
            Device(name="GPU 3", used=400 << 20, processes={}),
            Device(name="GPU 4", problem="memory: it fell off the bus"),
        ),
    )
    assert [(f.where, f.severity) for f in told] == [
        ("GPU 0", "error"),
        ("GPU 2", "note"),
        ("GPU 4", "warning"),
    ]
    assert told[0].what == "30.0 GiB are used by no process"


# ---- the frame


def test_a_check_that_fails_or_hangs_stops_no_other() -> None:
    def fail(_: Examined) -> list[Finding]:
        raise RuntimeError("no such luck")

    def hang(_: Examined) -> list[Finding]:
        time.sleep(600)
        return []

    good = Finding(check="good", severity="note", what="here")
    began = time.monotonic()
    told = examine(
        [
            Check(name="fails", run=fail),
            Check(name="hangs", run=hang, deadline=0.2),
            Check(name="good", run=lambda _: [good]),
        ],
        Examined(),
    )
    assert time.monotonic() - began < 30
    assert [(f.check, f.severity) for f in told] == [
        ("fails", "warning"),
        ("hangs", "warning"),
        ("good", "note"),
    ]
    assert told[0].what == "not checked: the check failed with RuntimeError: no such luck"
    assert told[1].what == "not checked: no answer within 0.2 s"


@pytest.mark.parametrize(("severity", "status"), [(None, 0), ("note", 0), ("warning", 1), ("error", 1)])
def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, severity: Any, status: int) -> None:
    one = [Finding(check="a", severity=severity, what="w", where="x", fix="f")] if severity else []
    monkeypatch.setattr(checks, "CHECKS", (Check(name="a", run=lambda _: one),))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == status
    text = f"a         {severity}  w  [x]\n          fix: f\n" if severity else "a         ok\n"
    assert result.stdout == text


def test_a_file_that_is_wrong(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "no.toml")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "there is no such file" in result.stderr
