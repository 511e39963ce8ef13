"""``failsoft doctor`` and Ray: what a driver left in a real one, and one of another version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.experimental import internal_kv

from failsoft.doctor.checks import cluster
from failsoft.doctor.finding import Examined, Finding
from tests.support.wait import until_sync

pytestmark = pytest.mark.timeout(300)

LEAVER = Path(__file__).with_name("ray_leaver.py")


def look() -> list[Finding]:
    return cluster.check(Examined(ray=ray.get_runtime_context().gcs_address))


def leave(namespace: str, name: str) -> None:
    address = ray.get_runtime_context().gcs_address
    subprocess.run([sys.executable, LEAVER, address, namespace, name], timeout=100, check=True)


def test_what_a_driver_left(ray_local: None) -> None:
    assert look() == []
    leave("failsoft", "leak")
    leave("elsewhere", "meant")
    try:
        found: list[Finding] = []

        def seen() -> bool:
            found[:] = look()  # that a job has ended is known a moment after it has
            return len(found) == 4

        until_sync(seen, 90, "all four are seen")
        told = {(f.severity, f.what.split(" (")[0]) for f in found}
        assert told == {
            ("warning", "a detached actor 'leak'"),
            ("note", "a detached actor 'meant'"),
            ("warning", "a detached placement group 'leak'"),
            ("warning", "a detached placement group 'meant'"),
        }
        (leak,) = [f for f in found if f.what.startswith("a detached actor 'leak'")]
        assert leak.what == "a detached actor 'leak' (Left), alive, failsoft's, which never makes one"
        assert leak.fix == "if nobody needs it: ray.kill(ray.get_actor('leak', namespace='failsoft'))"
        groups = [f for f in found if "group" in f.what]
        assert all("(0.01 CPU), created, of a job that has ended" in f.what for f in groups)
        for f in found:  # the remedies are remedies
            exec(f.fix.removeprefix("if nobody needs it: "), {"ray": ray})
        until_sync(lambda: look() == [], 90, "and then nothing is left")
    finally:
        for name, namespace in (("leak", "failsoft"), ("meant", "elsewhere")):
            if {"name": name, "namespace": namespace} in ray.util.list_named_actors(all_namespaces=True):
                ray.kill(ray.get_actor(name, namespace=namespace))


def test_a_cluster_of_another_version(ray_local: None) -> None:
    key, namespace = "CLUSTER_METADATA", "cluster"
    before = internal_kv._internal_kv_get(key, namespace=namespace)
    other = json.dumps({**json.loads(before), "ray_version": "2.1.0", "python_version": "3.9.1"})
    internal_kv._internal_kv_put(key, other, overwrite=True, namespace=namespace)
    try:
        (told,) = look()
    finally:
        internal_kv._internal_kv_put(key, before, overwrite=True, namespace=namespace)
    assert told.severity == "error"
    assert "2.1.0" in told.what
    assert "3.9.1" in told.what
    assert ray.__version__ in told.what


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray at 127.0.0.1:1: not checked (Connection refused)"),
        ("a..b:6379", "no Ray at a..b:6379: not checked (encoding with 'idna' codec failed"),
        ("127.0.0.1:²", "no Ray at 127.0.0.1:²: not checked (invalid literal"),
        ("ray://127.0.0.1:10001", "not checked: ray://127.0.0.1:10001 is a Ray Client address"),
    ],
)
def test_no_ray_is_not_ok(address: str, said: str) -> None:
    (told,) = cluster.check(Examined(ray=address))
    assert told.severity == "note"
    assert told.what.startswith(said)


def test_a_ray_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody listens there and says nothing."""
    import socket

    monkeypatch.setattr(cluster, "DEADLINE", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (told,) = cluster.check(Examined(ray=f"127.0.0.1:{silent.getsockname()[1]}"))
    assert told.severity == "warning"
    assert "does not answer within 3 s" in told.what
