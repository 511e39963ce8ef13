"""The litter: really there, told while the engine still starts, left by a KILL and cleared by a TERM."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.dispatch.embedded.conftest import StartEngine
from tests.dispatch.embedded.engine_under_test import EngineUnderTest, wait_until
from tests.dispatch.embedded.test_process import free_port


@pytest.fixture
def litter(start_engine: StartEngine) -> Iterator[dict[str, Any]]:
    """That of an engine which starts for a long time; whatever a test leaves of it is removed."""
    engine = start_engine("--litter", "--start-delay", "60", port=free_port(), wait=False)
    found = wait_until(lambda: _ask(engine), "the litter is told", 20)
    yield {**found, "engine": engine}
    for process in ("child", "grandchild"):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(found[process]["pid"]).kill()
    for path in _paths(found):
        path.unlink(missing_ok=True)


def _ask(engine: EngineUnderTest) -> Any:
    with suppress(httpx.TransportError):  # not bound yet
        return engine.get("/litter").json()
    return None


def _paths(litter: dict[str, Any]) -> list[Path]:
    return [Path(litter[name]) for name in ("shm", "file", "socket")]


def _runs(process: dict[str, Any]) -> bool:
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process["pid"])
        assert found.create_time() == pytest.approx(process["create_time"], abs=0.02)
        return found.status() != psutil.STATUS_ZOMBIE
    return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_is_there(litter: dict[str, Any]) -> None:
    engine = litter["engine"]
    assert engine.get("/health").status_code == 503, "it is still starting"
    assert _runs(litter["child"])
    assert _runs(litter["grandchild"])
    assert os.getsid(litter["child"]["pid"]) == os.getsid(engine.pid)
    assert os.getsid(litter["grandchild"]["pid"]) not in (litter["grandchild"]["pid"], os.getsid(engine.pid))
    assert all(path.exists() for path in _paths(litter))
    assert litter["shm"] in Path(f"/proc/{engine.pid}/maps").read_text()
    assert _listens(litter["port"])


def test_a_kill_leaves_all_of_it(litter: dict[str, Any]) -> None:
    engine = litter["engine"]
    engine.signal(signal.SIGKILL)
    engine.wait()
    assert _runs(litter["child"])
    assert _runs(litter["grandchild"])
    assert all(path.exists() for path in _paths(litter))
    assert _listens(litter["port"]), "the child holds it"


def test_a_term_leaves_the_grandchild(litter: dict[str, Any]) -> None:
    os.kill(litter["grandchild"]["pid"], signal.SIGTERM)
    engine = litter["engine"]
    engine.signal(signal.SIGTERM)
    assert engine.wait() == 0
    assert not _runs(litter["child"])
    assert not any(path.exists() for path in _paths(litter))
    assert not _listens(litter["port"])
    assert _runs(litter["grandchild"]), "TERM says nothing to it"


def test_a_port_of_its_own_choice(start_engine: StartEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = start_engine("--litter", "--litter-port", str(port), wait=False)
        assert engine.wait() == 98
    assert engine.stderr() == f"embedded engine: address 127.0.0.1:{port} is already in use\n"


def test_none_unless_asked_for(engine: EngineUnderTest) -> None:
    assert engine.get("/litter").json() is None
