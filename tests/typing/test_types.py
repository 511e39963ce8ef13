"""The files beside this one hold the types of the public API; the type checkers read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in HERE.glob("*_names.py"))


@pytest.mark.timeout(180)
def test_mypy_agrees() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", *FILES],
        cwd=ROOT, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_something_to_check() -> None:
    assert len(FILES) == 3
