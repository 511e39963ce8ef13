"""A lane's watch over its poster, without one."""

import asyncio
import time

import pytest
from ray.exceptions import ActorDiedError

from dispatch.posting.posters.batching import MAX_CALLS, Unsent
from dispatch.posting.posters.lane import Health, PosterLane, State
from dispatch.posting.posters.poster import Pulse
from dispatch.posting.posters.session import Session
from dispatch.posting.request import Answer, Item
from protocol import CodedError


async def test_an_unavailable_poster_is_probed_at_its_interval_and_not_in_a_hot_loop(ray_local: None) -> None:
    """The death detector breaks off with the first trouble; from then on only the interval paces."""
    health = Health(interval=0.1, unavailable=1.0)
    lane = PosterLane("poster/0.1", lambda _: None, lambda _: None, health, Session())
    probes = 0

    async def away() -> CodedError:
        nonlocal probes
        probes += 1
        return CodedError("ACTOR.UNAVAILABLE", "out of reach")

    async def broken() -> None:
        raise ConnectionResetError

    lane._probe = away  # type: ignore[method-assign]
    lane._hold = asyncio.create_task(broken())
    async with asyncio.timeout(20):
        why = await lane.watch()
    assert why.code == "ACTOR.UNAVAILABLE"
    assert lane.trouble is why
    assert 2 <= probes <= 20
    assert isinstance(lane._hold.exception(), ConnectionResetError)


async def test_a_probe_that_was_answered_while_the_loop_stood_still_is_no_silence(
    ray_local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = PosterLane("poster/0.1", lambda _: None, lambda _: None, Health(timeout=0.2), Session())

    async def call(method: str) -> Pulse:
        await asyncio.sleep(0.1)
        return Pulse(0.0, 0)

    monkeypatch.setattr(lane, "_call", call)
    probe = asyncio.create_task(lane._probe())
    await asyncio.sleep(0.01)
    time.sleep(0.5)  # noqa: ASYNC251 - as a caller's own code does that computes
    assert await probe is None


async def test_a_death_that_the_probes_answer_met_is_final(ray_local: None) -> None:
    """Back in service it would refuse each POST at once, and the POST come back to it at once, until its
    deadline and without ever letting the event loop go on."""
    changes: list[State] = []
    health = Health(interval=0.05)
    lane = PosterLane("poster/0.1", lambda _: None, lambda one: changes.append(one.state), health, Session())
    lane.state = State.SERVING
    died = CodedError("ACTOR.DIED", "SIGKILL")

    async def answers_and_dies() -> None:
        await asyncio.sleep(0)
        lane._batcher.settle(died)
        lane._died(died)

    async def nothing() -> None:
        await asyncio.Event().wait()

    lane._probe = answers_and_dies  # type: ignore[method-assign]
    lane._hold = asyncio.create_task(nothing())
    async with asyncio.timeout(20):
        assert await lane.watch() is died
    assert changes == [State.QUARANTINED]
    lane._hold.cancel()


@pytest.mark.parametrize("how", ["quarantined", "retired"])
async def test_out_of_service_what_was_not_sent_goes_elsewhere_at_once(
    ray_local: None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting_at_the_change: list[bool] = []
    gone = asyncio.Event()
    lane = PosterLane(
        "poster/0.1",
        lambda _: None,
        lambda _: waiting_at_the_change.append(not waiting.done()),
        Health(),
        Session(),
    )
    lane.state = State.SERVING
    monkeypatch.setattr(lane, "send", lambda _: asyncio.Event().wait())
    monkeypatch.setattr(lane, "_confirm_gone", lambda by_itself: gone.wait())

    async def run(number: int) -> asyncio.Task[Answer]:
        task = asyncio.create_task(lane.run(Item(f"r{number}", number, "http://engine", b"{}", {}), 60.0))
        await asyncio.sleep(0.01)
        return task

    sent = [await run(n) for n in range(MAX_CALLS)]
    waiting = await run(50)
    assert not waiting.done()
    if how == "quarantined":
        lane._set(State.QUARANTINED)
        assert waiting_at_the_change == [True]  # the shares are split anew before anything goes elsewhere
    why = CodedError("ACTOR.WEDGED", "silent")
    retiring = asyncio.create_task(lane.retire(why)) if how == "retired" else None
    for late in (waiting, await run(60)):
        with pytest.raises(Unsent):
            await asyncio.wait_for(late, 5)
    assert not any(task.done() for task in sent)
    gone.set()
    await (retiring or lane.retire(why))
    for task in sent:
        with pytest.raises(CodedError, match=r"ACTOR\.DIED"):
            await task


@pytest.mark.parametrize("died", ["by itself", "by our hand"])
async def test_on_another_node_our_own_kill_takes_its_time(
    ray_local: None, died: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says at once that the actor is dead; its process, if it was stopped, still has its connections open
    for the 5 s after which its raylet sends SIGKILL."""
    monkeypatch.setattr("dispatch.posting.posters.lane.RAYLET_KILLS", 3.0)
    lane = PosterLane("poster/0.1", lambda _: None, lambda _: None, Health(), Session())

    async def dead() -> None:
        raise ActorDiedError

    lane._hold = asyncio.create_task(dead())
    if died == "by itself":
        lane._died(CodedError("ACTOR.DIED", "SIGKILL"))
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await lane.retire(CodedError("ACTOR.WEDGED", "silent"))
    took = loop.time() - began
    assert took < 3 if died == "by itself" else took >= 3
