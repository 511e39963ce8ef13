"""Publication: the fleet's routable engines, as a router in front of them knows them.

An engine is shown after its canary and hidden before it is touched. Showing waits for nobody: the engine
serves those who know the fleet in the meantime. Hiding is waited for, within a deadline, since what comes
next is the engine's end; a router that does not answer must not keep a sick engine alive.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from dispatch.engines.routers.router import Router
from protocol import CodedError, Events

HIDE: Final = 5.0
"""Seconds that an engine's end waits for the router."""
AGAIN: Final = (0.5, 10.0)
"""Seconds between two tries to tell a router, from and to."""
LOOK: Final = 10.0
"""Seconds between two looks whether the router still knows: one that was restarted has forgotten."""


class Publication:
    """Tells one router, or nobody. Each engine has a task of its own for as long as there is something to
    tell, so that one that the router cannot reach delays no other; the last word on each counts."""

    def __init__(self, router: Router | None, events: Events) -> None:
        self._router = router
        self._events = events
        self._shown: dict[str, bool] = {}
        """By URL: whether it is to be shown. Those to be hidden are kept until the router knows."""
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._look_now: asyncio.Task[None] | None = None  # the one under way, or the last

    def show(self, url: str) -> None:
        """The engine at ``url`` may be used."""
        if self._router is None:
            return
        self._tell(url, shown=True)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def hide(self, url: str) -> None:
        """The engine at ``url`` may no longer be used; returns when the router knows, or after `HIDE`
        seconds, or at once when it never was shown."""
        if url not in self._shown:
            return
        done, _ = await asyncio.wait({self._tell(url, shown=False)}, timeout=HIDE)
        if not done:
            self._events.emit("router.late", level="warning", key=url, seconds=HIDE)

    async def close(self) -> None:
        """Stop telling. What is still shown then was not hidden by its keeper."""
        all_tasks = (*self._telling.values(), self._looking, self._look_now)
        tasks = [task for task in all_tasks if task is not None]
        self._looking = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self, url: str, *, shown: bool) -> asyncio.Task[None]:
        assert self._router is not None
        self._shown[url] = shown
        before = [task for task in (self._telling.get(url), self._look_now) if task is not None]
        for task in before:
            task.cancel()  # what it was telling is no longer so
        task = self._telling[url] = asyncio.create_task(self._until_told(self._router, url, shown, before))
        task.add_done_callback(lambda task: self._told(url, task))
        return task

    async def _until_told(
        self, router: Router, url: str, shown: bool, before: list[asyncio.Task[None]]
    ) -> None:
        # Two words on one engine must not overtake each other.
        await asyncio.gather(*before, return_exceptions=True)
        pause = AGAIN[0]
        while True:
            try:
                await (router.add(url) if shown else router.remove(url))
                return
            except CodedError as exc:
                self._events.emit("router.failed", level="warning", error=exc, url=url, shown=shown)
            await asyncio.sleep(pause)
            pause = min(2 * pause, AGAIN[1])

    def _told(self, url: str, task: asyncio.Task[None]) -> None:
        if self._telling.get(url) is task:
            del self._telling[url]
            if not task.cancelled() and not self._shown[url]:
                del self._shown[url]

    async def _look(self) -> None:
        assert self._router is not None
        while True:
            await asyncio.sleep(LOOK)
            if self._telling:
                continue  # it is being told; a look in between would tell of what is no longer so
            shown = [url for url, shown in self._shown.items() if shown]
            self._look_now = asyncio.create_task(self._reconcile(self._router, shown))
            await asyncio.wait({self._look_now})

    async def _reconcile(self, router: Router, shown: list[str]) -> None:
        with contextlib.suppress(CodedError):  # an engine that is to be told of says what is wrong
            await router.reconcile(shown)
