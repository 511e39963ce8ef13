"""The limit on file descriptors: raised where that is allowed, named where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dispatch.posting.transports.descriptors import MARGIN
from tests.support.witness import ROOT

SCRIPT = """
import json, os, resource, sys
soft, hard, connections, held = map(int, sys.argv[1:])
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(held)]
import dispatch.posting.transports.descriptors as descriptors
from protocol import CodedError
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
before = descriptors._open_now()
said = {"before": before}
try:
    said["returned"] = descriptors.check_descriptors(connections, "the pool")
    more = [os.open(os.devnull, os.O_RDONLY) for _ in range(connections)]
except CodedError as error:
    said |= {"code": error.code, "detail": error.detail, "data": error.data}
said["limits"] = resource.getrlimit(resource.RLIMIT_NOFILE)
print(json.dumps(said))
"""


def under(soft: int, hard: int, connections: int, held: int = 0) -> dict[str, Any]:
    """What the check says in a process with these limits that holds ``held`` files open."""
    command = [sys.executable, "-c", SCRIPT, *map(str, (soft, hard, connections, held))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_enough_is_left_as_it_is() -> None:
    said = under(900, 900, 500)
    assert said["returned"] == 900
    assert said["limits"] == [900, 900]


def test_a_low_soft_limit_is_raised_as_far_as_needed_and_then_holds_that_many() -> None:
    said = under(300, 1024, 600)
    assert said["returned"] == 600 + said["before"] + MARGIN
    assert said["limits"] == [said["returned"], 1024]
    assert "code" not in said


def test_what_is_open_already_counts() -> None:
    assert under(300, 1024, 150)["limits"] == [300, 1024]
    said = under(300, 1024, 150, held=150)
    assert said["before"] >= 150
    assert said["limits"] == [150 + said["before"] + MARGIN, 1024]


def test_the_last_descriptor_that_fits() -> None:
    spare = 512 - under(512, 512, 1)["before"] - MARGIN
    assert under(512, 512, spare)["returned"] == 512
    assert under(512, 512, spare + 1)["code"] == "CONFIG.INVALID"


@pytest.mark.parametrize(("soft", "hard"), [(256, 256), (256, 512)])
def test_a_low_hard_limit_is_one_clear_failure(soft: int, hard: int) -> None:
    said = under(soft, hard, 1000)
    needed = 1000 + said["before"] + MARGIN
    assert said["code"] == "CONFIG.INVALID"
    assert said["detail"].startswith(f"the pool needs {needed} file descriptors (1000 connections, ")
    assert f"`ulimit -n {needed}`" in said["detail"]
    assert f"this process may have {hard}" in said["detail"]
    assert said["data"] == {"needed": needed, "soft": soft, "hard": hard, "connections": 1000}
    assert said["limits"] == [soft, hard]  # a refusal changes nothing
