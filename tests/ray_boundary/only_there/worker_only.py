"""Classes that only workers have: the driver of the tests never has this folder on its path."""

from __future__ import annotations

from tests.ray_boundary.shapes import RefitAborted


class WatchdogAborted(RefitAborted):
    """Two steps below CodedError; the caller knows the first."""


class DriverLost(Exception):
    """A foreign exception whose module the caller cannot import."""
