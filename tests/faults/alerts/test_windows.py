"""The sliding window against a naive model: keep everything, sort, count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from faults.alerts.windows import SlidingWindow


class Naive:
    def __init__(self, count: int, within: float) -> None:
        self.count, self.within = count, within
        self.times: list[float] = []

    def add(self, ts: float) -> bool:
        self.times = sorted([*self.times, ts])
        return any(
            sum(start <= other <= start + self.within for other in self.times) >= self.count
            for start in self.times
        )


@given(
    count=st.integers(1, 6),
    within=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 20)), max_size=60),
)
def test_equals_the_naive_model_for_events_late_by_up_to_the_window(
    count: int, within: int, steps: list[tuple[int, int]]
) -> None:
    window, naive = SlidingWindow(count, within), Naive(count, within)
    newest = 1_700_000_000
    for step, late in steps:
        newest += step
        ts = newest - min(late, within)
        full = window.add(ts)
        assert full == naive.add(ts)
        assert len(window) <= 2 * count
        if full:
            window.clear()
            naive = Naive(count, within)


@given(times=st.lists(st.floats(0, 1e9), max_size=50), count=st.integers(1, 5))
def test_any_order_is_bounded_and_never_full_without_reason(times: list[float], count: int) -> None:
    window, naive = SlidingWindow(count, 10.0), Naive(count, 10.0)
    for ts in times:
        known = naive.add(ts)
        if window.add(ts):
            assert known
            return
        assert len(window) <= 2 * count


def test_the_window_is_closed() -> None:
    window = SlidingWindow(2, 10.0)
    assert not window.add(100.0)
    assert window.add(110.0)
    window.clear()
    assert not window.add(100.0)
    assert not window.add(110.5)
