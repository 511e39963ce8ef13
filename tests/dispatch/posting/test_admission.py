"""Admission under every interleaving: never above the whole nor above a share, first come first
served, and no place lost to a cancellation at any point."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting.admission import Admission
from protocol import CodedError
from tests.support.wait import until


@dataclass
class Place:
    """A lane as far as admission knows one."""

    name: str
    share: int = 0
    occupied: int = 0


@dataclass
class World:
    """An admission with its lanes, what tasks hold, and who waits, in order of arrival."""

    concurrency: int
    lanes: list[Place]
    served: list[Place] = field(default_factory=list)
    waiting: list[tuple[int, asyncio.Task[Place]]] = field(default_factory=list)
    held: list[Place] = field(default_factory=list)
    arrivals: int = 0
    last_served: int = -1

    def __post_init__(self) -> None:
        self.admission: Admission[Place] = Admission(self.concurrency)
        self.serve(self.lanes)

    def serve(self, lanes: list[Place]) -> None:
        self.served = list(lanes)
        self.admission.serve(lanes)

    async def step(self) -> None:
        """Let everything that can move do so, and look at it."""
        for _ in range(4):
            await asyncio.sleep(0)
        for number, task in list(self.waiting):
            if not task.done():
                continue
            self.waiting.remove((number, task))
            if not task.cancelled():
                assert number > self.last_served, "overtaken"
                self.last_served = number
                self.held.append(task.result())
        self.check()

    def check(self) -> None:
        admission = self.admission
        assert admission.occupied == len(self.held) <= admission.concurrency
        assert admission.peak <= admission.concurrency
        for lane in self.lanes:
            assert lane.occupied == sum(one is lane for one in self.held)
        assert sum(lane.share for lane in self.served) == (self.concurrency if self.served else 0)
        assert all(lane.share == 0 for lane in self.lanes if lane not in self.served)
        live = [task for _, task in self.waiting if not task.cancelling()]
        assert admission.waiting == len(live)
        if live:  # nobody waits while there is a place
            assert admission.occupied >= admission.concurrency or all(
                lane.occupied >= lane.share for lane in self.served
            )


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "arrive", "arrive", "release", "release", "cancel", "race", "serve", "avoid", "move"]
        ),
        st.integers(0, 1 << 16),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(concurrency=st.integers(1, 8), lanes=st.integers(1, 4), actions=ACTIONS)
def test_any_interleaving(concurrency: int, lanes: int, actions: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        world = World(concurrency, [Place(f"lane/{n}") for n in range(lanes)])
        for action, number in actions:
            if action in ("arrive", "avoid"):
                avoid = {f"lane/{number % lanes}"} if action == "avoid" else ()
                task = asyncio.create_task(world.admission.acquire(avoid))
                world.waiting.append((world.arrivals, task))
                world.arrivals += 1
                await asyncio.sleep(0)  # arrives before whatever comes next
            elif action == "release" and world.held:
                world.admission.release(world.held.pop(number % len(world.held)))
            elif action == "move" and world.held:
                lane = world.held.pop(number % len(world.held))
                other = world.admission.move(lane, {lane.name})
                assert (other is None) == (not world.served)
                if other is not None:
                    world.held.append(other)
            elif action == "cancel" and world.waiting:
                world.waiting[number % len(world.waiting)][1].cancel()
            elif action == "race" and world.held and world.waiting:
                # The place is handed over, and its taker is cancelled before it wakes up.
                world.admission.release(world.held.pop(number % len(world.held)))
                for _, task in world.waiting[: 1 + number % 3]:
                    task.cancel()
            elif action == "serve":
                world.serve([lane for n, lane in enumerate(world.lanes) if number >> n & 1])
            await world.step()
        world.serve(world.lanes)
        await world.step()
        while world.held:
            world.admission.release(world.held.pop())
            await world.step()
        assert not world.waiting
        assert world.admission.occupied == 0

    asyncio.run(scenario())


async def test_many_tasks_with_timeouts_keep_every_place() -> None:
    rng = random.Random(20260)
    lanes = [Place("a"), Place("b"), Place("c")]
    admission: Admission[Place] = Admission(7)
    admission.serve(lanes)
    inside = 0

    async def one() -> None:
        nonlocal inside
        lane = await admission.acquire()
        inside += 1
        assert inside <= 7
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        finally:
            inside -= 1
            admission.release(lane)

    tasks = [asyncio.create_task(one()) for _ in range(2000)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
        if rng.random() < 0.02:
            admission.serve(rng.sample(lanes, rng.randint(1, 3)))
    assert admission.occupied == admission.waiting == inside == 0
    assert [lane.occupied for lane in lanes] == [0, 0, 0]


async def test_the_emptiest_lane_is_taken_and_an_avoided_one_only_when_it_must() -> None:
    a, b = Place("a"), Place("b")
    admission: Admission[Place] = Admission(4)
    admission.serve([a, b])
    assert await admission.acquire({"a"}) is b
    assert await admission.acquire() is a
    assert await admission.acquire({"a"}) is b
    assert await admission.acquire({"b"}) is a  # the last place there is
    assert await_count(admission) == (4, 0)


def await_count(admission: Admission[Place]) -> tuple[int, int]:
    return admission.occupied, admission.waiting


async def test_a_resplit_never_lets_more_in_than_the_whole() -> None:
    old, new = Place("old"), Place("new")
    admission: Admission[Place] = Admission(3)
    admission.serve([old])
    for _ in range(3):
        await admission.acquire()
    admission.serve([new])  # old is gone, what it held is not yet known to have stopped
    waiting = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert (new.share, new.occupied) == (3, 0)
    admission.release(old)
    assert await waiting is new


async def test_a_place_that_moves_is_not_given_to_who_waits() -> None:
    silent, other = Place("silent"), Place("other")
    admission: Admission[Place] = Admission(2)
    admission.serve([silent, other])
    for _ in range(2):
        await admission.acquire()
    waiting = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    admission.serve([other])
    assert admission.move(silent, {"silent"}) is other
    assert [silent.occupied, other.occupied, other.share, admission.occupied] == [0, 2, 2, 2]
    admission.serve([])
    assert admission.move(other, {"other"}) is None
    assert (admission.occupied, waiting.done()) == (1, False)
    first = asyncio.create_task(admission.acquire(first=True))
    await asyncio.sleep(0)
    admission.serve([other])
    assert (await first, waiting.done()) == (other, False)
    admission.release(other)
    assert await waiting is other
    closed = CodedError("POOL.CLOSED", "closed")
    admission.close(closed)
    with pytest.raises(CodedError, match=r"POOL\.CLOSED"):
        admission.move(other, ())
    assert admission.occupied == 1


async def test_release_twice_is_an_error() -> None:
    lane = Place("a")
    admission: Admission[Place] = Admission(1)
    admission.serve([lane])
    taken = await admission.acquire()
    admission.release(taken)
    with pytest.raises(AssertionError, match="released twice"):
        admission.release(taken)


async def test_close_refuses_those_who_wait_and_those_who_come() -> None:
    lane = Place("a")
    admission: Admission[Place] = Admission(1)
    admission.serve([lane])
    await admission.acquire()
    waiting = [asyncio.create_task(admission.acquire()) for _ in range(3)]
    await until(lambda: admission.waiting == 3)
    admission.close(CodedError("POOL.CLOSED", "closed"))
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, CodedError)
        assert outcome.code == "POOL.CLOSED"
    with pytest.raises(CodedError, match=r"POOL\.CLOSED"):
        await admission.acquire()
    admission.release(lane)
    assert admission.occupied == 0
