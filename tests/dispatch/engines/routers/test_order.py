"""A fleet and its router, on a real Ray: added only after the canary, removed before the kill."""

from __future__ import annotations

import os
import signal

import psutil

from dispatch.engines import EngineFleet, EngineStatus
from dispatch.engines.routers import StaticRouter
from protocol import Events
from tests.dispatch.engines.processes import Tag, spec_of
from tests.support.events import EventFile
from tests.support.wait import until


class Watched(StaticRouter):
    """Writes down when it was told what, and how the engine stood then."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.pids: dict[str, int] = {}

    async def add(self, url: str) -> None:
        await super().add(url)
        self.log.append(f"added {self._how(url)}")

    async def remove(self, url: str) -> None:
        self.log.append(f"removed {self._how(url)}")
        await super().remove(url)

    def _how(self, url: str) -> str:
        try:
            return "gone" if psutil.Process(self.pids[url]).status() == psutil.STATUS_ZOMBIE else "alive"
        except psutil.NoSuchProcess:
            return "gone"


async def test_added_after_the_canary_removed_before_the_kill(
    ray_local: None, tag: Tag, events: EventFile
) -> None:
    log: list[str] = []
    router = Watched(log)

    def noted(status: EngineStatus) -> None:
        if status.url:
            router.pids[status.url] = status.pid
        if log[-1:] != [status.state]:
            log.append(status.state)

    with Events.to_file(events.path, run="test", role="fleet") as sink:
        async with EngineFleet([spec_of(tag, drain_timeout=0.2)], events=sink, router=router) as fleet:
            fleet.on_change(noted)
            first = (await fleet.wait_ready(30))[0]
            await until(lambda: "added alive" in log, 10)
            assert log.index("ready") < log.index("added alive")
            assert await router.urls() == (first.url,)

            log.clear()
            second = await fleet.restart(first.key)
            await until(lambda: "added alive" in log, 10)
            assert log.index("removed alive") < log.index("ready") < log.index("added alive")
            assert await router.urls() == (second.url,)

            log.clear()
            os.kill(second.pid, signal.SIGKILL)
            await until(lambda: "added alive" in log, 20)
            assert log.index("removed gone") < log.index("ready") < log.index("added alive")
            third = (await fleet.wait_ready(30))[0]
            assert await router.urls() == (third.url,)
            log.clear()
        assert "removed alive" in log, "also at the end"
        assert await router.urls() == ()
