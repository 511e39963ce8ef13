"""StaticRouter: a plain list of engines, in memory and, for other programs, in a file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dispatch.engines.routers.router import tidy
from dispatch.files import write_atomic
from protocol import CodedError


class StaticRouter:
    """A list. With ``path`` every change is written there as well, whole or not at all, as
    ``{"urls": ["http://127.0.0.1:30000"]}``, so that a program that knows nothing of failsoft can read
    where to send its requests. A file that is there already is of an earlier run and is emptied: its
    engines ended with that run. ``timeout`` is seconds for one call.

    Raises CodedError: CONFIG.INVALID when ``path`` has no folder or is one, NODE.DISK_FULL and NODE.IO when
    it cannot be written."""

    def __init__(self, path: str | Path | None = None, *, timeout: float = 10.0) -> None:
        self._path = None if path is None else Path(path)
        self._timeout = timeout
        self._urls: tuple[str, ...] = ()
        self._writing = asyncio.Lock()
        if self._path is not None:
            if not os.path.isdir(self._path.parent):
                raise CodedError(
                    "CONFIG.INVALID", f"router: {self._path} cannot be written, make its folder first"
                )
            if os.path.isdir(self._path):
                raise CodedError("CONFIG.INVALID", f"router: {self._path} is a folder, name a file in it")
            self._write(())

    async def add(self, url: str) -> None:
        """Put ``url`` at the end of the list."""
        await self._change(add=[tidy(url)])

    async def remove(self, url: str) -> None:
        """Take ``url`` from the list."""
        await self._change(remove=[tidy(url)])

    async def urls(self) -> tuple[str, ...]:
        """The list, in the order in which its engines were added."""
        return self._urls

    async def reconcile(self, wanted: Iterable[str]) -> None:
        """The list is ``wanted`` afterwards: nobody else adds to it."""
        urls = [tidy(url) for url in wanted]
        await self._change(add=urls, remove=set(self._urls) - set(urls))

    async def close(self) -> None:
        """Does nothing."""

    async def _change(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        # A thread that writes cannot be called back. Whoever goes away leaves it to its end, for which the
        # next change waits: or a list that is no longer so would be written last.
        change = asyncio.ensure_future(self._changed(tuple(add), set(remove)))
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(change)
        except TimeoutError as exc:
            raise CodedError(
                "TIMEOUT.DEADLINE", f"router: {self._path} could not be written within {self._timeout:g} s"
            ) from exc

    async def _changed(self, add: tuple[str, ...], remove: set[str]) -> None:
        async with self._writing:
            # A dict keeps the order and each URL once.
            urls = tuple(dict.fromkeys(url for url in (*self._urls, *add) if url not in remove))
            if urls != self._urls:
                if self._path is not None:
                    await asyncio.to_thread(self._write, urls)
                self._urls = urls

    def _write(self, urls: tuple[str, ...]) -> None:
        assert self._path is not None
        write_atomic(self._path, msgspec.json.encode({"urls": urls}) + b"\n")
