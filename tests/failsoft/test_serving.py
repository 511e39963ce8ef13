"""The parts of ``failsoft engines``: where the socket is, what is answered there, what is shown."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from dispatch.engines.spec import EngineStatus
from failsoft.serving import asking, view
from failsoft.serving.asking import Asking, NobodyRuns, find
from failsoft.serving.control import DownOrder, Engine, EngineOrder, FleetStatus, listening
from failsoft.serving.place import claimed, socket_of, sockets
from protocol import CodedError
from tests.support.full_disk import file_size_limit
from tests.support.wait import until


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short: a socket's path is at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="fs"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "tmp").mkdir()
    yield folder
    shutil.rmtree(folder)


def refused(name: str = "demo") -> str:
    with pytest.raises(CodedError) as caught, claimed(name):
        pass
    assert caught.value.code == "CONFIG.INVALID"
    assert "\n" not in caught.value.detail
    return caught.value.detail


# ---- place


def test_a_name_is_held_once_and_given_back(runtime: Path) -> None:
    with claimed("demo") as path, claimed("other"):
        assert path == runtime / "failsoft" / "demo.sock"
        assert f"fleet 'demo' runs already, as pid {os.getpid()}: " in refused()
        path.touch()
        assert socket_of("demo") == path
    assert socket_of("demo") is None
    with claimed("demo"):
        pass


def test_what_a_killed_one_left_is_replaced(runtime: Path) -> None:
    with claimed("demo") as path:
        pass
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    assert sockets() == {"demo": path}
    with pytest.raises(NobodyRuns, match="no fleet runs"):
        find(None)
    with claimed("demo") as again:
        assert again == path
        assert not path.exists()


def test_a_directory_that_is_not_ours_alone(runtime: Path) -> None:
    folder = runtime / "failsoft"
    folder.mkdir(mode=0o755)
    assert "is open to others (mode 0755)" in refused()
    with pytest.raises(CodedError, match="is open to others"):
        socket_of("demo")
    folder.rmdir()
    (runtime / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(runtime / "elsewhere")
    assert "is no directory but a symbolic link" in refused()
    folder.unlink()
    folder.touch()
    assert "is no directory, " in refused()
    if os.geteuid() == 0:
        folder.unlink()
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)
        assert "belongs to user 12345" in refused()


def test_without_a_runtime_directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without XDG_RUNTIME_DIR is found by a shell that has one; of others' it is not taken."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with claimed("demo") as path:
        assert path == runtime / "tmp" / f"failsoft-{os.geteuid()}" / "demo.sock"
        path.touch()
        for value in (str(runtime), "relative", "/no/such/folder"):
            monkeypatch.setenv("XDG_RUNTIME_DIR", value)
            assert socket_of("demo") == path


def test_what_a_killed_one_left_hides_no_other(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of the shell was killed, and the service of the same name runs."""
    with claimed("demo") as stale:
        pass
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(stale))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with claimed("demo") as path, socket.socket(socket.AF_UNIX) as service:
        service.bind(str(path))
        service.listen()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert find("demo") == find(None) == path
    assert find("demo") == stale


def test_a_directory_that_others_made_first_keeps_nobody_from_ours(runtime: Path) -> None:
    (runtime / "tmp" / f"failsoft-{os.geteuid()}").mkdir(mode=0o777)
    with claimed("demo") as path:
        path.touch()
        assert socket_of("demo") == path
        assert sockets() == {"demo": path}


def test_a_path_that_is_too_long(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = runtime / ("x" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert "longer than the 107 bytes of a socket's path" in refused("n" * 20)


@pytest.mark.parametrize("name", ["demo.lock", "demo.sock"])
def test_a_place_that_cannot_be_written(runtime: Path, name: str) -> None:
    """One line for whatever the file system says, and nothing held: the next one has the name."""
    (runtime / "failsoft" / name).mkdir(parents=True)
    (runtime / "failsoft").chmod(0o700)
    assert f"failsoft/{name}: Is a directory; set XDG_RUNTIME_DIR to" in refused()
    (runtime / "failsoft" / name).rmdir()
    with claimed("demo"):
        pass


def test_a_place_on_a_full_disk(runtime: Path) -> None:
    """EFBIG stands for ENOSPC."""
    with file_size_limit(0):
        assert "failsoft/demo.lock: File too large; set XDG_RUNTIME_DIR to" in refused()


def test_a_full_disk_hides_no_fleet(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills it may be the very fleet that is to be stopped."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", None)  # as in a process that has not asked yet
    with claimed("demo") as path:
        path.touch()
        monkeypatch.setattr(tempfile, "tempdir", None)
        with file_size_limit(0):
            assert find("demo") == path


def test_what_fails_while_a_name_is_held_is_not_the_places_fault() -> None:
    with pytest.raises(FileNotFoundError), claimed("demo"):
        raise FileNotFoundError


# ---- control and asking


class Fake:
    """A fleet that does what a test says."""

    def __init__(self, state: Any = "ready") -> None:
        self.drained: list[EngineOrder] = []
        self.downs: list[DownOrder] = []
        self.failures: tuple[str, ...] = ()
        self.engines = (Engine(key="engine/0", state=state, name="a"),)
        self.hang = asyncio.Event()
        self.hang.set()

    def status(self) -> FleetStatus:
        # A process that has ended: `down` waits for the end of the one that is named.
        return FleetStatus(
            name="demo",
            file="/demo.toml",
            state="running",
            pid=os.getpid(),
            create_time=psutil.Process().create_time() - 100,
            since=0.0,
            engines=self.engines,
            failures=self.failures,
        )

    async def drain(self, order: EngineOrder) -> None:
        self.drained.append(order)
        if order.key == "nobody":
            raise CodedError("CONFIG.INVALID", "there is no engine 'nobody'", {"key": "nobody"})
        await self.hang.wait()

    async def restart(self, order: EngineOrder) -> None:
        raise CodedError("ENGINE.EXITED", f"{order.key} ended again")

    async def down(self, order: DownOrder) -> None:
        self.downs.append(order)


async def test_asking() -> None:
    fake, seen = Fake(), []
    with claimed("demo") as path:
        async with listening(fake, path), Asking(path) as fleet:
            assert await fleet.status() == fake.status()
            assert find("demo") == find(None) == path
            fake.hang.clear()
            drain = asyncio.create_task(fleet.drain("a", 3.0, seen.append))
            await until(lambda: len(seen) >= 2)
            fake.hang.set()
            assert await drain == fake.status()
            assert fake.drained == [EngineOrder("a", 3.0)]
            fake.failures = ("ENGINE.STOP_FAILED: stage kill",)
            assert (await fleet.down(None, seen.append)).failures == fake.failures
            assert fake.downs == [DownOrder(None)]


async def test_failures_keep_their_names() -> None:
    with claimed("demo") as path:
        async with listening(Fake(), path), Asking(path) as fleet:
            with pytest.raises(CodedError) as caught:
                await fleet.drain("nobody", None, lambda _: None)
            assert (caught.value.code, caught.value.detail) == (
                "CONFIG.INVALID",
                "there is no engine 'nobody'",
            )
            assert caught.value.data["key"] == "nobody"
            with pytest.raises(CodedError, match=r"REQUEST\.INVALID"):
                await fleet.drain("a", -1.0, lambda _: None)
            with pytest.raises(CodedError, match=r"ENGINE\.EXITED.* a ended again"):
                await fleet.restart("a", None, lambda _: None)
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
                for body in (b"{", b"[]", b'{"kee": 1}'):
                    assert (await client.post("/drain", content=body)).status_code == 400
                assert (await client.get("/no")).status_code == 404


async def test_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER", 0.3)
    with claimed("demo") as path:

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            writer.close()

        server = await asyncio.start_unix_server(silent, str(path))
        async with server, Asking(path) as fleet:
            with pytest.raises(CodedError, match=r"TIMEOUT\.READ.* does not answer within 0.3 s"):
                await fleet.status()
            with pytest.raises(CodedError, match=r"TIMEOUT\.READ"):
                await fleet.down(None, lambda _: None)


async def test_one_that_ends_before_it_has_answered() -> None:
    with claimed("demo") as path:

        async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.close()

        server = await asyncio.start_unix_server(rude, str(path))
        async with server, Asking(path) as fleet:
            with pytest.raises(CodedError, match=r"TRANSPORT\.DISCONNECTED.* ended before it had answered"):
                await fleet.status()


async def test_which_fleet(runtime: Path) -> None:
    with pytest.raises(NobodyRuns, match="no fleet 'demo' runs"):
        find("demo")
    file = runtime / "x.toml"
    file.write_text('[fleet]\nname = "demo"\n[[engine]]\ncommand = ["serve", "{port}"]\n')
    with claimed("demo") as one, claimed("other") as two:
        async with listening(Fake(), one), listening(Fake(), two):
            assert find(str(file)) == one
            with pytest.raises(CodedError, match="several fleets run, name one of them: demo, other"):
                find(None)
    for name in ("../demo", "a\0b", "", "x" * 300):
        with pytest.raises(NobodyRuns):
            find(name)


# ---- what is shown


STARTING = Engine(key="engine/0", name="a/0", state="starting", stage="port")
READY = Engine(
    key="engine/1",
    name="a/1",
    state="ready",
    url="http://127.0.0.1:80",
    pid=7,
    node="host",
    restarts=2,
    weight_version="9",
    code="ENGINE.EXITED",
    detail="signal 9\n(SIGKILL)",
)


def test_lines() -> None:
    assert view.line_of(STARTING) == "engine/0 (a/0) starting stage port"
    assert view.line_of(READY) == (
        "engine/1 (a/1) ready at http://127.0.0.1:80, pid 7 on host weights 9 restarts 2 "
        "last failure ENGINE.EXITED: signal 9 (SIGKILL)"
    )
    assert view._ago(5.9) == "5 s"
    assert view._ago(65) == "1 min 5 s"
    assert view._ago(7300) == "2 h 1 min"
    assert view._ago(200000) == "2 d 7 h"
    assert view._ago(-3) == "0 s"


def fleet_of(*engines: Engine) -> FleetStatus:
    return FleetStatus(
        name="d", file="f", state="running", pid=1, create_time=0.0, since=0.0, engines=engines
    )


def test_a_table_on_a_terminal_and_lines_elsewhere() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        view.show(Console(file=out, force_terminal=terminal, width=200), fleet_of(STARTING, READY))
        text = out.getvalue()
        assert "1 of 2 engines ready" in text
        assert ("restarts  since" in text.replace("\x1b[0m", "").replace("\x1b[1m", "")) is terminal
        assert "ENGINE.EXITED: signal 9 (SIGKILL)" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_tells_what_changes(terminal: bool) -> None:
    out = io.StringIO()
    with view.Watching(Console(file=out, force_terminal=terminal, width=200)) as watch:
        watch(fleet_of(STARTING))
        watch(fleet_of(STARTING))
        watch(fleet_of(Engine(key="engine/0", name="a/0", state="stopping")))
    if terminal:
        assert "stopping" in out.getvalue()
    else:
        assert out.getvalue() == "engine/0 (a/0) stopping\n"


def test_the_printer() -> None:
    out, errors = io.StringIO(), io.StringIO()
    printer = view.Printer(out, errors, json=False)
    status = EngineStatus(key="engine/0", state="ready", url="http://x")
    printer.engine(status, "a")
    printer.engine(status, "a")
    printer.events.emit("engine.ready")
    assert out.getvalue().count("\n") == 1
    printer = view.Printer(out, errors, json=True)
    printer.engine(status, "a")
    printer.events.emit("engine.ready", key="engine/0")
    assert errors.getvalue().count("engine/0 (a) ready") == 1
    assert '"engine.ready"' in out.getvalue()


def test_a_reader_that_went_away_ends_nothing() -> None:
    """`failsoft engines up FILE | head -1`."""
    read, write = os.pipe()
    os.close(read)
    out = os.fdopen(write, "w")
    printer = view.Printer(out, io.StringIO(), json=False)
    printer.say("a line")
    printer.say("another")
    with suppress(BrokenPipeError):
        out.close()
    printer.say("to a closed file")
