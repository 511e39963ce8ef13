"""What a fleet is asked to do with one engine, on a real Ray: drain, restart, quarantine, hold."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import psutil
import pytest
import ray
from ray.util import placement_group_table

from dispatch.engines import EngineSpec, embedded_spec
from protocol import CodedError
from tests.dispatch.engines.keeping.test_publication import Recorder
from tests.dispatch.engines.processes import Tag, spec_of
from tests.dispatch.engines.test_fleet import fleet_of, names
from tests.support.events import EventFile
from tests.support.wait import until

SICK = CodedError("ENGINE.UNHEALTHY", "missed weight version 7")


async def generate(url: str, tokens: int) -> int:
    """How many tokens came, over an engine's own interface."""
    body = {
        "text": "One, two, three,",
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
    }
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        reply = await client.post(f"{url}/generate", json=body)
    made = reply.json()["meta_info"]
    assert made["finish_reason"]["type"] == "length", made
    return int(made["completion_tokens"])


async def test_drain_ends_what_was_begun(ray_local: None, tag: Tag, events: EventFile) -> None:
    router = Recorder()
    spec = embedded_spec(token_rate=40, env=tag.env)
    async with fleet_of([spec], events, router=router) as fleet:
        engine = fleet.engines()[0]
        await until(lambda: router.shown == {engine.url})
        working = asyncio.create_task(generate(engine.url, 80))
        async with httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(f"{engine.url}/v1/loads")).json()["num_running"] == 0:
                assert not working.done()
        draining = asyncio.create_task(fleet.drain("engine/0"))
        await until(lambda: fleet.engines()[0].state == "draining")
        assert fleet.routable() == []
        await until(lambda: router.shown == set())
        assert await working == 80
        await draining
        down = fleet.engines()[0]
        assert (down.state, down.code, fleet.given_up) == ("dead", "", ())
        assert tag.alive() == []
        again = await fleet.restart("engine/0")
        assert again.state == "ready"
        assert again.pid != engine.pid
        await until(lambda: router.shown == {again.url})
    assert router.shown == set()
    assert names(events) == [
        *("engine.starting", "engine.ready", "engine.draining", "engine.drained", "engine.stopped"),
        *("engine.starting", "engine.ready", "engine.stopped"),
    ]
    assert events.named("engine.drained")[0]["data"]["empty"] is True


async def test_drain_has_an_end(ray_local: None, tag: Tag, events: EventFile) -> None:
    """An engine that does not say what it has under way is stopped when its time is over."""
    async with fleet_of([spec_of(tag, drain_timeout=0.3)], events) as fleet:
        await fleet.drain("engine/0")
        assert tag.alive() == []
    assert events.named("engine.drained")[0]["data"]["empty"] is False


async def test_restart_while_another_one_serves(ray_local: None, tag: Tag, events: EventFile) -> None:
    specs = [spec_of(tag, drain_timeout=0.0), spec_of(tag)]
    async with fleet_of(specs, events) as fleet:
        first, other = fleet.engines()
        again = await fleet.restart("engine/0")
        assert (again.pid != first.pid, again.restarts) == (True, 1)
        assert fleet.engines()[1] == other
        assert fleet.recoveries == [], "nothing went down by itself"
    assert "engine.died" not in names(events)


async def test_quarantined_until_restarted(ray_local: None, tag: Tag, events: EventFile) -> None:
    async with fleet_of([spec_of(tag, drain_timeout=0.0)], events) as fleet:
        before = fleet.engines()[0]
        fleet.quarantine("engine/0", SICK)
        await until(lambda: fleet.engines()[0].state == "quarantined")
        assert fleet.routable() == []
        assert before.pid in tag.alive()
        assert "version 7" in fleet.engines()[0].detail
        after = await fleet.restart("engine/0")
        assert (after.state, after.code) == ("ready", "")
    assert names(events)[2] == "engine.quarantined"


async def test_what_was_given_up_can_be_asked_for_again(ray_local: None, tag: Tag, events: EventFile) -> None:
    bad = EngineSpec(command=("/no/such/engine", "{port}"))
    async with fleet_of([bad], events, 0) as fleet:
        await until(lambda: fleet.given_up)
        with pytest.raises(CodedError, match="/no/such/engine"):
            await fleet.restart("engine/0")
        await fleet.drain("engine/0")


async def test_held_is_not_replaced(ray_local: None, tag: Tag, events: EventFile) -> None:
    """A paused SGLang times out on /health; the embedded engine does the same."""
    spec = embedded_spec(
        token_rate=500, env=tag.env, health_timeout=1.0, probe_interval=0.1, health_failures=2
    )
    async with fleet_of([spec], events) as fleet:
        engine = fleet.engines()[0]
        await fleet.hold("engine/0", 60.0, "weights 7")
        assert (fleet.engines()[0].held, fleet.routable()) == ("weights 7", [])
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{engine.url}/pause_generation", json={"mode": "in_place"})
            with pytest.raises(httpx.TimeoutException):
                await client.get(f"{engine.url}/health", timeout=3.0)
            assert fleet.engines()[0].state == "ready"
            await client.post(f"{engine.url}/continue_generation")
        await fleet.release("engine/0")
        assert fleet.routable()[0].pid == engine.pid
        # Paused without a word, or for longer than was said, is as good as frozen.
        await fleet.hold("engine/0", 0.5, "weights 8")
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{engine.url}/pause_generation", json={"mode": "in_place"})
        await until(lambda: fleet.restarts == 1)
        assert (await fleet.wait_ready(30))[0].held == ""
    assert events.named("engine.died")[0]["code"] == "ENGINE.UNHEALTHY"


async def test_held_and_dead_is_seen_at_once(ray_local: None, tag: Tag, events: EventFile) -> None:
    async with fleet_of([spec_of(tag)], events) as fleet:
        engine = fleet.engines()[0]
        await fleet.hold("engine/0", 60.0, "weights 7")
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: fleet.restarts == 1)
        back = (await fleet.wait_ready(30))[0]
        assert (back.pid != engine.pid, back.held) == (True, "")
        assert back.exit is not None
        assert back.exit.signal == 9


async def test_a_stopped_supervisor_is_replaced_with_its_engine(
    ray_local: None, tag: Tag, events: EventFile
) -> None:
    """It can do nothing that it is asked for, not even to die."""
    async with fleet_of([spec_of(tag, supervisor_timeout=0.5)], events) as fleet:
        engine = fleet.engines()[0]
        os.kill(engine.supervisor_pid, signal.SIGSTOP)
        await until(lambda: fleet.restarts == 1, 30)
        back = (await fleet.wait_ready(30))[0]
        assert back.pid != engine.pid
        assert not psutil.pid_exists(engine.supervisor_pid)
        assert engine.pid not in tag.alive()
    assert events.named("engine.died")[0]["code"] == "ENGINE.SUPERVISOR_LOST"
    assert "silent" in events.named("engine.died")[0]["detail"]


async def test_a_short_stop_of_the_supervisor_changes_nothing(
    ray_local: None, tag: Tag, events: EventFile
) -> None:
    async with fleet_of([spec_of(tag)], events) as fleet:
        engine = fleet.engines()[0]
        os.kill(engine.supervisor_pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)  # how long it is stopped
        os.kill(engine.supervisor_pid, signal.SIGCONT)
        await fleet.hold("engine/0", 5.0, "it answers")
        assert fleet.engines()[0].pid == engine.pid


async def test_orders_to_nobody(ray_local: None, tag: Tag, events: EventFile) -> None:
    async with fleet_of([spec_of(tag, "--never-bind")], events, 0) as fleet:
        with pytest.raises(CodedError, match=r"no engine 'engine/9', only engine/0"):
            await fleet.drain("engine/9")
        with pytest.raises(CodedError, match="not running"):
            await fleet.hold("engine/0", 1.0, "too early")
        with pytest.raises(CodedError, match=r"CONFIG\.INVALID"):
            await fleet.hold("engine/0", 0.0, "no time")
        with pytest.raises(CodedError, match=r"not ready again after 0\.1 s: engine/0"):
            await fleet.restart("engine/0", 0.1)
    with pytest.raises(CodedError, match=r"POOL\.CLOSED"):
        await fleet.drain("engine/0")


async def test_each_engine_has_its_place(ray_local: None, tag: Tag, events: EventFile) -> None:
    """And gives it back: a placement group that is left holds a GPU for ever."""
    specs = [spec_of(tag, num_cpus=1.0, drain_timeout=0.0)] * 2
    await until(lambda: standing() == 0, what="those of the tests before are gone")
    free = ray.available_resources()["CPU"]
    async with fleet_of(specs, events) as fleet:
        assert standing() == 2
        await fleet.drain("engine/1", 30)
        await until(lambda: standing() == 1, 20, "others may have its place")
        await fleet.restart("engine/1")
        assert standing() == 2
    await until(lambda: standing() == 0)
    await until(lambda: ray.available_resources().get("CPU", 0.0) >= free)


def standing() -> int:
    """How many placement groups there are."""
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


async def test_a_second_close_hastens_the_first(ray_local: None, tag: Tag, events: EventFile) -> None:
    stubborn = EngineSpec(
        command=("sh", "-c", f'trap "" TERM; {" ".join(spec_of(tag).command)}'),
        env=tag.env,
        term_timeout=1000.0,
    )
    async with fleet_of([stubborn], events) as fleet:
        closing = asyncio.create_task(fleet.close())
        await until(lambda: fleet.engines()[0].state == "stopping")
        assert await fleet.close(0.0) == ()
        assert await closing == ()
        assert tag.alive() == []
