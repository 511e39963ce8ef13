"""The fleet on a real Ray: what goes down comes back, and whoever dies, no engine is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from dispatch.engines import EngineFleet, EngineSpec, EngineStatus, embedded_spec
from protocol import CodedError, Events
from tests.dispatch.engines.processes import STUBBORN, Tag, spec_of
from tests.support.events import EventFile
from tests.support.wait import until, until_sync


@asynccontextmanager
async def fleet_of(
    specs: Sequence[EngineSpec], events: EventFile, ready: int | None = None, **options: Any
) -> AsyncIterator[EngineFleet]:
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        async with EngineFleet(specs, events=sink, **options) as fleet:
            if ready != 0:
                await fleet.wait_ready(30, ready)
            yield fleet


def names(events: EventFile, key: str = "engine/0") -> list[str]:
    return [event["event"] for event in events.all() if event["key"] == key]


async def test_start_and_close(ray_local: None, tag: Tag, events: EventFile) -> None:
    specs = [embedded_spec(token_rate=500, env=tag.env), embedded_spec(api="openai", env=tag.env)]
    async with fleet_of(specs, events) as fleet:
        first, second = fleet.engines()
        assert (first.key, second.key) == ("engine/0", "engine/1")
        assert first.url != second.url
        assert fleet.routable() == [first, second]
        assert set(tag.alive()) == {first.pid, second.pid}
        assert fleet.restarts == 0
        supervisors = {first.supervisor_pid, second.supervisor_pid}
        assert len(supervisors) == 2
    assert await fleet.close() == ()
    assert [status.state for status in fleet.engines()] == ["dead", "dead"]
    assert tag.alive() == []
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in supervisors), 10)
    assert names(events) == ["engine.starting", "engine.ready", "engine.stopped"]
    ready = events.named("engine.ready")[0]["data"]
    assert {"seconds", "url", "pid", "attempt"} <= ready.keys()
    with pytest.raises(CodedError, match=r"POOL\.CLOSED"):
        await fleet.wait_ready(5)
    with pytest.raises(CodedError, match="entered once"):
        await fleet.__aenter__()


@pytest.mark.parametrize("victim", ["engine", "supervisor", "ray.kill"])
async def test_killed(ray_local: None, tag: Tag, events: EventFile, victim: str) -> None:
    async with fleet_of([spec_of(tag), spec_of(tag)], events) as fleet:
        hit, other = fleet.engines()
        seen: list[EngineStatus] = []
        fleet.on_change(seen.append)
        began = time.monotonic()
        if victim == "engine":
            os.kill(hit.pid, signal.SIGKILL)
        elif victim == "supervisor":
            os.kill(hit.supervisor_pid, signal.SIGKILL)
        else:
            ray.kill(fleet._keepers[0]._actor)
        await until(lambda: seen, 5)
        assert time.monotonic() - began < 5
        # Its sockets close before its guard knows: a check that is under way fails first.
        assert seen[0].state in ("suspect", "stopping")
        assert fleet.routable() == [other]
        await until(lambda: hit.pid not in tag.alive(), 5, "the guard ends the engine")
        back = (await fleet.wait_ready(30))[0]
        assert back.pid != hit.pid
        assert (back.restarts, fleet.restarts, back.code) == (1, 1, "")
        assert fleet.engines()[1] == other, "untouched"
    code = "ENGINE.EXITED" if victim == "engine" else "ENGINE.SUPERVISOR_LOST"
    died = events.named("engine.died")[0]
    assert (died["code"], died["level"], died["key"], died["data"]["pid"]) == (
        code,
        "error",
        "engine/0",
        hit.pid,
    )
    if victim == "engine":
        assert died["data"]["signal"] == 9
        assert died["data"]["last_lines"]
    recovery = fleet.recoveries[0]
    assert (recovery.key, recovery.code) == ("engine/0", code)
    assert 0 < recovery.seconds < 30
    assert [name for name in names(events) if name != "engine.suspect"] == [
        *("engine.starting", "engine.ready", "engine.died", "engine.restarting"),
        *("engine.starting", "engine.ready", "engine.stopped"),
    ]


async def test_frozen_while_another_one_dies(ray_local: None, tag: Tag, events: EventFile) -> None:
    """A stopped engine is replaced; and while its checks hang, the other one's death is seen and
    repaired (L8)."""
    slow = spec_of(tag, health_timeout=5.0)
    async with fleet_of([slow, spec_of(tag)], events) as fleet:
        frozen, other = fleet.engines()
        states: list[str] = []
        fleet.on_change(lambda status: states.append(status.state) if status.key == "engine/0" else None)
        os.kill(frozen.pid, signal.SIGSTOP)
        os.kill(other.pid, signal.SIGKILL)
        await until(lambda: fleet.engines()[1].state != "ready", 20)
        assert states == [], "the frozen one is still being checked"
        await until(lambda: fleet.engines()[1].restarts == 1 and fleet.engines()[1].state == "ready", 20)
        assert set(states) <= {"suspect"}, "and has not been given up"
        await until(lambda: fleet.engines()[0].restarts == 1, 40)
        assert states[0] == "suspect", "not routable before it is touched"
        back = await fleet.wait_ready(30)
        assert back[0].pid != frozen.pid
    died = [event for event in events.named("engine.died") if event["key"] == "engine/0"]
    assert [event["code"] for event in died] == ["ENGINE.UNHEALTHY"]
    assert "did not answer within 5 s" in died[0]["detail"]


@pytest.mark.parametrize("seen_by", ["the fleet", "a client"])
async def test_healthy_without_progress(
    ray_local: None, tag: Tag, events: EventFile, tmp_path: Path, seen_by: str
) -> None:
    """L6: /health stays 200, nothing is generated."""
    freeze = tmp_path / "freeze"
    interval = 0.3 if seen_by == "the fleet" else 0.0
    spec = spec_of(
        tag, "--freeze", str(freeze), canary_timeout=0.4, canary_interval=interval, health_failures=2
    )
    async with fleet_of([spec], events) as fleet:
        before = fleet.engines()[0]
        await asyncio.sleep(1.1 if interval == 0 else 0)  # a complaint checks at most once a second
        freeze.touch()
        if seen_by == "a client":
            fleet.report(before.url + "/", "TIMEOUT.READ")
        await until(lambda: fleet.engines()[0].state not in ("ready", "suspect"), 20)
        freeze.unlink()
        assert (await fleet.wait_ready(30))[0].pid != before.pid
    assert events.named("engine.died")[0]["code"] == "ENGINE.UNHEALTHY"
    assert "/health_generate did not answer" in events.named("engine.died")[0]["detail"]


async def test_a_complaint_decides_nothing(ray_local: None, tag: Tag, events: EventFile) -> None:
    async with fleet_of([spec_of(tag)], events) as fleet:
        before = fleet.engines()[0]
        for _ in range(1000):
            fleet.report(before.url, "TRANSPORT.DISCONNECTED")
        fleet.report("http://nobody:1", "TRANSPORT.CONNECT")
        await asyncio.sleep(0.5)  # it stays as it is: there is nothing to wait for
        assert fleet.engines()[0] == before
    assert len(events.named("engine.complaint")) == 1000


async def test_crash_loop(ray_local: None, tag: Tag, events: EventFile) -> None:
    bad = EngineSpec(command=("sh", "-c", "echo no GPU; exit 4", "{port}"), env=tag.env)
    async with fleet_of(
        [bad, spec_of(tag)], events, 1, restart_backoff=(0.01, 0.05), restart_budget=3
    ) as fleet:
        with pytest.raises(CodedError) as caught:
            await fleet.wait_ready(30)
        assert caught.value.code == "ENGINE.CRASH_LOOP"
        assert "no GPU" in caught.value.detail
        assert caught.value.data["first_code"] == "ENGINE.EXITED"
        assert fleet.engines()[0].state == "dead"
        assert fleet.engines()[0].code == "ENGINE.CRASH_LOOP"
        await fleet.wait_ready(30, 1)
    given_up = events.named("engine.given_up")[0]
    assert (given_up["code"], given_up["level"], given_up["key"]) == (
        "ENGINE.CRASH_LOOP",
        "error",
        "engine/0",
    )
    assert given_up["data"]["last_lines"] == ["no GPU"]
    assert names(events).count("engine.starting") == 3
    assert names(events).count("engine.died") == 3
    assert names(events)[-1] == "engine.given_up"


async def test_a_cause_that_stays_is_given_up_at_once(ray_local: None, events: EventFile) -> None:
    async with fleet_of([EngineSpec(command=("/no/such/engine", "{port}"))], events, 0) as fleet:
        with pytest.raises(CodedError, match="/no/such/engine") as caught:
            await fleet.wait_ready(30)
        assert caught.value.code == "ENGINE.SPAWN_FAILED"
        assert fleet.restarts == 0


async def test_a_cause_that_passes_is_not(
    ray_local: None, tag: Tag, events: EventFile, tmp_path: Path
) -> None:
    """The engine's program is being written meanwhile (ETXTBSY)."""
    program = tmp_path / "env"
    shutil.copy("/usr/bin/env", program)
    spec = msgspec.structs.replace(spec_of(tag), command=(str(program), *spec_of(tag).command))
    with program.open("ab") as writing:
        async with fleet_of([spec], events, 0, restart_backoff=(0.1, 0.1), restart_budget=100) as fleet:
            await until(lambda: fleet.restarts >= 1)
            writing.close()
            assert (await fleet.wait_ready(30))[0].state == "ready"
    assert events.named("engine.died")[0]["code"] == "ENGINE.SPAWN_FAILED"


async def test_nowhere_to_run(ray_local: None, events: EventFile) -> None:
    spec = EngineSpec(command=("x", "{port}"), resources={"no-such-resource": 1.0}, start_timeout=0.5)
    began = time.monotonic()
    async with fleet_of([spec], events, 0, restart_budget=1) as fleet:
        with pytest.raises(CodedError, match="not scheduled"):
            await fleet.wait_ready(10)
    assert time.monotonic() - began < 5, "nobody waits for an actor that never was"


async def test_resources_that_ray_refuses(ray_local: None, events: EventFile) -> None:
    """Told, and not waited for: an engine without a keeper would be down for ever, without a word."""
    spec = EngineSpec(command=("x", "{port}"), resources={"bundle": 1.0})
    async with fleet_of([spec], events, 0) as fleet:
        await until(lambda: fleet.given_up)
        assert "bundle is a system reserved resource" in fleet.given_up[0].detail
    assert names(events)[:2] == ["engine.starting", "engine.died"]


async def test_wait_ready_says_how_it_stands(ray_local: None, tag: Tag, events: EventFile) -> None:
    async with fleet_of([spec_of(tag, "--never-bind")], events, 0) as fleet:
        with pytest.raises(
            CodedError, match=r"0 of 1 engines ready after 0\.2 s: engine/0 starting"
        ) as caught:
            await fleet.wait_ready(0.2)
        assert caught.value.code == "ENGINE.START_TIMEOUT"
        with pytest.raises(CodedError, match="can never be"):
            await fleet.wait_ready(0.2, 2)
        await until(lambda: tag.alive(), 20)
    assert tag.alive() == [], "closed in the middle of a start"


async def test_cancelled_close(ray_local: None, tag: Tag, events: EventFile) -> None:
    stubborn = EngineSpec(
        command=("sh", "-c", f'trap "" TERM; {" ".join(spec_of(tag).command)}'), env=tag.env, term_timeout=0.5
    )
    async with fleet_of([stubborn], events) as fleet:
        closing = asyncio.create_task(fleet.close())
        await until(lambda: fleet.engines()[0].state == "stopping", 5)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert tag.alive() == []
        assert fleet.engines()[0].state == "dead"


async def test_cancelled_while_starting(ray_local: None, tag: Tag, events: EventFile) -> None:
    async def use() -> None:
        async with fleet_of([spec_of(tag, "--never-bind")], events):
            pass

    task = asyncio.create_task(use())
    await until(lambda: tag.alive(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tag.alive() == []


async def test_a_listener_that_fails(ray_local: None, tag: Tag, events: EventFile) -> None:
    def listener(status: EngineStatus) -> None:
        raise RuntimeError(f"no use for {status.key}")

    async with fleet_of([spec_of(tag)], events, 0) as fleet:
        forget = fleet.on_change(listener)
        await fleet.wait_ready(30)
        forget()
        forget()
    assert events.named("engine.listener_failed")[0]["key"] == "engine/0"


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        ([], {}),
        ([embedded_spec()], {"restart_backoff": (1.0, 0.5)}),
        ([embedded_spec()], {"restart_budget": 0}),
    ],
)
def test_senseless_fleets(specs: list[EngineSpec], options: dict[str, Any]) -> None:
    with pytest.raises(CodedError, match=r"CONFIG\.INVALID"):
        EngineFleet(specs, **options)


async def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(CodedError, match=r"ray\.init\(\)") as caught:
        async with EngineFleet([embedded_spec()]):
            pass
    assert caught.value.code == "CONFIG.MISSING"


DRIVER = """
import asyncio, json, sys, ray
from dispatch.engines import EngineFleet, EngineSpec
address, command, tag = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
local = {"address": "local", "num_cpus": 2, "include_dashboard": False}
ray.init(log_to_driver=False, configure_logging=False, **({"address": address} if address else local))
async def main():
    spec = EngineSpec(command=tuple(command), env={"TEST_TAG": tag})
    async with EngineFleet([spec, spec]) as fleet:
        await fleet.wait_ready(120)
        print("ready", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cluster", ["lives on", "ends with it"])
def test_driver_killed(request: pytest.FixtureRequest, tag: Tag, cluster: str) -> None:
    address = ""
    if cluster == "lives on":
        request.getfixturevalue("ray_local")
        address = ray.get_runtime_context().gcs_address
    command = (
        "sh",
        "-c",
        f"{STUBBORN[2].partition(';')[0]}; setsid -f sleep 1001; {' '.join(spec_of(tag).command)}",
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, json.dumps(command), tag.text],
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "ready\n"
            assert len(tag.alive()) == 6, "two shells, servers and grandchildren in their own sessions"
        finally:
            driver.kill()
        until_sync(lambda: not tag.alive(), 20, "no engine outlives its driver")


GPUS = """
import asyncio, json, sys, ray
from pathlib import Path
from dispatch.engines import EngineFleet, EngineSpec
ray.init(address="local", num_cpus=2, num_gpus=3, include_dashboard=False, log_to_driver=False)
async def main():
    command, env = tuple(json.loads(sys.argv[1])), {"TEST_TAG": sys.argv[2]}
    specs = [EngineSpec(command=command, env=env, num_gpus=number) for number in (1, 2)]
    async with EngineFleet(specs) as fleet:
        for engine in await fleet.wait_ready(120):
            lines = Path(f"/proc/{engine.pid}/environ").read_text().split(chr(0))
            print(next(line for line in lines if line.startswith("CUDA_VISIBLE_DEVICES=")))
asyncio.run(main())
"""


@pytest.mark.timeout(180)
def test_each_engine_sees_the_gpus_that_ray_gave_it(tag: Tag) -> None:
    """Of a Ray that was told of three: it gives them out by number, whether they are there or not."""
    arguments = (json.dumps(spec_of(tag).command), tag.text)
    done = subprocess.run(
        [sys.executable, "-c", GPUS, *arguments], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = [
        line.partition("=")[2].split(",") for line in done.stdout.splitlines() if line.startswith("CUDA_")
    ]
    assert [len(numbers) for numbers in seen] == [1, 2]
    assert sorted(seen[0] + seen[1]) == ["0", "1", "2"]
