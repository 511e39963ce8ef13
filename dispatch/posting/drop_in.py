"""A pool behind the calling convention that rollout code already has: `as_post`. docs/drop-in.md shows
what to change where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dispatch.posting.request import check_count

if TYPE_CHECKING:  # the pool has a method that calls this
    from dispatch.posting.pool import PosterPool


class Post(Protocol):
    """What slime calls `slime.utils.http_utils.post`."""

    async def __call__(
        self,
        url: str,
        payload: Any,
        max_retries: int = 60,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """POST ``payload`` as JSON and return the reply's decoded JSON, None for an empty 2xx."""
        ...


def as_post(pool: PosterPool, *, deadline: float | None = None, idempotent: bool = True) -> Post:
    """``pool`` as slime's `post`. ``deadline`` and ``idempotent`` hold for every call, and mean what
    `PosterPool.post`'s do.

    ``max_retries`` is the most times one POST is sent (so it is in slime), by decision: a 400 is sent
    once. A payload of None is sent as ``{}``. Failures are CodedErrors, and so is a reply that is not JSON,
    which slime hands back as text."""

    async def post(
        url: str,
        payload: Any,
        max_retries: int = 60,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        check_count(max_retries, "max_retries")
        reply = await pool.post(
            url,
            {} if payload is None else payload,
            deadline=deadline,
            idempotent=idempotent,
            headers=headers,
            max_attempts=max_retries,
        )
        return reply.data

    return post
