"""Retries are a share of first attempts and a trickle, however they come; a wait is as long as it says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting.load.budget import RetryBudget
from tests.dispatch.posting.load.virtual import Clock


def drain(budget: RetryBudget) -> int:
    taken = 0
    while budget.try_take():
        taken += 1
    return taken


def test_a_share_of_the_first_attempts() -> None:
    budget = RetryBudget(Clock(), burst=100)
    assert drain(budget) == 100
    for _ in range(50):
        budget.deposit()
    assert drain(budget) == 10


def test_a_trickle_flows_in_up_to_the_burst() -> None:
    clock = Clock()
    budget = RetryBudget(clock, floor=10, burst=20)
    drain(budget)
    clock.now += 1.0
    assert drain(budget) == 10
    clock.now += 1000.0
    assert drain(budget) == 20


def test_the_wait_is_exactly_as_long_as_it_says() -> None:
    clock = Clock(now=1e7 + 1 / 3)
    budget = RetryBudget(clock, floor=7.0, burst=3)
    assert budget.wait_for() == 0.0
    drain(budget)
    for _ in range(1000):
        wait = budget.wait_for()
        assert 0.0 < wait <= 1 / 7 + 1e-6
        clock.now += wait
        assert budget.try_take()
        assert not budget.try_take()


@pytest.mark.parametrize(("share", "floor", "burst"), [(-1, 10, 10), (0.2, 0, 10), (0.2, 10, 0.5)])
def test_what_cannot_work(share: float, floor: float, burst: float) -> None:
    with pytest.raises(ValueError, match="cannot work"):
        RetryBudget(Clock(), share=share, floor=floor, burst=burst)


@settings(max_examples=200, deadline=None)
@given(
    share=st.floats(0, 1),
    floor=st.floats(0.1, 100),
    burst=st.floats(1, 100),
    steps=st.lists(st.one_of(st.none(), st.booleans(), st.floats(0, 10)), max_size=200),
)
def test_never_more_than_was_put_in(
    share: float, floor: float, burst: float, steps: list[float | bool | None]
) -> None:
    clock = Clock()
    began = clock.now
    budget = RetryBudget(clock, share=share, floor=floor, burst=burst)
    taken = deposits = 0
    for step in steps:
        if step is None:
            budget.deposit()
            deposits += 1
        elif isinstance(step, bool):
            taken += drain(budget)
        else:
            clock.now += step
        assert taken <= burst + share * deposits + floor * (clock.now - began) + 1e-3
