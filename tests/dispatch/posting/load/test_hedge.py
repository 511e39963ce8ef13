"""A delay is a percentile of what is known, and hedges stay below their share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting.load.hedge import EVERY, KEEP, WINDOW, Hedging


def test_nothing_until_enough_is_known() -> None:
    hedging = Hedging()
    assert hedging.delay("a") is None
    for number in range(19):
        hedging.learn("a", float(number))
        assert hedging.delay("a") is None
    hedging.learn("a", 19.0)
    assert hedging.delay("a") == 18.0
    assert hedging.delay("b") is None


def test_old_latencies_are_forgotten() -> None:
    hedging = Hedging()
    for _ in range(1000):
        hedging.learn("a", 100.0)
    assert hedging.delay("a") == 100.0
    for _ in range(WINDOW):
        hedging.learn("a", 1.0)
    assert hedging.delay("a") == 1.0


def test_the_number_of_origins_is_bounded() -> None:
    hedging = Hedging(least=1)
    for number in range(5 * KEEP):
        hedging.learn(f"http://h{number}:80", 1.0)
        assert len(hedging._origins) <= KEEP
    assert hedging.delay(f"http://h{5 * KEEP - 1}:80") == 1.0
    assert hedging.delay("http://h0:80") is None


def test_a_share_of_the_first_attempts_and_no_more() -> None:
    hedging = Hedging(share=0.05)
    assert not hedging.try_take()
    hedged = 0
    for _ in range(10_000):
        hedging.deposit()
        hedged += hedging.try_take()
    assert hedged == 500
    for _ in range(10_000):
        hedging.deposit()
    assert sum(hedging.try_take() for _ in range(1000)) == 16


@pytest.mark.parametrize(
    "wrong",
    [{"percentile": 0}, {"percentile": 1.1}, {"share": -0.1}, {"share": 2}, {"least": 0}, {"burst": 0}],
)
def test_what_cannot_work(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cannot work"):
        Hedging(**wrong)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    latencies=st.lists(st.floats(0, 1e6), min_size=1, max_size=3 * WINDOW),
    percentile=st.floats(0.01, 1.0),
)
def test_the_delay_is_the_nearest_rank_of_a_window(latencies: list[float], percentile: float) -> None:
    hedging = Hedging(percentile=percentile, least=1)
    for number, seconds in enumerate(latencies, 1):
        hedging.learn("a", seconds)
        delay = hedging.delay("a")
        # It may be up to `EVERY` latencies old, no more.
        windows = [
            latencies[max(end - WINDOW, 0) : end] for end in range(max(number - EVERY, 0) + 1, number + 1)
        ]
        if number in (1, 20, WINDOW, len(latencies)):
            assert delay in {sorted(w)[max(math.ceil(percentile * len(w)), 1) - 1] for w in windows}
