"""Whether a server is there at all, asked of its port.

A connection that broke with a request in flight tells little: a network, a proxy or a restart breaks them
too. When the port refuses right afterwards, the server is gone, and the request may have been why.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

TIMEOUT: Final = 1.0
"""Seconds that a connection may take; what takes longer is not refused."""


class Listening:
    """Asks each origin once for all who ask at the same time: a server's end breaks many connections."""

    def __init__(self) -> None:
        self._asking: dict[str, asyncio.Task[bool]] = {}

    async def at(self, origin: str, within: float) -> bool:
        """Whether somebody listens at ``origin`` (``scheme://host:port``). Where that is not known ``within``
        seconds, nobody has refused, and so somebody does."""
        task = self._asking.get(origin)
        if task is None:
            task = self._asking[origin] = asyncio.create_task(_listens(origin))
            task.add_done_callback(lambda _: self._asking.pop(origin, None))
        try:
            async with asyncio.timeout(max(within, 0.0)):
                return await asyncio.shield(task)
        except TimeoutError:
            return True


async def _listens(origin: str) -> bool:
    parts = urlsplit(origin)
    try:
        async with asyncio.timeout(TIMEOUT):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.transport.abort()
    return True
