"""Every code has a meaning, an advice and a runbook; a code is registered once, for ever."""

from __future__ import annotations

from typing import get_args

import pytest

from faults import Action, Outcome
from protocol import Code, Family, catalogue
from protocol import catalogue as the_catalogue
from protocol.builtin_codes import ENTRIES
from protocol.catalogue import Advice, Catalogue, Entry
from protocol.catalogue import Outcome as OutcomeWord


@pytest.fixture
def fresh() -> Catalogue:
    return Catalogue(ENTRIES)


def test_advice_and_outcome_use_the_words_of_faults() -> None:
    assert set(get_args(Advice)) == {str(action) for action in Action}
    assert set(get_args(OutcomeWord)) == {str(outcome) for outcome in Outcome}


@pytest.mark.parametrize("entry", list(ENTRIES), ids=lambda e: str(e.code))
def test_every_entry_says_what_it_means_and_what_to_do(entry: Entry) -> None:
    assert type(entry.code) is Code
    assert entry.meaning.strip() == entry.meaning
    assert "\n" not in entry.meaning
    assert 10 <= len(entry.meaning) <= 120
    assert not entry.meaning.endswith(".")
    assert len(entry.runbook.split()) >= 3, "a sentence, please"
    assert entry.runbook.endswith((".", "?"))
    assert entry.advice in get_args(Advice)
    assert entry.outcome in get_args(OutcomeWord)


def test_no_meaning_is_given_twice() -> None:
    meanings = [entry.meaning for entry in ENTRIES]
    assert len(set(meanings)) == len(meanings)


def test_what_describes_the_request_or_is_unknown_is_never_advised_to_be_sent_again() -> None:
    for entry in ENTRIES:
        if entry.code.family in (Family.REQUEST, Family.UNKNOWN, Family.CONFIG):
            assert entry.advice == "give_up", entry.code


def test_the_catalogue_is_in_the_order_of_the_families() -> None:
    codes = [entry.code for entry in the_catalogue]
    families = list(Family)
    assert codes == sorted(codes, key=lambda c: (families.index(c.family), c))
    assert len(codes) == len(the_catalogue) == len(set(codes))


def test_register_adds_a_code_with_the_advice_of_its_family(fresh: Catalogue) -> None:
    code = fresh.register("REWARD_SANDBOX_DOWN", family="UPSTREAM", meaning="the reward sandbox is down")
    assert code == "UPSTREAM.REWARD_SANDBOX_DOWN"
    assert code in fresh
    entry = fresh.entry(code)
    assert entry.advice == "retry_elsewhere"
    assert entry.outcome == "unknown"
    assert entry.runbook == "the reward sandbox is down"
    assert code not in catalogue


def test_register_keeps_what_it_is_given(fresh: Catalogue) -> None:
    code = fresh.register(
        "SANDBOX_FULL",
        family="BACKPRESSURE",
        meaning="m",
        advice="give_up",
        outcome="not_run",
        runbook="Do it.",
    )
    assert fresh.entry(code) == Entry(code, "m", "give_up", "not_run", "Do it.")


def test_a_code_is_registered_once(fresh: Catalogue) -> None:
    fresh.register("ONCE", family="TASK", meaning="the first meaning")
    with pytest.raises(ValueError, match="already registered: the first meaning"):
        fresh.register("ONCE", family="TASK", meaning="another")
    with pytest.raises(ValueError, match="already registered"):
        fresh.register("FAILED", family="TASK", meaning="another")
    assert fresh.entry("TASK.ONCE").meaning == "the first meaning"


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "lower", "family": "TASK", "meaning": "m"},
        {"reason": "OK", "family": "NOPE", "meaning": "m"},
        {"reason": "OK", "family": "TASK", "meaning": "  "},
        {"reason": "OK", "family": "TASK", "meaning": "m", "advice": "retry"},
        {"reason": "OK", "family": "TASK", "meaning": "m", "outcome": "maybe"},
    ],
)
def test_a_wrong_registration_is_refused_and_leaves_nothing(fresh: Catalogue, wrong: dict[str, str]) -> None:
    before = len(fresh)
    with pytest.raises(ValueError, match=r"code|advice"):
        fresh.register(wrong.pop("reason"), **wrong)  # type: ignore[arg-type]
    assert len(fresh) == before


@pytest.mark.parametrize("family", list(Family))
def test_an_unknown_code_falls_to_its_family(fresh: Catalogue, family: Family) -> None:
    entry = fresh.entry(f"{family}.NEVER_SEEN_BEFORE")
    assert entry.code == f"{family}.NEVER_SEEN_BEFORE"
    assert entry.code not in fresh
    assert family in entry.meaning
    assert entry.outcome == "unknown"
    assert entry.advice in get_args(Advice)


def test_an_unknown_family_is_no_code(fresh: Catalogue) -> None:
    with pytest.raises(ValueError, match="no family"):
        fresh.entry("GPU.ECC")
    assert "GPU.ECC" not in fresh
