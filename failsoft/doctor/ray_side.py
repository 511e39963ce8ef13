"""The part of the doctor that talks to Ray: a program of its own, ``python -m failsoft.doctor.ray_side
ADDRESS``, which prints what it found as one JSON line.

A process, since a driver cannot give up on a cluster that does not answer, and one whose cluster dies is
ended by Ray itself. It reads Ray's own tables (the GCS): the state API asks the dashboard, which a
local Ray and many a cluster do not have.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

NAMESPACE = "failsoft"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A detached actor or a placement group. ``owner_dead``: the job that made it has ended. For an
    actor ``label`` is its class, for a group what it holds."""

    kind: str
    id: str
    name: str
    namespace: str = ""
    label: str = ""
    state: str = ""
    job: str = ""
    owner_dead: bool = False
    pid: int = 0
    node: str = ""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen, or why nothing was: ``mismatch`` and ``unreachable`` are texts."""

    address: str = ""
    mismatch: str = ""
    unreachable: str = ""
    kept: tuple[Kept, ...] = ()


def look(address: str) -> Seen:
    """Connect to the cluster at ``address`` and look."""
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as exc:
        text = " ".join(str(exc).split())
        # The one of Ray's RuntimeErrors that says it connected and must not go on (check_version_info).
        return Seen(mismatch=text) if "ersion mismatch" in text else Seen(unreachable=text)
    try:
        return Seen(address=ray.get_runtime_context().gcs_address, kept=(*_actors(), *_groups()))
    finally:
        ray.shutdown()


def _actors() -> list[Kept]:
    import ray
    from ray._private.state import state  # no public table has it without a dashboard

    jobs = _dead_jobs()
    named: Any = ray.util.list_named_actors(all_namespaces=True)  # dicts, whatever its type says
    spaces: dict[str, list[str]] = {}  # an actor's own is in no table; mostly its name says which
    for one in named:
        spaces.setdefault(one["name"], []).append(one["namespace"])
    table: dict[str, dict[str, Any]] = state.actor_table(None)
    return [
        Kept(
            kind="actor",
            id=actor["ActorID"],
            name=actor["Name"],
            namespace=" or ".join(sorted(spaces.get(actor["Name"], ()))),
            label=actor["ActorClassName"],
            state=actor["State"],
            job=actor["JobID"],
            owner_dead=actor["JobID"] in jobs,
            pid=actor["Pid"],
            node=actor["Address"]["IPAddress"],
        )
        for actor in table.values()
        if actor["IsDetached"] and actor["State"] != "DEAD"
    ]


def _groups() -> list[Kept]:
    from ray.util.placement_group import placement_group_table

    jobs = _dead_jobs()
    table: dict[str, dict[str, Any]] = placement_group_table()
    return [
        Kept(
            kind="placement group",
            id=id,
            name=group["name"],
            label=_sum(group["bundles"].values()),
            state=group["state"],
            job=id[-8:],  # an id ends with that of its job (Ray's design of ids, src/ray/common/id.h)
            owner_dead=id[-8:] in jobs,
        )
        for id, group in table.items()
        if group["state"] != "REMOVED"
    ]


def _dead_jobs() -> set[str]:
    from ray._private.state import state

    tables: Any = state  # Ray has no types for it
    return {job["JobID"] for job in tables.job_table() if job["IsDead"]}


def _sum(bundles: Any) -> str:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(total.items()))


if __name__ == "__main__":
    print(msgspec.json.encode(look(sys.argv[1])).decode())
