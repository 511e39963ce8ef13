"""A memory cgroup of a test's own, for a real kill by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.wait import until_sync


@contextmanager
def memory_cgroup_of(size: int) -> Iterator[Path]:
    """A cgroup of ``size`` bytes, where this machine lets us make one; the test is skipped, and says why,
    where it does not. Waits at its end until the cgroup is empty."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    made = root / f"failsoft-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / "cgroup.procs").read_text()  # a real one: in any other directory nothing would be limited
        (made / limit).write_text(str(size))
    except OSError as exc:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    yield made
    until_sync(lambda: not (made / "cgroup.procs").read_text(), what="the cgroup is empty")
    made.rmdir()
