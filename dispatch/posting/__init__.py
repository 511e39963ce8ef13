"""posting: POSTs to inference engines, dispatched to a pool of poster actors.

`PosterPool` is the front; `Reply` and `Request` are what goes in and out. A POST goes through
`pool` (accounting, retries by decision) → `load` (how much each server gets) → `admission` (exact
capacity, callers in turn) → `posters` (one actor, or the local client) → `transports` (one HTTP exchange,
judged). Names are imported when first used, so that a poster's process loads what a poster needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.posting.load import LoadControl
    from dispatch.posting.pool import Done, PosterPool
    from dispatch.posting.posters.keeper import Recreation
    from dispatch.posting.posters.lane import Health
    from dispatch.posting.request import Reply, Request

_HOME = {
    "Done": "dispatch.posting.pool",
    "Health": "dispatch.posting.posters.lane",
    "LoadControl": "dispatch.posting.load",
    "PosterPool": "dispatch.posting.pool",
    "Recreation": "dispatch.posting.posters.keeper",
    "Reply": "dispatch.posting.request",
    "Request": "dispatch.posting.request",
}

__all__ = ["Done", "Health", "LoadControl", "PosterPool", "Recreation", "Reply", "Request"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dispatch.posting' has no attribute {name!r}")
    return getattr(import_module(home), name)
