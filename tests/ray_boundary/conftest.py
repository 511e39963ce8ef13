"""The far sides, started once for the folder: an actor costs about a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray_boundary.far_side import FarSide


@pytest.fixture(scope="session")
def far_sides(ray_local: None) -> Iterator[dict[str, FarSide]]:
    made = {kind: FarSide(kind) for kind in ("plain", "coded")}
    yield made
    for side in made.values():
        side.close()
