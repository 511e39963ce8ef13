"""The local client: the pool's own process makes the POSTs while no poster is healthy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dispatch.posting.request import Answer, Item
from dispatch.posting.transports.client import Transport, make_client
from dispatch.posting.transports.transport import exchange
from protocol import CodedError


class LocalLane:
    """See the module. ``release`` gives one place back."""

    name = "local"
    via: Final = "local"

    def __init__(
        self, release: Callable[[LocalLane], None], connections: int, transport: Transport = "aiohttp"
    ) -> None:
        self.share = 0
        self.occupied = 0
        self._release = release
        self._client = make_client(connections, transport)
        self._running: set[asyncio.Task[Answer]] = set()

    async def run(self, item: Item, budget: float) -> Answer:
        """One attempt; see `Batcher.run`. Its end is its remote end."""
        task = asyncio.create_task(exchange(self._client, item, budget))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError as exc:
            if not task.cancelled() or (current := asyncio.current_task()) is None or current.cancelling():
                raise
            raise CodedError("POOL.CLOSED", "the pool was closed with the request in flight") from exc
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            self._running.discard(task)
            self._release(self)

    async def close(self) -> None:
        """Cancel what runs, and close the connections."""
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))
        await self._client.aclose()
