"""Writing the matrix down."""

from __future__ import annotations

from tests.engine_matrix.expected import GONE, SERVES, STATES
from tests.engine_matrix.rounds import Cell

_HEAD = f"""# The kill matrix of engines

Who is killed, by which signal (rows), while the engine is in which state (columns): real processes on a real
Ray, in rounds of five engines. Made by `make matrix`; a wrong cell fails the tests.

Each engine has a child, a grandchild in a session of its own that ignores TERM, a shared memory segment, a
temporary file, a Unix socket and a second port. The judge asks nobody but the kernel what is left of them:
everything of an engine that has to be gone is gone within {GONE:g} s from when that was known, and where an
engine has to serve again it answers a request at most {SERVES:g} s later.

*replaced*: noticed, cleared away, and another one serves. *kept*: it goes on and nobody replaces it, and an
orderly restart leaves nothing. *down*: it was being drained, and stays down. *ended*: the driver is gone, and
so is everything. Times are seconds from the signal, of one run: noticed / nothing left / serving.
"""


def wrong(cells: list[Cell]) -> list[str]:
    """The cells that are wrong, in words."""
    return [f"{_place(cell)}: {text}" for cell in cells for text in cell.wrong]


def page(cells: list[Cell]) -> str:
    """The page docs/engine-matrix.md."""
    bad = [cell for cell in cells if cell.wrong]
    out = [_HEAD, f"\n{len(cells)} cells, {len(bad)} wrong.\n"]
    out.append(f"\n| | {' | '.join(STATES)} |\n|---|{'---|' * len(STATES)}\n")
    for victim, how in dict.fromkeys((cell.victim, cell.how) for cell in cells):
        row = [cell for cell in cells if (cell.victim, cell.how) == (victim, how)]
        out.append(f"| {victim} {how.name[3:]} | {' | '.join(_text(cell) for cell in row)} |\n")
    if bad:
        out.append("\n" + "".join(f"- {text}\n" for text in wrong(cells)))
    return "".join(out)


def _place(cell: Cell) -> str:
    return f"{cell.victim} {cell.how.name[3:]}, {cell.state}"


def _text(cell: Cell) -> str:
    times = " / ".join(
        "–" if one is None else f"{one:.1f}" for one in (cell.detected, cell.gone, cell.serving)
    )
    return f"{'**wrong**' if cell.wrong else cell.outcome} {times}"
