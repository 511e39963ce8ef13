"""The checks, one module each, in the order in which they are told."""

from __future__ import annotations

from typing import Final

from failsoft.doctor.checks import cluster, gpus, limits, orphans, ports, space, versions
from failsoft.doctor.finding import Check

__all__ = ["CHECKS"]

CHECKS: Final = (
    Check(name="orphans", run=orphans.check, deadline=20.0),
    Check(name="gpus", run=gpus.check, deadline=20.0),
    Check(name="ray", run=cluster.check, deadline=cluster.DEADLINE + 10.0),
    Check(name="ports", run=ports.check),
    Check(name="limits", run=limits.check),
    Check(name="space", run=space.check),
    Check(name="versions", run=versions.check),
)
