"""What takes a driver of its own: the driver killed (L7), and a cluster that loses a node.

Each driver is a process of its own with a Ray of its own; the session's Ray, when one runs, only idles."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.chaos.drive import CONCURRENCY
from tests.chaos.tally import Tally
from tests.support.events import EventFile
from tests.support.wait import until_sync
from tests.support.witness import ROOT, Witness

pytestmark = pytest.mark.timeout(300)


def driver(nodes: int, witness: Witness, events: EventFile) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.chaos.drive", str(nodes), witness.url("ok", "delay=0.02")]
    return subprocess.Popen(
        [*command, str(events.path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_l7_the_posters_of_a_killed_driver_are_gone(
    witness: Witness, events: EventFile, tally: Tally
) -> None:
    with driver(1, witness, events) as process:
        assert process.stdout is not None
        try:
            posters = json.loads(next(line for line in process.stdout if line.startswith("[[")))
            until_sync(lambda: len(witness.counts()["arrived"]) > 20)
        finally:
            process.kill()
    assert len(posters) == 2
    for pid, created in posters:
        until_sync(lambda pid=pid, created=created: tally.gone(pid, created), 30, f"poster {pid} gone")
    until_sync(lambda: witness.counts()["connections"] == 0, 30)


def test_a_node_is_removed(witness: Witness, events: EventFile, tally: Tally) -> None:
    with driver(3, witness, events) as process:
        try:
            out, _ = process.communicate(timeout=280)
        finally:
            process.kill()
    said = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert said["codes"] == []
    assert said["submitted"] == said["succeeded"] == said["good"] == said["balanced"] >= 400
    assert said["victims"]
    # Replaced elsewhere, or gone with their node: whichever Ray tells of first.
    assert events.named("poster.died", "pool.node_left")
    assert all(tally.gone(pid, created) for pid, created in said["victims"])
    counts, retries = witness.counts(), events.retries()
    assert len(counts["arrived"]) == said["submitted"]
    assert {id: n for id, n in counts["arrived"].items() if n - 1 > retries.get(id, 0)} == {}
    assert said["peak"] <= CONCURRENCY
    assert counts["peak"] <= CONCURRENCY
