"""A first death is forgiven, after the second one suspect at a time, the third is the end."""

from __future__ import annotations

import asyncio
import random

import pytest

from dispatch.posting.load.suspects import KEEP, SAME, WINDOW, Deaths, Strikes
from protocol import CodedError
from tests.dispatch.posting.load.virtual import Clock, run, settle


def struck(deaths: Deaths, times: int = 2) -> Strikes:
    strikes = Strikes(deaths)
    for number in range(times):
        assert strikes.died(f"poster/{id(strikes)}.{number}", "ACTOR.DIED") is None
    return strikes


def nobodys(deaths: Deaths, what: str) -> None:
    """``what`` died, and who was there came through afterwards."""
    bystander = Strikes(deaths)
    bystander.died(what, "ACTOR.DIED")
    bystander.came_through()


def register() -> tuple[Deaths, Clock]:
    clock = Clock()
    return Deaths(clock), clock


def test_the_third_death_is_the_end_and_tells_of_all() -> None:
    strikes = Strikes(register()[0])
    assert strikes.died("poster/0", "ACTOR.DIED") is None
    assert strikes.died("poster/1", "ACTOR.DIED") is None
    error = strikes.died("engine/7", "ENGINE.EXITED")
    assert isinstance(error, CodedError)
    assert error.code == "REQUEST.POISON"
    assert error.data == {
        "deaths": ["poster/0", "poster/1", "engine/7"],
        "codes": ["ACTOR.DIED", "ACTOR.DIED", "ENGINE.EXITED"],
    }
    assert strikes.weight == 3


def test_how_many_is_a_setting() -> None:
    deaths, _ = register()
    assert Strikes(deaths, most=1).died("a", "ACTOR.DIED") is not None
    two = Strikes(deaths, most=2)
    assert two.died("a", "ACTOR.DIED") is None
    assert two.died("b", "ACTOR.DIED") is not None


def test_deaths_at_which_it_was_not_there_count_for_it() -> None:
    deaths, clock = register()
    for number in range(3):
        nobodys(deaths, f"poster/{number}.9")
    bystander = Strikes(deaths)
    for number in range(4):
        clock.now += SAME + 1
        assert bystander.died(f"poster/{number}.1", "ACTOR.DIED") is None
        nobodys(deaths, f"poster/{number}.2")
        assert bystander.weight == 0
    clock.now += WINDOW + 1  # all of that is long ago, and excuses it no more; yet it was not alone
    assert bystander.died("poster/0.7", "ACTOR.DIED") is None
    assert bystander.weight == 5
    assert bystander.died("poster/1.7", "ACTOR.DIED") is not None, (
        "what it is there at now has no other cause"
    )


def test_two_poisons_do_not_speak_for_each_other() -> None:
    """Copies of one prompt go to different engines and end both. Each was absent from the other's deaths;
    that is no sign of engines that die anyway, as long as the other has not come through."""
    deaths, clock = register()
    copies = [Strikes(deaths) for _ in range(8)]
    ended = []
    for turn in range(3):
        for number, copy in enumerate(copies):
            clock.now += SAME + 0.1
            error = copy.died(f"http://engine:{80 + number}", "TRANSPORT.DISCONNECTED")
            assert copy.weight == turn + 1
            ended.append(error)
    assert [error is not None for error in ended] == [False] * 16 + [True] * 8


def test_deaths_count_for_it_once_all_who_were_there_came_through() -> None:
    deaths, clock = register()
    others = [Strikes(deaths) for _ in range(2)]
    for other in others:
        other.died("poster/1.1", "ACTOR.DIED")
    clock.now += SAME + 1
    one = Strikes(deaths)
    one.died("poster/2.1", "ACTOR.DIED")
    assert one.weight == 1
    others[0].came_through()
    others[0].came_through()
    assert one.weight == 1, "one of the two has not come through yet"
    others[1].came_through()
    assert one.weight == 0
    assert [other.weight for other in others] == [0, 0], "whoever came through begins anew"


@pytest.mark.parametrize(
    ("how", "gone"),
    [
        (asyncio.CancelledError(), True),
        (CodedError("REQUEST.REJECTED", "400"), True),
        (CodedError("TIMEOUT.DEADLINE", "too late"), True),
        (CodedError("ACTOR.DIED", "once more"), False),
        (CodedError("REQUEST.OUTCOME_UNKNOWN", "once more", {"cause": "ACTOR.DIED"}), False),
        (CodedError("REQUEST.POISON", "guilty"), False),
    ],
)
def test_who_ended_of_something_else_is_not_waited_for(how: BaseException, gone: bool) -> None:
    """Among the many who are there at a death one is cancelled or refused now and then; while it counted as
    uncleared for ever, deaths without a cause spoke for nobody, and innocent ones were poison."""
    deaths, clock = register()
    through, other = Strikes(deaths), Strikes(deaths)
    for each in (through, other):
        each.died("poster/1.1", "ACTOR.DIED")
    clock.now += SAME + 1
    one = Strikes(deaths)
    one.died("poster/2.1", "ACTOR.DIED")
    other.ended(how)
    assert one.weight == 1, "nobody who was there has come through yet"
    through.came_through()
    assert one.weight == (0 if gone else 1)
    assert other.weight == (0 if gone else 1)


def test_all_who_were_there_tell_of_one_death() -> None:
    deaths, clock = register()
    everybody = [Strikes(deaths) for _ in range(50)]
    for one in everybody:
        one.died("http://engine:80", "TRANSPORT.DISCONNECTED")
        clock.now += SAME / 100
    assert {one.weight for one in everybody} == {1}
    clock.now += SAME + 1  # the same engine again, after its restart
    assert everybody[0].died("http://engine:80", "TRANSPORT.DISCONNECTED") is None
    assert everybody[0].weight == 2
    assert everybody[1].died("http://engine:80", "TRANSPORT.DISCONNECTED") is None
    assert everybody[1].weight == 2


def test_a_poster_that_both_copies_were_in_died_once() -> None:
    """A hedged request's second copy goes to the same poster where no other has room: its second death alone
    ended it as poison, the first having counted twice."""
    strikes = Strikes(register()[0])
    for _ in range(2):
        assert strikes.died("poster/0.1", "ACTOR.DIED") is None
    assert strikes.weight == 1
    assert strikes.died("poster/1.1", "ACTOR.DIED") is None
    assert strikes.weight == 2


def test_a_register_of_many_deaths_stays_small() -> None:
    deaths, clock = register()
    for number in range(10 * KEEP):
        clock.now += SAME + 0.1
        deaths.note(f"poster/{number}")
    assert len(deaths._last) <= KEEP
    assert deaths.unexplained(set()) <= WINDOW / SAME


def test_who_waits_for_whom() -> None:
    """Without a death nobody does. After one, suspects go together; after two each goes alone, with none of
    them under way: the guilty one, after its first death, must not end an innocent one at its third."""

    async def scenario() -> None:
        deaths, _ = register()
        inside: list[str] = []

        async def one(name: str, times: int, leave: asyncio.Event) -> None:
            async with struck(deaths, times).turn():
                inside.append(name)
                await leave.wait()
                inside.remove(name)

        def enter(name: str, times: int) -> asyncio.Event:
            leave = asyncio.Event()
            tasks.append(asyncio.create_task(one(name, times, leave)))
            return leave

        tasks: list[asyncio.Task[None]] = []
        first, second = enter("once 1", 1), enter("once 2", 1)
        await settle()
        assert inside == ["once 1", "once 2"]
        alone = enter("twice", 2)
        late = enter("once 3", 1)
        free = enter("never", 0)
        await settle()
        assert inside == ["once 1", "once 2", "never"], "whoever comes later does not go before"
        first.set()
        await settle()
        assert "twice" not in inside
        second.set()
        await settle()
        assert inside == ["never", "twice"]
        alone.set()
        await settle()
        assert inside == ["never", "once 3"]
        late.set()
        free.set()
        await asyncio.gather(*tasks)
        assert deaths.turns.idle

    run(scenario())


def test_who_is_cleared_while_it_waits_is_not_tried_alone_any_more() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        deaths = Deaths(loop.time)
        suspects = [Strikes(deaths) for _ in range(40)]
        for number in range(2):
            for one in suspects:
                one.died(f"poster/{number}.1", "ACTOR.DIED")

        async def attempt(one: Strikes) -> None:
            async with one.turn():
                await asyncio.sleep(10.0)
            one.came_through()

        tasks = [asyncio.create_task(attempt(one)) for one in suspects]
        began = loop.time()
        await asyncio.sleep(1.0)
        for number in range(2):
            nobodys(deaths, f"poster/{number}.2")
        await asyncio.gather(*tasks)
        assert deaths.turns.idle
        return loop.time() - began

    assert run(scenario()) == pytest.approx(20.0)


def test_one_suspect_at_a_time_in_order_whoever_is_cancelled() -> None:
    async def scenario(seed: int) -> None:
        rng = random.Random(seed)
        deaths, _ = register()
        inside: list[int] = []
        order: list[int] = []

        async def one(number: int) -> None:
            alone = number % 3 != 0
            async with struck(deaths, 2 if alone else 1).turn():
                inside.append(number)
                order.append(number)
                assert len(inside) == 1 or not any(one % 3 for one in inside)
                try:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside.remove(number)

        tasks = []
        for number in range(50):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0)
            if rng.random() < 0.7:
                rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settle()
        assert order == sorted(order)
        assert deaths.turns.idle

    for seed in range(50):
        run(scenario(seed))
