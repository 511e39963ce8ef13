"""A training group over two nodes: a rank stopped on the other one, and the other one gone.

The nodes are raylets of one machine; the cluster is that of a driver of its own (`nodes_drive`)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.witness import ROOT


@pytest.mark.timeout(300)
def test_a_rank_on_another_node() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.dispatch.roles.nodes_drive"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = [line for line in done.stdout.splitlines() if line.startswith('{"nodes"')]  # Ray prints, too
    assert json.loads(told) == {
        "nodes": 2,
        "stopped": "ACTOR.WEDGED",
        "stopped_is_alive": False,
        "steps": [1, 1],
        "node_gone": ["ACTOR.GROUP_FAILED", True],
        "why": "ACTOR.DIED",
        "epoch": 3,
        "nodes_after": 1,
        "gone_is_alive": False,
        "steps_after": [1, 1],
        "placement_groups": 0,
    }
