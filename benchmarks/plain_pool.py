"""The baseline: the POST pool that people have today, plain and at its best settings.

One Ray async actor call a POST, round robin, httpx on its stock transport; any exception falls back
to a POST from the driver; a dead actor is never replaced.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import ray


def _client(connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(limits=limits, timeout=600.0)


@ray.remote(num_cpus=0.001)
class PlainPoster:
    """Posts, and raises what httpx raises."""

    def __init__(self, connections: int) -> None:
        self._client = _client(connections)

    async def post(self, url: str, payload: Any) -> Any:
        response = await self._client.post(url, json=payload)
        response.raise_for_status()
        return response.json()


class PlainPool:
    """See the module. ``concurrency`` is kept by a semaphore in the driver."""

    def __init__(self, concurrency: int, posters: int) -> None:
        share = -(-concurrency // posters)
        remote: Any = PlainPoster
        self._posters = [remote.options(max_concurrency=share + 8).remote(share) for _ in range(posters)]
        self._local = _client(concurrency)
        self._gate = asyncio.Semaphore(concurrency)
        self._next = 0

    async def post(self, url: str, payload: Any) -> Any:
        async with self._gate:
            poster = self._posters[self._next % len(self._posters)]
            self._next += 1
            try:
                return await poster.post.remote(url, payload)
            except Exception:  # noqa: BLE001 - the baseline's own fault: it takes everything for a dead poster
                response = await self._local.post(url, json=payload)
                return response.json()

    async def close(self) -> None:
        for poster in self._posters:
            ray.kill(poster)
        await self._local.aclose()
