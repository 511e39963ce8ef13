"""What every room's tests share: one local Ray for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from hypothesis import settings

# The machine is shared: an example may wait for the CPU as long as it likes. And the examples are the same
# each time, as in tests/properties: a red run is the change's doing and not the dice's.
settings.register_profile("shared machine", deadline=None, derandomize=True)
settings.load_profile("shared machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first test that needs Ray starts it, and most start workers: seconds, many on a busy machine."""
    if config.getoption("timeout") is not None:  # the command line says how long, as for the soaks
        return
    for item in items:
        if "ray_local" in getattr(item, "fixturenames", ()) and not any(item.iter_markers("timeout")):
            item.add_marker(pytest.mark.timeout(150))


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A local Ray for the tests of a session; the driver is this process."""
    ray.init(
        address="local",  # never a cluster that happens to run here
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=200 * 1024 * 1024,
    )
    yield
    ray.shutdown()
