"""Properties: what holds for every input, tried with thousands of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Thousands of examples on a busy machine take longer than one ordinary test may."""
    for item in items:
        if HERE in item.path.parents and not any(item.iter_markers("timeout")):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True, scope="session")
def quiet_ray() -> Iterator[None]:
    """Ray warns of each failure of a failure, which it cannot make a subclass of; there are thousands."""
    log = logging.getLogger("ray.exceptions")
    level = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)
