"""Failures as other drivers read them: a second one of the same Ray, and one through Ray Client."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import ray

from protocol import Trust
from tests.ray_boundary.driver import HEAVY, KINDS, SHAPES
from tests.ray_boundary.far_side import FarSide
from tests.ray_boundary.shapes import ABORTED, KILLED, ONE, Means
from tests.ray_boundary.shapes import SHAPES as EXPECTED
from tests.support.wait import until_sync

ROOT: Final = Path(__file__).parents[2]
DRIVERS: Final = ("second driver", "Ray Client")
BUDGET: Final = 150.0
"""Seconds for a driver's whole run."""

pytestmark = pytest.mark.timeout(240)
Told = dict[str, dict[str, Any]]


def _drive(address: str) -> Told:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray_boundary.driver", address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUDGET,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: Told = json.loads(done.stdout.splitlines()[-1])
    return told


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def client_server(gcs_address: str, log: Path) -> Iterator[str]:
    """A server of Ray Client in front of the Ray at ``gcs_address``, for one driver; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ray.util.client.server", "--mode", "specific-server"]
    where = ["--address", gcs_address, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        server = subprocess.Popen([*command, *where], cwd=ROOT, stdout=out, stderr=out)
        try:
            until_sync(
                lambda: server.poll() is not None or _answers(port), 60.0, "the server of Ray Client answers"
            )
            assert server.poll() is None, log.read_text()
            yield f"ray://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait(timeout=10)


@pytest.fixture(scope="module")
def told_by(far_sides: dict[str, FarSide], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What the drivers read, each run once, when it is first asked for."""
    gcs_address = ray.get_runtime_context().gcs_address

    class Lazily(dict[str, Told]):
        def __missing__(self, driver: str) -> Told:
            if driver == "second driver":
                self[driver] = _drive(gcs_address)
            else:
                with client_server(gcs_address, tmp_path_factory.mktemp("client") / "log") as address:
                    self[driver] = _drive(address)
            return self[driver]

    return Lazily()


@pytest.fixture(params=DRIVERS)
def told(request: pytest.FixtureRequest, told_by: dict[str, Told]) -> Told:
    if request.param == "Ray Client" and importlib.util.find_spec("grpc") is None:
        pytest.skip("Ray Client needs grpcio")
    return told_by[request.param]


@pytest.mark.parametrize("shape", [*SHAPES, HEAVY])
@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_reads_what_the_first_one_reads(told: Told, kind: str, shape: str) -> None:
    row = EXPECTED[shape]
    means = row.coded if kind == "coded" else row.means
    expected = (row.coded.code, Trust.STRUCTURED) if kind == "coded" else row.read or (None, Trust.NONE)
    for where in ("task", "actor") if shape != HEAVY else ("task",):
        read = told[f"{kind} {where}: {shape}"]
        assert (read["code"], read["trust"]) == expected
        assert Means(*read["means"]) == means
        assert read["id"] == ONE or read["code"] != ABORTED
        if kind == "coded":
            assert read["is_coded"]
            assert row.detail in read["detail"]
            assert read["data"].items() >= row.data.items()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_init_keeps_its_name(told: Told, kind: str) -> None:
    read = told[f"{kind} init: coded error"]
    assert (read["type"], read["code"], read["id"]) == ("ActorDiedError", ABORTED, ONE)
    assert Means(*read["means"]) == (ABORTED, "callee", "not_run", Trust.CHECKSUMMED)


def test_a_killed_actor_is_dead(told: Told) -> None:
    read = told[KILLED]
    assert (read["type"], read["code"]) == ("ActorDiedError", None)
    assert Means(*read["means"]) == ("ACTOR.DIED", "callee", "unknown", Trust.STRUCTURED)


def test_a_coded_error_is_a_value(told: Told) -> None:
    assert told["value"] == {"equal": True, "stored": True}
