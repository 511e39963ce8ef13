"""The files beside this one hold the types of the public API; the type checkers read them.

A wrong use stands there with the error that it must be: --strict holds that no ignore is unused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in HERE.glob("*_names.py"))


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--strict", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=390, check=False,
    )  # fmt: skip


@pytest.mark.timeout(400)
def test_mypy_agrees() -> None:
    done = mypy(*FILES)
    assert done.returncode == 0, done.stdout + done.stderr


def pyright(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--level", "error", "--outputjson", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=390, check=False,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.timeout(400)
def test_pyright_agrees() -> None:
    told = pyright(*FILES)
    assert told["generalDiagnostics"] == []
    assert told["summary"]["filesAnalyzed"] == len(FILES)


# Names that a checker cannot see are Any, with which everything agrees: here they are seen.
WRONG = (
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


@pytest.mark.timeout(400)
def test_pyright_would_disagree(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    told = pyright(str(wrong))
    found = {(one["range"]["start"]["line"] + 1, one["rule"]) for one in told["generalDiagnostics"]}
    assert found == {(7, "reportAssertTypeFailure"), (8, "reportCallIssue"), (9, "reportArgumentType")}


@pytest.mark.timeout(400)
def test_mypy_would_disagree(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    done = mypy(str(wrong))
    assert done.returncode == 1, done.stdout + done.stderr
    for line, error in ((7, "assert-type"), (8, "call-arg"), (9, "arg-type"), (10, "unused-ignore")):
        assert re.search(rf"wrong.py:{line}: error: .*\[{error}\]", done.stdout), done.stdout
    assert "Found 4 errors in 1 file" in done.stdout


def test_there_is_something_to_check() -> None:
    texts = [(ROOT / name).read_text() for name in FILES]
    assert len(FILES) == 4
    assert all("assert_type(" in text and "# type: ignore[" in text for text in texts)
