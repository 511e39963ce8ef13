"""A Ray that can be reached: is it ours in version, and does anything of a run that is over still hold
resources there?

failsoft makes no detached actor and no detached placement group: what it has in Ray ends with its driver.
Those of others outlive their job on purpose; whether that purpose is still there only their owner knows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import msgspec

from failsoft.doctor.finding import Examined, Finding
from failsoft.doctor.ray_side import NAMESPACE, Kept, Seen
from failsoft.raying import refused

NAME: Final = "ray"
DEADLINE: Final = 40.0
"""Seconds for the look: Ray's import and connecting take about three on an idle machine."""
OURS: Final = ("EngineSupervisor", "Eye", "KeyKeeper", "Poster")
"""The classes of our actors."""


def check(examined: Examined) -> list[Finding]:
    """What is left in Ray, in the cluster named or the one that ray.init(address="auto") finds."""
    ours = examined.file.fleet.ray if examined.file is not None else ""
    address = examined.ray or ours or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        return [_unchecked(f"not checked: {address} is a Ray Client address; name the GCS, HOST:6379")]
    if (why := refused(address)) is not None:
        return [_unchecked(f"no Ray at {address}: not checked ({why})")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "failsoft.doctor.ray_side", address],
            capture_output=True,
            timeout=DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"not checked: the Ray at {address} does not answer within {DEADLINE:g} s"
        fix = "`ray status`, and gcs_server.out under /tmp/ray/session_latest/logs on its head node"
        return [Finding(check=NAME, severity="warning", what=what, where=address, fix=fix)]
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        end = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        what = f"not checked: looking ended with status {done.returncode}: {end[0]:.300}"
        return [
            Finding(check=NAME, severity="warning", what=what, where=address, fix="try again; then report it")
        ]
    seen = msgspec.json.decode(lines[-1], type=Seen)
    if seen.mismatch:
        fix = "run the same Ray and Python on every node and in every driver"
        return [Finding(check=NAME, severity="error", what=seen.mismatch, where=address, fix=fix)]
    if seen.unreachable:
        return [_unchecked(f"no Ray to look at: not checked ({seen.unreachable:.300})")]
    return [finding for one in seen.kept if (finding := _kept(one)) is not None]


def _kept(one: Kept) -> Finding | None:
    ours = one.kind == "actor" and (one.namespace == NAMESPACE or one.label in OURS)
    if not ours and not one.owner_dead:
        return None
    whose = "failsoft's, which never makes one" if ours else "of a job that has ended"
    what = f"a detached {one.kind} {one.name!r} ({one.label}), {one.state.lower()}, {whose}"
    if one.kind == "actor":
        where = f"{one.id}, pid {one.pid} on {one.node}, job {one.job}"
        by = f"ray.get_actor({one.name!r}, namespace={one.namespace!r})" if one.name else "its handle"
        fix = f"if nobody needs it: ray.kill({by})"
    else:
        where = f"{one.id}, job {one.job}"
        # By its id: a group's name is looked up in the asker's own namespace only.
        fix = (
            "if nobody needs it: from ray.util.placement_group import PlacementGroup, "
            "remove_placement_group as remove; "
            f"remove(PlacementGroup(ray.PlacementGroupID.from_hex({one.id!r})))"
        )
    # Another's actor may be meant to be there; a group of a dead job keeps what the next start needs.
    severe = ours or one.kind != "actor"
    return Finding(check=NAME, severity="warning" if severe else "note", what=what, where=where, fix=fix)


def _unchecked(what: str) -> Finding:
    return Finding(
        check=NAME,
        severity="note",
        what=what,
        fix="--ray-address HOST:PORT names one; `ray start` starts one",
    )
