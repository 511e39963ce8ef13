"""Targets under every interleaving: no lease is lost, nobody is woken for nothing or not at all, one
trial at a time, and memory stays flat."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting.load.targets import MAX_URLS, Lease, Target, Targets, Verdict, origin_of
from protocol import CodedError
from tests.dispatch.posting.load.virtual import Clock, VirtualLoop, run, settle

URL = "http://one:8000/generate"


def make(ceiling: int = 4, **options: int) -> Targets:
    return Targets(ceiling, asyncio.get_running_loop().time, **options)


def taken(targets: Targets, url: str = URL) -> Lease:
    lease = targets.try_acquire(url)
    assert lease is not None
    return lease


def waiter(targets: Targets, caller: object = "a", *, fail_fast: bool = False) -> asyncio.Task[Lease]:
    return asyncio.create_task(targets.acquire(URL, caller, fail_fast=fail_fast))


def eject(targets: Targets, url: str = URL) -> None:
    for _ in range(5):
        taken(targets, url).done(Verdict.FAILED)
    assert targets.try_acquire(url) is None


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://Host/x?y", "http://host:80"),
        ("HTTPS://host", "https://host:443"),
        ("http://user:pw@host:8000/a", "http://host:8000"),
        ("http://[::1]:30000/generate", "http://[::1]:30000"),
        ("http://host:0/", "http://host:0"),
    ],
)
def test_the_origin(url: str, origin: str) -> None:
    assert origin_of(url) == origin


def test_up_to_the_ceiling_and_each_target_for_itself() -> None:
    targets = Targets(2, Clock())
    leases = [taken(targets), taken(targets, "http://one:8000/other")]
    assert targets.try_acquire(URL) is None
    assert targets.try_acquire("http://two:8000/generate") is not None
    leases[0].done(Verdict.GOOD)
    assert targets.try_acquire(URL) is not None
    one, two = targets.stats()
    assert (one.origin, one.in_flight, one.limit, one.ejected_for, one.waiting, one.standing) == (
        "http://one:8000", 2, 2.0, 0.0, 0, "serving",
    )  # fmt: skip
    assert two.in_flight == 1


def test_a_lease_is_given_back_once() -> None:
    lease = taken(Targets(2, Clock()))
    lease.done(Verdict.NONE)
    with pytest.raises(AssertionError, match="given back twice"):
        lease.done(Verdict.NONE)


@pytest.mark.parametrize("verdict", [Verdict.REQUEST, Verdict.NONE, Verdict.PUSHBACK, Verdict.GOOD])
def test_what_does_not_eject(verdict: Verdict) -> None:
    targets = Targets(1000, Clock())
    for _ in range(100):
        taken(targets).done(verdict)
    assert targets.stats()[0].standing == "serving"


def test_a_refused_request_shows_that_the_server_lives_and_a_pushback_shows_nothing() -> None:
    targets = Targets(1000, Clock())
    for verdict in (Verdict.REQUEST, Verdict.GOOD):
        for _ in range(4):
            taken(targets).done(Verdict.FAILED)
        taken(targets).done(verdict)
    for _ in range(4):
        taken(targets).done(Verdict.FAILED)
        taken(targets).done(Verdict.PUSHBACK)
        taken(targets).done(Verdict.NONE)
    assert targets.stats()[0].standing == "serving"
    taken(targets).done(Verdict.FAILED)
    assert targets.stats()[0].standing == "ejected"


def test_whoever_waits_is_woken_when_a_hold_ends() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        targets = make()
        taken(targets).done(Verdict.PUSHBACK, 5.0)
        began = loop.time()
        leases = await asyncio.gather(waiter(targets), waiter(targets))
        assert loop.time() - began == pytest.approx(5.0)
        for lease in leases:
            lease.done(Verdict.PUSHBACK)
        assert targets.stats()[0].limit == pytest.approx(4 * 0.7 * 0.7)

    run(scenario())


def test_an_ejection_ends_in_one_trial_and_the_others_wait_for_it() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        targets = make()
        eject(targets)
        began = loop.time()
        tasks = [waiter(targets) for _ in range(3)]
        trial = await tasks[0]
        assert loop.time() - began == pytest.approx(1.0)
        await asyncio.sleep(100)
        assert not tasks[1].done()
        assert targets.stats()[0].standing == "half_open"
        trial.done(Verdict.FAILED)
        began = loop.time()
        trial = await tasks[1]
        assert loop.time() - began == pytest.approx(2.0)
        trial.done(Verdict.PUSHBACK, 10.0)  # alive, yet no verdict: the next one tries, when it may
        trial = await tasks[2]
        assert loop.time() - began == pytest.approx(12.0)
        tasks = [waiter(targets) for _ in range(2)]
        await settle()
        assert targets.stats()[0].waiting == 2
        trial.done(Verdict.REQUEST)
        await asyncio.gather(*tasks)
        assert targets.stats()[0].standing == "serving"

    run(scenario())


def test_a_trial_that_is_cancelled_goes_to_the_next() -> None:
    async def scenario() -> None:
        targets = make()
        eject(targets)
        first, second = waiter(targets), waiter(targets)
        trial = await first
        trial.done(Verdict.NONE)
        (await second).done(Verdict.GOOD)
        assert targets.stats()[0].standing == "serving"

    run(scenario())


def test_a_trial_handed_over_in_the_instant_of_the_cancellation_goes_to_the_next() -> None:
    async def scenario() -> None:
        targets = make()
        eject(targets)
        first, second, third = waiter(targets), waiter(targets), waiter(targets)
        trial = await first
        trial.done(Verdict.NONE)  # handed to the second, which has not run since
        second.cancel()
        assert isinstance(await third, Lease)
        assert second.cancelled()
        assert targets.stats()[0].in_flight == 1

    run(scenario())


def test_fail_fast_does_not_wait_for_an_ejected_server() -> None:
    async def scenario() -> None:
        targets = make()
        eject(targets)
        with pytest.raises(CodedError) as caught:
            await targets.acquire(URL, "a", fail_fast=True)
        assert caught.value.code == "UPSTREAM.EJECTED"
        assert caught.value.data == {"origin": "http://one:8000", "failures": 5, "ejected_for": 1.0}
        trial = await waiter(targets)
        with pytest.raises(CodedError, match="until a trial has gone well"):  # nor for the trial of another
            await targets.acquire(URL, "a", fail_fast=True)
        trial.done(Verdict.NONE)
        (await targets.acquire(URL, "a", fail_fast=True)).done(Verdict.GOOD)  # but it may be the trial

    run(scenario())


def test_an_ejection_ends_the_wait_of_those_who_fail_fast_and_of_no_others() -> None:
    async def scenario() -> None:
        targets = make(ceiling=5)
        leases = [taken(targets) for _ in range(5)]
        hasty, patient = waiter(targets, fail_fast=True), waiter(targets)
        cancelled = waiter(targets, fail_fast=True)
        await settle()
        stuck = leases.pop()
        for lease in leases:  # the places go to those who wait
            lease.done(Verdict.FAILED)
        await settle()
        more = [waiter(targets, fail_fast=True) for _ in range(10)]
        tail = waiter(targets, "b")
        await settle()
        assert targets.stats()[0].waiting == 10
        stuck.done(Verdict.FAILED)
        more[-1].cancel()  # refused and cancelled in the same instant: still no complaint at its end
        outcomes = await asyncio.gather(*more, return_exceptions=True)
        codes = [outcome.code for outcome in outcomes if isinstance(outcome, CodedError)]
        assert codes == ["UPSTREAM.EJECTED"] * 8
        assert isinstance(outcomes[-1], asyncio.CancelledError)
        assert targets.stats()[0].waiting == 1
        for task in (hasty, patient, cancelled):
            task.result().done(Verdict.NONE)
        assert isinstance(await tail, Lease)

    run(scenario())


def test_the_callers_take_turns() -> None:
    async def scenario() -> None:
        targets = make(ceiling=1)
        lease = taken(targets)
        order: list[str] = []

        async def one(caller: str) -> None:
            mine = await targets.acquire(URL, caller)
            order.append(caller)
            mine.done(Verdict.GOOD)

        tasks = [asyncio.create_task(one("many")) for _ in range(200)]
        await settle()
        tasks += [asyncio.create_task(one("few")) for _ in range(3)]
        await settle()
        lease.done(Verdict.GOOD)
        await asyncio.gather(*tasks)
        assert order[:6].count("few") == 3

    run(scenario())


def test_nobody_overtakes_those_who_wait() -> None:
    async def scenario() -> None:
        targets = make(ceiling=1)
        first = taken(targets)
        task = waiter(targets)
        await settle()
        first.done(Verdict.GOOD)
        assert targets.try_acquire(URL) is None  # it is the waiter's, which has not run yet
        lease = await task
        second = waiter(targets)
        await settle()
        second.cancel()
        lease.done(Verdict.GOOD)
        assert targets.try_acquire(URL) is not None  # one that has gone is in nobody's way
        await settle()

    run(scenario())


def test_nobody_overtakes_those_whose_timer_is_late() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        targets = make()
        taken(targets).done(Verdict.PUSHBACK, 5.0)
        task = waiter(targets)
        await settle()
        loop.clock.now += 6.0  # the loop was busy, and has not come to its timers yet
        assert targets.try_acquire(URL) is None
        await task
        assert targets.try_acquire(URL) is not None

    run(scenario())


def test_one_timer_a_target_and_none_where_nobody_waits() -> None:
    async def scenario() -> None:
        targets = make()
        taken(targets).done(Verdict.PUSHBACK, 100.0)
        target = targets._by_url[URL]
        assert target._timer is None
        tasks = [waiter(targets) for _ in range(5)]
        await settle()
        timer = target._timer
        assert timer is not None
        tasks.append(waiter(targets))
        await settle()
        assert target._timer is timer
        for task in tasks:
            task.cancel()
        await settle()
        assert target._timer is None
        assert timer.cancelled()
        assert targets.stats()[0].waiting == 0

    run(scenario())


def test_close_refuses_those_who_wait_and_those_who_come() -> None:
    async def scenario() -> None:
        targets = make(ceiling=1)
        lease = taken(targets)
        tasks = [waiter(targets, caller) for caller in range(3)]
        await settle()
        tasks[1].cancel()
        targets.close(CodedError("POOL.CLOSED", "closed"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [CodedError, asyncio.CancelledError, CodedError]
        with pytest.raises(CodedError, match=r"POOL\.CLOSED"):
            await targets.acquire(URL, "a")
        lease.done(Verdict.NONE)

    run(scenario())


@pytest.mark.parametrize("verdict", [Verdict.GOOD, Verdict.PUSHBACK, Verdict.FAILED])
def test_memory_stays_flat_over_many_servers(verdict: Verdict) -> None:
    clock = Clock()
    targets = Targets(4, clock, keep=64)
    for number in range(10 * MAX_URLS):
        clock.now += 1.0
        taken(targets, f"http://host{number}/generate").done(verdict, 20.0)
        assert len(targets._by_url) <= MAX_URLS
        assert len(targets._by_origin) <= 128


def test_memory_stays_flat_over_many_urls_of_one_server() -> None:
    targets = Targets(4, Clock())
    for number in range(3 * MAX_URLS):
        taken(targets, f"{URL}?{number}").done(Verdict.GOOD)
    assert len(targets._by_url) <= MAX_URLS
    assert len(targets._by_origin) == 1


def test_what_is_in_use_or_out_is_not_forgotten_and_what_was_learned_last() -> None:
    clock = Clock()
    targets = Targets(10, clock, keep=8)
    busy = taken(targets, "http://busy/x")
    eject(targets, "http://broken/x")
    taken(targets, "http://slow/x").done(Verdict.PUSHBACK)
    for number in range(20):
        taken(targets, f"http://host{number}/x").done(Verdict.GOOD)
    origins = {one.origin for one in targets.stats()}
    assert {"http://busy:80", "http://broken:80", "http://slow:80"} <= origins
    assert len(origins) <= 16
    busy.done(Verdict.GOOD)
    assert targets.try_acquire("http://busy/x") is not None


def test_a_server_that_was_forgotten_is_one_again_by_all_its_urls() -> None:
    targets = Targets(10, Clock(), keep=8)
    for url in ("http://a/1", *(f"http://host{number}/x" for number in range(8)), "http://a/2"):
        taken(targets, url).done(Verdict.GOOD)
    leases = [taken(targets, f"http://a/{number % 2 + 1}") for number in range(10)]
    assert targets.try_acquire("http://a/1") is targets.try_acquire("http://a/2") is None
    assert len(leases) == 10


class World:
    """Targets, the leases that tasks hold, and those who wait."""

    def __init__(self, ceiling: int) -> None:
        self.targets = make(ceiling)
        self.held: list[Lease] = []
        self.waiting: list[asyncio.Task[Lease]] = []

    @property
    def target(self) -> Target:
        return next(iter(self.targets._by_origin.values()))

    async def step(self) -> None:
        await settle()
        for task in list(self.waiting):
            if task.done():
                self.waiting.remove(task)
                if not task.cancelled() and task.exception() is None:
                    self.held.append(task.result())
        if not self.targets._by_origin:
            return
        target = self.target
        assert target.limit.in_flight == len(self.held)
        assert len(target.queue) == len(self.waiting)
        now = asyncio.get_running_loop().time()
        # Nobody waits for nothing, and a wait that time may end has its timer.
        assert not (self.waiting and target._free(now))
        assert (target._timer is not None) == bool(self.waiting and target._blocked_until() > now)


NAMES = [
    "try", "wait", "wait", "wait", "fast", "good", "fail", "fail", "push", "hold", "none", "bad", "cancel",
    "race", "time",
]  # fmt: skip
ACTIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1 << 16)), max_size=80)
VERDICTS: dict[str, Callable[[int], tuple[Verdict, float | None]]] = {
    "good": lambda n: (Verdict.GOOD, None),
    "fail": lambda n: (Verdict.FAILED, None),
    "push": lambda n: (Verdict.PUSHBACK, None),
    "hold": lambda n: (Verdict.PUSHBACK, n % 7 / 2),
    "none": lambda n: (Verdict.NONE, None),
    "bad": lambda n: (Verdict.REQUEST, None),
    "race": lambda n: (list(Verdict)[n % 5], None),
}


@settings(max_examples=200, deadline=None)
@given(ceiling=st.integers(1, 6), actions=ACTIONS)
def test_any_interleaving(ceiling: int, actions: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        world = World(ceiling)
        for action, number in actions:
            if action == "try":
                lease = world.targets.try_acquire(URL)
                if lease is not None:
                    world.held.append(lease)
            elif action in ("wait", "fast"):
                world.waiting.append(waiter(world.targets, number % 3, fail_fast=action == "fast"))
            elif action == "cancel":
                if world.waiting:
                    world.waiting[number % len(world.waiting)].cancel()
            elif action == "time":
                await asyncio.sleep(number % 40 / 10)
            elif world.held:
                world.held.pop(number % len(world.held)).done(*VERDICTS[action](number))
                if action == "race":  # handed over, and its taker is cancelled before it wakes up
                    for task in world.waiting[: 1 + number % 3]:
                        task.cancel()
            await world.step()
        for _ in range(len(world.held) + len(world.waiting)):
            if not world.held:
                await asyncio.sleep(60.0)  # whatever they wait for is over by then
                await world.step()
            world.held.pop().done(Verdict.GOOD)
            await world.step()
        assert not world.waiting
        assert not world.held

    run(scenario())


def test_many_tasks_with_timeouts_keep_every_place() -> None:
    async def scenario() -> None:
        rng = random.Random(20261)
        targets = make(ceiling=7)
        inside = 0

        async def one(number: int) -> None:
            nonlocal inside
            async with asyncio.timeout(rng.uniform(0, 20)):
                lease = targets.try_acquire(URL) or await targets.acquire(URL, number % 5)
                inside += 1
                assert inside <= 7
                verdict = Verdict.NONE
                try:
                    await asyncio.sleep(rng.choice([0, 0, 0.001]))
                    verdict = rng.choice([Verdict.GOOD, Verdict.GOOD, Verdict.PUSHBACK, Verdict.FAILED])
                finally:
                    inside -= 1
                    lease.done(verdict, rng.choice([None, 0.01]))

        tasks = [asyncio.create_task(one(number)) for number in range(2000)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(rng.choice([0, 0, 0.01]))
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settle()
        one_target = targets.stats()[0]
        assert (one_target.in_flight, one_target.waiting, inside) == (0, 0, 0)

    run(scenario())
