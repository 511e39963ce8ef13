"""Routing: which engine a sample goes to.

`Router` knows the engines of a static list (``--engine URL``) or follows a fleet. It sends work to
the one with the fewest of our requests under way, and sets an engine aside for a while when it is
seen to be broken; what a server says about a request (4xx) or about its load (429, 503) never does
that (sglang#25811).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from dispatch.engines.spec import EngineStatus
from dispatch.posting.load import Verdict, verdict_of
from faults import Backoff, Fault
from protocol import Code, CodedError, Events


class Fleet(Protocol):
    """What routing needs of an `EngineFleet`."""

    def engines(self) -> tuple[EngineStatus, ...]: ...
    def on_change(self, callback: Callable[[EngineStatus], None]) -> Callable[[], None]: ...
    def report(self, url: str, fault_code: Code | str) -> None: ...


class Target:
    """One engine as routing sees it. ``weight_version`` is the one known now: what a sample that is
    dispatched now will carry."""

    def __init__(self, key: str, url: str, weight_version: str | None = None) -> None:
        self.key = key
        self.url = url
        self.weight_version = weight_version
        self.in_flight = 0
        self.failures = 0
        self.aside_until = 0.0


class Router:
    """See the module. Belongs to one event loop."""

    def __init__(self, events: Events, backoff: Backoff = Backoff(0.25, 10.0)) -> None:  # noqa: B008 - frozen
        self._events = events
        self._backoff = backoff
        self._targets: dict[str, Target] = {}
        self._news = asyncio.Event()
        self._fleet: Fleet | None = None
        self._unfollow: Callable[[], None] | None = None

    @classmethod
    def static(cls, urls: Iterable[str], events: Events) -> Router:
        """Route over a fixed list of base URLs."""
        router = cls(events)
        for number, url in enumerate(urls):
            router._targets[url] = Target(f"engine/{number}", url)
        return router

    @classmethod
    def follow(cls, fleet: Fleet, events: Events) -> Router:
        """Route over a fleet's routable engines, and follow its changes."""
        router = cls(events)
        router._fleet = fleet
        router._unfollow = fleet.on_change(lambda status: router._take())
        router._take()
        return router

    def close(self) -> None:
        """Stop following. Idempotent."""
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    @property
    def targets(self) -> tuple[Target, ...]:
        """The engines known now, set aside or not."""
        return tuple(self._targets.values())

    async def pick(self, avoid: Collection[str] = (), *, timeout: float) -> Target:
        """The engine for a request, rather none whose URL is in ``avoid``; its ``in_flight`` is raised,
        `done` lowers it. Waits up to ``timeout`` seconds; raises CodedError UPSTREAM.NO_ENGINE."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout
        while True:
            now = loop.time()
            usable = [t for t in self._targets.values() if t.aside_until <= now]
            welcome = [t for t in usable if t.url not in avoid] or usable
            if welcome:
                target = min(welcome, key=lambda t: t.in_flight)
                target.in_flight += 1
                return target
            if now >= ends:
                raise CodedError(
                    "UPSTREAM.NO_ENGINE", f"no engine was routable for {timeout:.3g} s: {self._how(now)}"
                )
            back = min((t.aside_until for t in self._targets.values()), default=ends)
            self._news.clear()
            try:
                async with asyncio.timeout(max(min(back, ends) - now, 0.001)):
                    await self._news.wait()
            except TimeoutError:
                continue

    def version(self, target: Target) -> str | None:
        """The weight version of ``target`` now, also where its engine was away in between."""
        return self._targets.get(target.url, target).weight_version

    def set_aside(self, target: Target, seconds: float) -> None:
        """Nothing new for ``target`` during the next ``seconds``: the pool gives it none either."""
        until = asyncio.get_running_loop().time() + seconds
        target.aside_until = max(target.aside_until, until)

    def done(self, target: Target, fault: Fault | None) -> None:
        """The request is over: ``fault`` is None when it went well."""
        target.in_flight -= 1
        if fault is None:
            target.failures = 0
            return
        if verdict_of(fault) is not Verdict.FAILED:
            return
        now = asyncio.get_running_loop().time()
        if target.aside_until > now:
            return  # set aside already: the other requests that it took down say nothing new
        target.failures += 1
        seconds = self._backoff.delay(target.failures)
        target.aside_until = now + seconds
        self._events.emit(
            "engine.aside",
            level="warning",
            code=fault.code,
            key=target.key,
            detail=f"no new work for {seconds:.3g} s: {fault.evidence[:200]}",
            url=target.url,
            failures=target.failures,
        )
        if self._fleet is not None:
            self._fleet.report(target.url, fault.code)

    def learn(self, target: Target, weight_version: str | None) -> None:
        """A reply told its engine's version. A static list knows versions only from there: what is
        stamped at a dispatch is the last one that was told before it."""
        if self._fleet is None and weight_version is not None:
            target.weight_version = weight_version

    def _take(self) -> None:
        assert self._fleet is not None
        ready = {s.url: s for s in self._fleet.engines() if s.state == "ready"}
        for gone in self._targets.keys() - ready.keys():
            del self._targets[gone]
        for url, status in ready.items():
            target = self._targets.setdefault(url, Target(status.key, url))
            target.weight_version = status.weight_version
        self._news.set()

    def _how(self, now: float) -> str:
        if not self._targets:
            return "none is ready"
        return ", ".join(f"{t.url} is set aside for {t.aside_until - now:.1f} s more" for t in self.targets)
