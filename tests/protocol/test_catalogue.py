"""Every code has a meaning, an advice and a runbook; a code is registered once, for ever."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from faults import Action, Outcome
from protocol import Code, Family, catalogue
from protocol import catalogue as the_catalogue
from protocol.builtin_codes import ENTRIES
from protocol.catalogue import Advice, Catalogue, Entry
from protocol.catalogue import Outcome as OutcomeWord
from protocol.issued_codes import ISSUED

ROOT = Path(__file__).parents[2]
SENTENCE = re.compile(r"[.?!](?=\s+[A-Z`]|\s+failsoft|\Z)")


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
    assert entry.runbook.endswith((".", "?"))
    assert 2 <= len(SENTENCE.findall(entry.runbook)) <= 3, "two or three sentences, please"
    assert 80 <= len(entry.runbook) <= 420
    assert entry.runbook.count("`") % 2 == 0
    assert entry.where.startswith(f"{ROOT / 'protocol' / 'builtin_codes.py'}:")
    assert entry.advice in get_args(Advice)
    assert entry.outcome in get_args(OutcomeWord)


def test_the_sentences_of_a_runbook_are_counted() -> None:
    for text, count in (("One", 0), ("One.", 1), ("Run `a.b` 2.5 times. Two?", 2), ("A. B. C. D.", 4)):
        assert len(SENTENCE.findall(text)) == count


def test_no_runbook_is_given_twice() -> None:
    runbooks = [entry.runbook for entry in ENTRIES]
    assert len(set(runbooks)) == len(runbooks)


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
    line = sys._getframe().f_lineno - 1
    with pytest.raises(ValueError, match="already registered: the first meaning") as refused:
        fresh.register("ONCE", family="TASK", meaning="another")
    assert f"({__file__}:{line})" in str(refused.value), "where the first one is"
    assert f"{__file__}:{line + 3} must take another name" in str(refused.value), "and the second"
    with pytest.raises(
        ValueError, match=r"already registered: user code raised .*builtin_codes\.py:[0-9]+\)"
    ):
        fresh.register("FAILED", family="TASK", meaning="another")
    assert fresh.entry("TASK.ONCE").meaning == "the first meaning"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reason": "lower"}, r"'TASK\.lower' is not a code: .*A-Z"),
        ({"reason": "X" * 41}, "must be 1 to 40 characters"),
        ({"reason": "TRAILING_"}, "not end with _"),
        ({"reason": ""}, "is not a code"),
        ({"family": "NOPE"}, "there is no family 'NOPE'; the families are TASK, ACTOR"),
        ({"meaning": "  "}, r"TASK\.OK needs a meaning of one line \(.*test_catalogue\.py:[0-9]+\)"),
        ({"meaning": "two\nlines"}, "needs a meaning of one line"),
        ({"advice": "retry"}, r"there is no advice 'retry' \(.*\.py:[0-9]+\); .*one of retry_same, "),
        ({"advice": "retry_elsewere"}, "did you mean 'retry_elsewhere'"),
        ({"outcome": "maybe"}, "there is no outcome 'maybe'.*; it is one of not_run, unknown, ran"),
        ({"outcome": "notrun"}, "did you mean 'not_run'"),
    ],
)
def test_a_wrong_registration_is_refused_and_leaves_nothing(
    fresh: Catalogue, wrong: dict[str, str], said: str
) -> None:
    before = len(fresh)
    with pytest.raises(ValueError, match=said) as refused:
        fresh.register(**{"reason": "OK", "family": "TASK", "meaning": "m", **wrong})  # type: ignore[arg-type]
    assert "\n" not in str(refused.value).replace("two\nlines", "")
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


# -- what was issued stays


def test_every_row_stands_in_the_list_of_issued_codes() -> None:
    missing = sorted({str(entry.code) for entry in ENTRIES} - set(ISSUED))
    assert not missing, f"add {missing} to ISSUED in protocol/issued_codes.py, in order"
    assert list(ISSUED) == sorted(set(ISSUED)), "in order, each once"


def test_a_code_that_was_issued_and_is_gone_is_refused(fresh: Catalogue) -> None:
    fresh.register("SANDBOX_GONE", family="UPSTREAM", meaning="m")
    fresh.require([*ISSUED, "UPSTREAM.SANDBOX_GONE"])
    with pytest.raises(ValueError, match=r"UPSTREAM\.SANDBOX_DOWN was issued and is gone") as refused:
        fresh.require([*ISSUED, "UPSTREAM.SANDBOX_DOWN"])
    assert "nearest that is there: UPSTREAM.SANDBOX_GONE" in str(refused.value)
    assert "never renamed" in str(refused.value)
    assert "put its row back and let the new name stand beside it" in str(refused.value)


def test_codes_of_ones_own_are_required_from_a_file(fresh: Catalogue, tmp_path: Path) -> None:
    fresh.register("SANDBOX_DOWN", family="UPSTREAM", meaning="m")
    issued = tmp_path / "codes.txt"
    issued.write_text("# ours\n\nUPSTREAM.SANDBOX_DOWN  # since 2026\r\nTASK.FAILED")
    fresh.require(issued)
    issued.write_text("# ours\nUPSTREAM.SANDBOX_LOST\n")
    with pytest.raises(ValueError, match=r"codes\.txt:2: UPSTREAM\.SANDBOX_LOST was issued"):
        fresh.require(issued)
    issued.write_text("TASK.FAILED\nnonsense\n")
    with pytest.raises(ValueError, match=r"codes\.txt:2: 'nonsense' is not a code"):
        fresh.require(issued)
    issued.write_bytes(b"\xff\xfeT\0")
    with pytest.raises(ValueError, match=r"codes\.txt: a list of codes is text in UTF-8"):
        fresh.require(issued)
    with pytest.raises(FileNotFoundError, match=r"no-such\.txt"):
        fresh.require(tmp_path / "no-such.txt")
    with pytest.raises(ValueError, match="is not a code"):
        fresh.require(["nonsense"])


def imported(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import protocol; print(protocol.__file__)"],
        cwd=folder, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"UPSTREAM.ABORTED"', '"UPSTREAM.ABORTED_UNASKED"'), "UPSTREAM.ABORTED was issued and is gone"),
        (('"NODE.IO"', '"NODE.DIED"'), "NODE.DIED is already registered: a node, or its raylet, is gone ("),
        (('"NODE.IO"', '"GPU.IO"'), "there is no family 'GPU'"),
        (('"NODE.IO"', '"NODE.io"'), "'NODE.io' is not a code"),
        (('"NODE.IO", "give_up"', '"NODE.IO", "giveup"'), "NODE.IO: there is no advice 'giveup'"),
        (("the operating system refused to read or write a file", " "), "NODE.IO needs a meaning"),
    ],
    ids=["renamed", "twice", "family", "malformed", "advice", "meaning"],
)
def test_a_wrong_table_cannot_be_imported(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    shutil.copytree(ROOT / "protocol", tmp_path / "protocol", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "protocol" / "builtin_codes.py"
    done = imported(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(tmp_path)), "the copy is on trial, not what is installed"
    text = table.read_text()
    assert text.count(change[0]) == 1
    table.write_text(text.replace(*change))
    done = imported(tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: ")
    assert said in last


# -- the nearest name


def test_the_nearest_names_are_offered(fresh: Catalogue) -> None:
    assert fresh.nearest("UPSTREAM.ABORTD")[0] == "UPSTREAM.ABORTED"
    assert fresh.nearest("refit_aborted") == ["WEIGHTS.REFIT_ABORTED"], "a reason alone"
    assert set(fresh.nearest("conect")) == {"TIMEOUT.CONNECT", "TRANSPORT.CONNECT"}
    assert fresh.nearest("zebra") == fresh.nearest("") == []
    assert len(fresh.nearest("TIMEOUT.WRITE", 1)) == 1
    assert fresh.nearest("A" * 10**7) == []
