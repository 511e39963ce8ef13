"""Standard output that cannot be written: one line, whatever the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.witness import ROOT

SAMPLE = ROOT / "tests" / "faults" / "samples" / "killed.txt"
COMMANDS = {
    "codes": ["codes"],
    "one code": ["codes", "TASK.FAILED"],
    "codes as JSON": ["codes", "--json"],
    "explain": ["explain", str(SAMPLE)],
    "explain as JSON": ["explain", "--json", str(SAMPLE)],
    "help": ["--help"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "failsoft", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
        )
    assert done.returncode == 1
    assert done.stderr == "failsoft: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_has_seen_enough(arguments: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "failsoft", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(50) == 1
