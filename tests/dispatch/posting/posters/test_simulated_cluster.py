"""A pool over several nodes: each node has its posters, and the capacity is split over them exactly.

The nodes are raylets of one machine; the cluster is that of a driver of its own (`cluster_drive`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any, Final

import psutil
import pytest

from dispatch.posting.posters.placement import split
from tests.support.witness import ROOT, Witness

Size = tuple[int, int, int, int]
SMALL: Final[Size] = (3, 2, 20, 300)
"""Nodes, posters on each, concurrency, POSTs."""
LARGE: Final[Size] = (8, 8, 1000, 5000)
LARGE_NEEDS: Final = 8 << 30
"""Bytes of memory that must be free: 64 posters take 4 GiB, 8 nodes 2, and others are to live too."""


def drive(witness: Witness, size: Size, delay: float, timeout: float) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.dispatch.posting.posters.cluster_drive", "split"),
            *(str(number) for number in size),
            witness.url("ok", f"delay={delay}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(told: dict[str, Any], witness: Witness, size: Size) -> None:
    nodes, each, concurrency, count = size
    assert len(told["alive"]) == nodes
    assert Counter(told["nodes"]) == dict.fromkeys(told["alive"], each)
    assert set(told["states"]) == {"serving"}
    assert len(set(told["pids"])) == nodes * each
    assert sum(told["shares"]) == concurrency
    assert sorted(told["shares"], reverse=True) == split(concurrency, nodes * each)
    assert told["codes"] == []
    assert told["good"] == count
    assert told["recreated"] == 0
    seen = witness.counts()
    assert set(seen["arrived"].values()) == {1}
    assert len(seen["arrived"]) == count
    assert told["peak"] == concurrency
    # A request counts at the server for less time than at the pool, so this peak may be below the pool's.
    assert concurrency // 2 < seen["peak"] <= concurrency


@pytest.mark.timeout(300)
def test_a_small_cluster(witness: Witness) -> None:
    check(drive(witness, SMALL, 0.2, 280), witness, SMALL)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_large_cluster(witness: Witness) -> None:
    if psutil.virtual_memory().available < LARGE_NEEDS:
        pytest.skip(f"64 posters need {LARGE_NEEDS >> 30} GiB of free memory")
    told = drive(witness, LARGE, 5.0, 840)
    check(told, witness, LARGE)
    posters = LARGE[0] * LARGE[1]
    own, whole = (told[name] / posters / (1 << 20) for name in ("posters_uss_bytes", "machine_bytes"))
    print(
        f"{posters} posters on {LARGE[0]} nodes: cluster up in {told['cluster_s']:.1f} s;"
        f" posters in {told['start_s']:.1f} s, {told['start_s'] / posters:.2f} s each;"
        f" {own:.0f} MiB of its own a poster, {whole:.0f} MiB of the machine's;"
        f" {LARGE[3]} POSTs in {told['post_s']:.1f} s; closed in {told['close_s']:.1f} s"
    )
