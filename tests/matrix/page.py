"""Filling the matrix and writing it down."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from protocol import Reading, Trust, read
from protocol.carriers.log_line import read_line
from tests.matrix.boundaries import Boundary
from tests.matrix.shapes import SHAPES

CROSSING = 60.0
"""Seconds that one crossing may take."""

_HEAD = """# The matrix

Every exception shape (rows) through every boundary (sections), crossed for real: the code that is read
back on the near side, and how far it may be believed. The raising side is decorated with `@coded`. Made by
`make matrix`; a cell that reads anything but what was raised fails the tests.

*structured*: an object or a document arrived. *signed*: text, with a token that only a holder of the run's
key can mint. *checksummed*: text, with a token that anybody could have written. *heuristic*: a guess.
"""


class Cell(NamedTuple):
    """What was read, and what had to be."""

    boundary: str
    shape: str
    read: Reading
    code: str
    trust: Trust

    @property
    def right(self) -> bool:
        """Whether the name was kept, and believed neither more nor less than it may be."""
        return self.read.code == self.code and self.read.trust is self.trust


async def fill(boundaries: dict[str, Boundary]) -> list[Cell]:
    """Cross every boundary with every shape."""
    return [await cross(name, boundary, shape) for name, boundary in boundaries.items() for shape in SHAPES]


async def cross(name: str, boundary: Boundary, shape: str) -> Cell:
    """One cell."""
    async with asyncio.timeout(CROSSING):
        thing = await boundary.cross(shape)
    found = read_line(thing) if isinstance(thing, str) else read(thing)
    trust = min(boundary.trust, SHAPES[shape].trust)
    return Cell(name, shape, found, SHAPES[shape].code, trust)


def wrong(cells: list[Cell]) -> list[str]:
    """The cells that are wrong, in words."""
    return [
        f"{cell.shape} through {cell.boundary}: {cell.read.code} ({cell.read.trust.name.lower()}), "
        f"must be {cell.code} ({cell.trust.name.lower()})"
        for cell in cells
        if not cell.right
    ]


def page(cells: list[Cell]) -> str:
    """The page docs/matrix.md."""
    boundaries = list(dict.fromkeys(cell.boundary for cell in cells))
    out = [
        _HEAD,
        f"\n{len(boundaries)} boundaries × {len(SHAPES)} shapes, {len(wrong(cells))} cells wrong.\n",
    ]
    for first in range(0, len(boundaries), 4):
        some = boundaries[first : first + 4]
        out.append(f"\n| | {' | '.join(some)} |\n|---|{'---|' * len(some)}\n")
        for shape in SHAPES:
            row = [cell for name in some for cell in cells if (cell.boundary, cell.shape) == (name, shape)]
            out.append(f"| {shape} | {' | '.join(_text(cell) for cell in row)} |\n")
    return "".join(out)


def _text(cell: Cell) -> str:
    return f"`{cell.read.code}` {cell.read.trust.name.lower()}"
