"""The files beside this one hold the types of the public API; the type checkers read them.

A wrong use stands there with the error that it must be: --strict holds that no ignore is unused.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in HERE.glob("*_names.py"))


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--strict", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip


@pytest.mark.timeout(180)
def test_mypy_agrees() -> None:
    done = mypy(*FILES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_mypy_would_disagree(tmp_path: Path) -> None:
    """Names that the checker cannot see are Any, with which everything agrees: here they are seen."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from typing import assert_type\n"
        "from dispatch import PosterPool\n"
        "from protocol import coded\n"
        "@coded\n"
        "def named(n: int) -> float:\n"
        "    return n\n"
        "assert_type(named(1), int)\n"
        "named()\n"
        "PosterPool(concurrency='1')\n"
        "named(1)  # type: ignore[call-arg]\n"
    )
    done = mypy(str(wrong))
    assert done.returncode == 1, done.stdout + done.stderr
    for line, error in ((7, "assert-type"), (8, "call-arg"), (9, "arg-type"), (10, "unused-ignore")):
        assert re.search(rf"wrong.py:{line}: error: .*\[{error}\]", done.stdout), done.stdout
    assert "Found 4 errors in 1 file" in done.stdout


def test_there_is_something_to_check() -> None:
    texts = [(ROOT / name).read_text() for name in FILES]
    assert len(FILES) == 4
    assert all("assert_type(" in text and "# type: ignore[" in text for text in texts)
