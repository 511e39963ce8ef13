"""Failures in a row eject, one trial at a time decides, and nothing old or without a verdict counts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting.load.ejection import Ejection, Standing
from tests.dispatch.posting.load.virtual import Clock


def broken(clock: Clock) -> Ejection:
    """One that has just been ejected for the first time."""
    ejection = Ejection(clock)
    assert [ejection.failed(ejection.sent()) for _ in range(5)] == [False] * 4 + [True]
    return ejection


def test_five_in_a_row_eject_for_a_second() -> None:
    clock = Clock()
    ejection = broken(clock)
    assert ejection.standing is Standing.EJECTED
    assert ejection.ejected_for(clock.now) == 1.0
    assert not ejection.may_send(clock.now + 0.999)
    assert ejection.may_send(clock.now + 1.0)


def test_an_answer_in_between_counts_and_a_pushback_does_not() -> None:
    clock = Clock()
    ejection = Ejection(clock)
    for _ in range(4):
        ejection.failed(ejection.sent())
    ejection.answered(ejection.sent())
    for _ in range(4):
        ejection.failed(ejection.sent())
    ejection.ended(ejection.sent())
    assert ejection.standing is Standing.SERVING
    assert ejection.failed(ejection.sent())


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    ejection = broken(clock)
    clock.now += 1.0
    assert ejection.standing is Standing.HALF_OPEN
    term = ejection.sent()
    assert not ejection.may_send(clock.now + 1000)
    ejection.ended(term)  # it was cancelled: the trial is given back
    assert ejection.may_send(clock.now)
    ejection.answered(ejection.sent())
    assert not ejection.out
    assert ejection.ejected_for(clock.now) == 0.0
    assert ejection.may_send(clock.now)
    assert ejection.failures == 0


def test_each_bad_trial_ejects_for_twice_as_long_up_to_the_most() -> None:
    clock = Clock()
    ejection = broken(clock)
    times = []
    for _ in range(100):
        times.append(ejection.ejected_for(clock.now))
        clock.now = ejection.until
        assert ejection.failed(ejection.sent())
    assert times[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(times[6:]) == {30.0}


def test_what_was_sent_before_an_ejection_says_nothing_new() -> None:
    clock = Clock()
    ejection = Ejection(clock)
    old = [ejection.sent() for _ in range(20)]
    for term in old[:5]:
        ejection.failed(term)
    until = ejection.until
    ejection.failed(old[5])
    ejection.answered(old[6])
    assert (ejection.until, ejection.failures, ejection.out) == (until, 5, True)
    clock.now = until
    trial = ejection.sent()
    ejection.answered(old[7])
    ejection.ended(old[8])
    ejection.failed(old[9])
    assert ejection._trial
    ejection.answered(trial)
    assert [ejection.failed(term) for term in old[10:]] == [False] * 10
    assert (ejection.failures, ejection.out) == (0, False)


def test_one_that_breaks_again_soon_goes_on_where_it_stopped() -> None:
    clock = Clock()
    ejection = broken(clock)
    clock.now = ejection.until
    ejection.answered(ejection.sent())
    clock.now += 30.0
    for _ in range(5):
        ejection.failed(ejection.sent())
    assert ejection.ejected_for(clock.now) == 2.0
    clock.now = ejection.until
    ejection.answered(ejection.sent())
    clock.now += 30.001
    for _ in range(5):
        ejection.failed(ejection.sent())
    assert ejection.ejected_for(clock.now) == 1.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "fail", "fail", "answer", "end", "wait"]), st.integers(0, 99)
        ),
        max_size=150,
    )
)
def test_any_order_of_verdicts(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    ejection = Ejection(clock, threshold=2)
    out: list[tuple[int, bool]] = []
    for action, number in steps:
        if action == "send":
            if ejection.may_send(clock.now):
                assert ejection.standing is not Standing.EJECTED
                trial = ejection.out
                out.append((ejection.sent(), trial))
        elif action == "wait":
            clock.now += number / 10
        elif out:
            term, trial = out.pop(number % len(out))
            if action == "fail":
                if ejection.failed(term):
                    assert 1.0 <= ejection.until - clock.now <= 30.0 + 1e-9
            elif action == "answer":
                was_out = ejection.out
                ejection.answered(term)
                assert ejection.out == (was_out and not trial)  # only the trial brings it back
            else:
                ejection.ended(term)
        assert sum(trial for _, trial in out) == ejection._trial <= 1
        assert ejection._trial <= ejection.out
    for term, _ in out:
        ejection.ended(term)
    clock.now += 30.0
    assert ejection.may_send(clock.now)  # nothing is out for ever
