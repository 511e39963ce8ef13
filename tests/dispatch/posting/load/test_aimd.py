"""The limit stays between 1 and the ceiling, falls once for what was under way together, and comes back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting.load.aimd import DECREASE, Limit
from tests.dispatch.posting.load.virtual import Clock


def fill(limit: Limit, now: float) -> list[int]:
    epochs = []
    while limit.may_send(now):
        epochs.append(limit.sent())
    return epochs


def test_it_starts_at_the_ceiling() -> None:
    clock = Clock()
    limit = Limit(7, clock)
    assert len(fill(limit, clock.now)) == limit.in_flight == 7


def test_one_decrease_for_what_was_under_way_together() -> None:
    clock = Clock()
    limit = Limit(100, clock)
    epochs = fill(limit, clock.now)
    for epoch in epochs:
        limit.pushed_back(epoch, None)
    assert limit.limit == pytest.approx(70)
    assert limit.in_flight == 0
    again = fill(limit, clock.now)
    assert len(again) == 70
    for epoch in again:
        limit.pushed_back(epoch, None)
    assert limit.limit == pytest.approx(49)


def test_it_comes_back_by_about_one_for_each_limit_of_successes() -> None:
    clock = Clock()
    limit = Limit(10, clock)
    limit.pushed_back(limit.sent(), None)
    for _ in range(7):
        limit.succeeded(limit.sent())
    assert 7.9 < limit.limit < 8.0
    for _ in range(1000):
        limit.succeeded(limit.sent())
    assert limit.limit == 10.0


def test_successes_of_before_a_decrease_do_not_undo_it() -> None:
    clock = Clock()
    limit = Limit(100, clock)
    epochs = fill(limit, clock.now)
    for epoch in epochs[:50]:
        limit.pushed_back(epoch, None)
    for epoch in epochs[50:]:
        limit.succeeded(epoch)
    assert limit.limit == pytest.approx(70)


def test_retry_after_holds_and_only_ever_longer() -> None:
    clock = Clock()
    limit = Limit(10, clock)
    epochs = [limit.sent() for _ in range(3)]
    limit.pushed_back(epochs[0], 5.0)
    limit.pushed_back(epochs[1], 2.0)  # of the same epoch: no decrease, and no shorter hold
    assert limit.limit == pytest.approx(7)
    assert not limit.may_send(clock.now + 4.999)
    assert limit.may_send(clock.now + 5.0)
    limit.pushed_back(epochs[2], 8.0)
    assert not limit.may_send(clock.now + 7.999)


@pytest.mark.parametrize("nonsense", [math.nan, -1.0, 0.0, None])
def test_no_time_is_no_hold(nonsense: float | None) -> None:
    clock = Clock()
    limit = Limit(10, clock)
    limit.pushed_back(limit.sent(), nonsense)
    assert limit.may_send(clock.now)


def test_a_hold_ends_whatever_the_server_asked_for() -> None:
    clock = Clock()
    limit = Limit(10, clock)
    limit.pushed_back(limit.sent(), math.inf)
    assert limit.may_send(clock.now + 300.0)


@settings(max_examples=200, deadline=None)
@given(ceiling=st.integers(1, 50), data=st.data())
def test_any_order_of_verdicts(ceiling: int, data: Any) -> None:
    clock = Clock()
    limit = Limit(ceiling, clock)
    out: list[int] = []
    decreases: dict[int, int] = {}
    steps = data.draw(st.lists(st.tuples(st.sampled_from("sspgge"), st.integers(0, 1 << 16)), max_size=100))
    for action, number in steps:
        if action == "s":
            if limit.may_send(clock.now):
                assert limit.in_flight < limit.limit
                out.append(limit.sent())
            continue
        if not out:
            continue
        epoch = out.pop(number % len(out))
        before = limit.limit
        if action == "p":
            limit.pushed_back(epoch, None)
            if limit.limit < before:
                assert limit.limit == max(1.0, before * DECREASE)
                decreases[epoch] = decreases.get(epoch, 0) + 1
        elif action == "g":
            limit.succeeded(epoch)
            assert before <= limit.limit <= before + 1
        else:
            limit.ended()
            assert limit.limit == before
        assert 1.0 <= limit.limit <= ceiling
        assert limit.in_flight == len(out)
    assert all(count == 1 for count in decreases.values())
    if not out:
        assert limit.may_send(clock.now)  # one may always be sent
