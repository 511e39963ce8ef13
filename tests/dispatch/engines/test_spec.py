from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from dispatch.engines import EngineSpec, EngineStatus, embedded_spec
from dispatch.engines.spec import ExitReport
from protocol import CodedError

GOOD: dict[str, Any] = {"command": ("serve", "--port", "{port}")}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", ()),
        ("command", "serve --port {port}"),
        ("command", ("serve", 3)),
        ("command", ("serve", "--port", "8000")),
        ("command", ("serve\0", "{port}")),
        ("env", {"A": 1}),
        ("env", {"FAILSOFT_KEY": "x"}),
        ("env", {"failsoft_key_file": "x"}),
        ("api", "grpc"),
        ("host", ""),
        ("start_timeout", 0),
        ("health_timeout", -1.0),
        ("canary_timeout", float("inf")),
        ("probe_interval", 0.0),
        ("term_timeout", -0.1),
        ("kill_timeout", float("nan")),
        ("health_failures", 0),
        ("log_bytes", 65535),
        ("log_bytes", 1e9),
        ("log_files", 0),
        ("log_starts", 0),
        ("ports", "nccl"),
        ("ports", ("port",)),
        ("ports", ("",)),
        ("ports", ("a.b",)),
        ("ports", (3,)),
        ("ports", 3),
        ("ports", ("nccl",)),
        ("num_gpus", -1),
        ("num_gpus", 1.5),
        ("num_cpus", "1"),
        ("num_cpus", 0.00001),
        pytest.param("start_timeout", 10**400, id="more than a float holds"),
        ("resources", {"nic": -1}),
        ("resources", {"nic": float("nan")}),
        ("resources", {"nic": "1"}),
        ("resources", {"": 1}),
        ("resources", {"CPU": 1}),
        ("resources", {"memory": 1}),
        ("env", {"A=B": "x"}),
        ("env", {"": "x"}),
        ("cwd", "a\0b"),
        ("log_dir", "a\0b"),
        ("metrics_path", "metrics"),
    ],
)
def test_values_that_cannot_work(field: str, value: object) -> None:
    with pytest.raises(CodedError) as caught:
        EngineSpec(**{**GOOD, field: value})
    assert caught.value.code == "CONFIG.INVALID"
    assert field in caught.value.detail
    assert "\n" not in caught.value.detail


def test_a_key_is_not_repeated_in_the_failure() -> None:
    with pytest.raises(CodedError) as caught:
        EngineSpec(**GOOD, env={"FAILSOFT_KEY": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("ports", "text", "why"),
    [
        ((), "{port.nccl}", 'must name "nccl", since {port.nccl} is used'),
        ((), "{port.}", 'must name "", since'),
        (("grpc",), "{port.nccl}{port.grpc}", "must name"),
        (("nccl",), "{port}", "is used nowhere: write {port.nccl} in command or env, not 'nccl'"),
        (("nccl", "nccl"), "{port.nccl}", "names each port once"),
    ],
)
def test_ports_and_their_places_agree(ports: tuple[str, ...], text: str, why: str) -> None:
    with pytest.raises(CodedError) as caught:
        EngineSpec(command=("serve", "{port}", text), ports=ports)
    assert caught.value.code == "CONFIG.INVALID"
    assert why in caught.value.detail
    assert "\n" not in caught.value.detail


def test_only_ports_and_host_are_replaced() -> None:
    spec = EngineSpec(
        command=("serve", '{"a": {}}', "{host}:{port}", "{port.a-1}", "{portable}"),
        env={"P": "{port},{port.nccl}"},
        host="::1",
        ports=("nccl", "a-1"),
    )
    numbers = {"port": 80, "nccl": 81, "a-1": 82}
    assert spec.argv(numbers) == ("serve", '{"a": {}}', "::1:80", "82", "{portable}")
    assert spec.environment(numbers) == {"P": "80,81"}
    assert spec.url(80) == "http://[::1]:80"
    assert EngineSpec(command=("serve",), env={"PORT": "{port}"}).url(1) == "http://127.0.0.1:1"


def test_embedded_spec() -> None:
    spec = embedded_spec(token_rate=500, start_delay=0.5, arguments=("--faults",), api="openai", num_cpus=1)
    assert spec.command[:3] == (sys.executable, "-m", "dispatch.engines.embedded")
    assert spec.command[-5:] == ("--token-rate", "500", "--start-delay", "0.5", "--faults")
    assert (spec.api, spec.num_cpus) == ("openai", 1)


def test_values_survive_a_boundary() -> None:
    spec = embedded_spec()
    status = EngineStatus(key="engine/0")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert pickle.loads(pickle.dumps(status)) == status
    assert msgspec.json.decode(msgspec.json.encode(status), type=EngineStatus) == status


def test_how_an_engine_ended() -> None:
    assert ExitReport(signal=9).how == "signal 9 (SIGKILL)"
    assert ExitReport(signal=99).how == "signal 99"
    assert ExitReport(status=3).how == "exit status 3"
    assert ExitReport(guard_lost=True).how == "killed together with its guard"
    assert ExitReport(signal=9, oom="the kernel did it").how == "signal 9 (SIGKILL); the kernel did it"


def test_the_room_does_not_import_ray() -> None:
    """The embedded engine is a module of this room: Ray's import would be most of its start."""
    script = (
        "import sys, dispatch.engines as e; dir(e); e.embedded_spec; "
        "sys.exit('ray' in sys.modules or 'httpx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 0


def test_unknown_names() -> None:
    import dispatch.engines

    with pytest.raises(AttributeError, match="no attribute 'Fleet'"):
        dispatch.engines.Fleet  # noqa: B018
    assert dispatch.engines.EngineFleet.__name__ == "EngineFleet"
