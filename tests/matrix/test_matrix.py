"""Every cell of the matrix is right, and the page shows what was read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import Trust
from tests.matrix.boundaries import crossings
from tests.matrix.page import Cell, fill, page, wrong
from tests.matrix.shapes import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"


@pytest.fixture(scope="module")
def cells(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cell]]:
    log = logging.getLogger("failsoft")
    level = log.level
    log.setLevel(logging.CRITICAL)  # the servers log each failure
    with crossings(tmp_path_factory.mktemp("matrix")) as boundaries:
        yield asyncio.run(fill(boundaries))
    log.setLevel(level)


@pytest.mark.timeout(300)
def test_no_cell_is_wrong(cells: list[Cell]) -> None:
    assert wrong(cells) == []


@pytest.mark.timeout(300)
def test_it_is_as_large_as_it_says(cells: list[Cell]) -> None:
    boundaries = {cell.boundary for cell in cells}
    assert len(boundaries) >= 12
    assert len(SHAPES) >= 15
    assert len(cells) == len(boundaries) * len(SHAPES)
    assert {cell.read.trust for cell in cells} == set(Trust) - {Trust.NONE}


@pytest.mark.timeout(300)
def test_the_page_is_what_was_read(cells: list[Cell]) -> None:
    assert PAGE.read_text() == page(cells), "run `make matrix` and look at what changed"


def test_a_wrong_cell_would_be_seen(cells: list[Cell]) -> None:
    one = cells[0]
    assert wrong([one._replace(code="TASK.OTHER")]) != []
    assert wrong([one._replace(trust=Trust.NONE)]) != []
