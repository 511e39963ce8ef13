"""The router in front knows what may be used, in spite of its own failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from dispatch.engines.keeping import publication
from dispatch.engines.keeping.publication import Publication
from protocol import CodedError, Events
from tests.support.events import EventFile
from tests.support.wait import until

A, B = "http://a:1", "http://b:2"


class Recorder:
    """A router that remembers what it was told; ``broken`` makes it fail, ``slow`` hang."""

    def __init__(self) -> None:
        self.shown: set[str] = set()
        self.said: list[str] = []
        self.broken = False
        self.slow = False

    async def add(self, url: str) -> None:
        await self._work(f"add {url}")
        self.shown.add(url)

    async def remove(self, url: str) -> None:
        await self._work(f"remove {url}")
        self.shown.discard(url)

    async def urls(self) -> tuple[str, ...]:
        await self._work("urls")
        return tuple(self.shown)

    async def reconcile(self, wanted: Iterable[str]) -> None:
        await self._work("reconcile")
        self.shown = set(wanted)

    async def close(self) -> None:
        pass

    async def _work(self, what: str) -> None:
        self.said.append(what)
        if self.slow:
            await asyncio.sleep(1000)
        if self.broken:
            raise CodedError("TRANSPORT.CONNECT", "no router")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "AGAIN", (0.05, 0.1))
    monkeypatch.setattr(publication, "LOOK", 0.1)


async def test_shown_and_hidden(events: EventFile) -> None:
    router = Recorder()
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(router, sink)
        told.show(A)
        told.show(B)
        await until(lambda: router.shown == {A, B})
        await told.hide(A)
        assert router.shown == {B}
        await told.hide("http://never:3")
        await told.close()
    assert events.all() == []


async def test_hidden_before_it_was_ever_told(events: EventFile) -> None:
    router = Recorder()
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(router, sink)
        told.show(A)
        await told.hide(A)
        assert router.shown == set()
        await told.close()


async def test_a_router_that_fails_is_told_again(events: EventFile) -> None:
    router = Recorder()
    router.broken = True
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(router, sink)
        told.show(A)
        await until(lambda: len(events.named("router.failed")) >= 2)
        router.broken = False
        await until(lambda: router.shown == {A})
        await told.close()
    assert events.named("router.failed")[0]["code"] == "TRANSPORT.CONNECT"


async def test_a_router_that_was_restarted_is_told_anew(events: EventFile) -> None:
    router = Recorder()
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(router, sink)
        told.show(A)
        await until(lambda: router.shown == {A})
        router.shown.clear()
        await until(lambda: router.shown == {A})
        await told.close()


class Slow(Recorder):
    """A router that takes its time between what `reconcile` wants and what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def reconcile(self, wanted: Iterable[str]) -> None:
        urls = set(wanted)
        self.looked.set()
        await self.goes_on.wait()
        self.shown |= urls


async def test_hidden_while_the_router_is_looked_at(events: EventFile) -> None:
    """The look knows of the engine as one to be shown, and would add it after its removal."""
    router = Slow()
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(router, sink)
        told.show(A)
        await router.looked.wait()
        await told.hide(A)
        router.goes_on.set()
        router.looked.clear()
        await router.looked.wait()  # the look that comes after it
        assert router.shown == set()
        await told.close()


async def test_a_dead_router_does_not_keep_an_engine_alive(
    events: EventFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "HIDE", 0.2)
    router = Recorder()
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(router, sink)
        told.show(A)
        await until(lambda: router.shown == {A})
        router.slow = True
        async with asyncio.timeout(20):
            await told.hide(A)
        await told.close()
    assert [event["key"] for event in events.named("router.late")] == [A]


async def test_an_engine_out_of_the_routers_reach_delays_no_other(events: EventFile) -> None:
    router = Recorder()
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(router, sink)
        told.show(A)
        await until(lambda: router.shown == {A})
        router.slow = True
        told.show(B)
        await until(lambda: f"add {B}" in router.said)
        router.slow = False
        async with asyncio.timeout(20):
            await told.hide(A)
            await told.hide(B)
        assert router.shown == set()
        await told.close()
    assert events.all() == []


async def test_no_router(events: EventFile) -> None:
    with Events.to_file(events.path, run="test", role="fleet") as sink:
        told = Publication(None, sink)
        told.show(A)
        await told.hide(A)
        await told.close()
    assert events.all() == []
