"""Every cell of the kill matrix is right, and a wrong one would be seen."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.engine_matrix.expected import STATES, Victim
from tests.engine_matrix.page import page, wrong
from tests.engine_matrix.rounds import ROUNDS, Cell, play
from tests.engine_matrix.stage import Stage


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as one:
        yield one


# What a round waits for at most adds up to less: a detection, what is left after it, and the next start.
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("victim", "how"), ROUNDS, ids=[f"{who}-{how.name}" for who, how in ROUNDS])
def test_round(stage: Stage, victim: Victim, how: signal.Signals) -> None:
    cells = play(stage, victim, how)
    assert [cell.state for cell in cells] == list(STATES)
    assert wrong(cells) == []


def test_a_wrong_cell_is_told() -> None:
    good = Cell("engine", signal.SIGKILL, "idle", "replaced", 0.1, 0.2, 1.5, ())
    bad = good._replace(state="updating", gone=None, wrong=("left after 5 s: port 1",))
    assert wrong([good, bad]) == ["engine KILL, updating: left after 5 s: port 1"]
    assert "2 cells, 1 wrong" in page([good, bad])
    assert "| replaced 0.1 / 0.2 / 1.5 | **wrong** 0.1 / – / 1.5 |" in page([good, bad])
