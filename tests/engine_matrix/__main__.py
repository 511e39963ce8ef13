"""``make matrix``: print docs/engine-matrix.md. Status 1 when a cell is wrong.

``python -m tests.engine_matrix supervisor engine`` plays only the rounds of these victims."""

from __future__ import annotations

import sys
import time
import traceback

from tests.engine_matrix.expected import STATES
from tests.engine_matrix.page import page, wrong
from tests.engine_matrix.rounds import ROUNDS, Cell, play, unplayed
from tests.engine_matrix.stage import Stage


def main(victims: list[str]) -> int:
    """Play all rounds on a Ray of their own."""
    cells: list[Cell] = []
    with Stage() as stage:
        for victim, how in ROUNDS:
            if victims and victim not in victims:
                continue
            began = time.monotonic()
            try:
                played = play(stage, victim, how)
            except Exception as exc:  # noqa: BLE001 - the other rounds are worth their page all the same
                traceback.print_exc()
                stage.spoilt = True
                played = [unplayed(victim, how, state, exc) for state in STATES]
            cells += played
            print(f"{victim} {how.name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
            for text in wrong(played):
                print(f"wrong: {text}", file=sys.stderr)
    sys.stdout.write(page(cells))
    return 1 if wrong(cells) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
