"""Publication: the fleet's routable engines, as a router in front of them knows them.

An engine is shown after its canary and hidden before it is touched. Showing waits for nobody: the engine
serves those who know the fleet in the meantime. Hiding is waited for, within a deadline, since what comes
next is the engine's end; a router that does not answer must not keep a sick engine alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from protocol import CodedError, Events

HIDE: Final = 5.0
"""Seconds that an engine's end waits for the router."""
AGAIN: Final = (0.5, 10.0)
"""Seconds between two tries to tell a router, from and to; and, the longer one, between two looks whether
it still knows: a router that was restarted has forgotten."""


class Router(Protocol):
    """What is told of engines that may be used. All calls may be repeated, have deadlines of their own, and
    raise CodedError."""

    async def add(self, url: str) -> None: ...
    async def remove(self, url: str) -> None: ...
    async def urls(self) -> tuple[str, ...]: ...


class Publication:
    """Tells one router, or nobody, in one task; the last word on each engine counts."""

    def __init__(self, router: Router | None, events: Events) -> None:
        self._router = router
        self._events = events
        self._wanted: dict[str, bool] = {}
        """By URL: whether it is to be shown. Those to be hidden are kept until the router knows."""
        self._known: dict[str, bool] = {}
        """By URL: what the router was told last."""
        self._news = asyncio.Event()
        self._told = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def show(self, url: str) -> None:
        """The engine at ``url`` may be used."""
        if self._router is not None:
            self._want(url, True)

    async def hide(self, url: str) -> None:
        """The engine at ``url`` may no longer be used; returns when the router knows, or after `HIDE`
        seconds, or at once when it never was shown."""
        if self._router is None or url not in self._wanted:
            return
        self._want(url, False)
        try:
            async with asyncio.timeout(HIDE):
                while url in self._wanted and not self._wanted[url]:
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            self._events.emit("router.late", level="warning", key=url, seconds=HIDE)

    async def close(self) -> None:
        """Stop telling. What is still shown then was not hidden by its keeper."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _want(self, url: str, shown: bool) -> None:
        self._wanted[url] = shown
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """One engine at a time, so that two words on the same one cannot overtake each other."""
        pause = AGAIN[0]
        while True:
            self._news.clear()
            try:
                await self._settle()
                pause = AGAIN[0]
                wait = AGAIN[1]
            except CodedError as exc:
                self._events.emit("router.failed", level="warning", error=exc)
                wait, pause = pause, min(2 * pause, AGAIN[1])
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                self._known.clear()  # look again

    async def _settle(self) -> None:
        assert self._router is not None
        if not self._known:
            known = await self._router.urls()
            self._known = {url: url in known for url in self._wanted}
        for url, shown in list(self._wanted.items()):
            if self._known.get(url) is not shown:
                change: Callable[[str], Coroutine[Any, Any, None]]
                change = self._router.add if shown else self._router.remove
                await change(url)
                self._known[url] = shown
            if not shown and self._wanted.get(url) is False:
                del self._wanted[url]
                self._known.pop(url, None)
                self._told.set()
