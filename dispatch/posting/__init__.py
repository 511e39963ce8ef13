"""posting: POSTs to inference engines, dispatched to a pool of poster actors.

`PosterPool` is the front; `Reply` and `Request` are what goes in and out. A POST goes through
`pool` (accounting, retries by decision) → `admission` (exact capacity, first come first served) →
`lane` (one poster actor, or the local client) → `transport` (one HTTP exchange, judged).
"""

from dispatch.posting.pool import Done, PosterPool
from dispatch.posting.posters.lane import Health
from dispatch.posting.request import Reply, Request

__all__ = ["Done", "Health", "PosterPool", "Reply", "Request"]
