"""Who asks whether a server is there waits no longer than its own time allows."""

from __future__ import annotations

import asyncio

import pytest

from dispatch.posting.load.listening import TIMEOUT, Listening
from tests.dispatch.posting.load.virtual import run


def test_who_has_little_time_left_does_not_wait_for_a_silent_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone with its network refuses nothing: no answer comes, for anybody."""
    asked: list[str] = []

    async def silent(host: str, port: int) -> None:
        asked.append(f"{host}:{port}")
        await asyncio.Event().wait()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        listening = Listening()
        began = loop.time()

        async def one(within: float) -> float:
            assert await listening.at("http://engine:80", within)
            return loop.time() - began

        took = await asyncio.gather(one(0.25), one(TIMEOUT + 1.0), one(-1.0))
        assert took == pytest.approx([0.25, TIMEOUT, 0.0])
        assert asked == ["engine:80"], "one who goes does not take the question with it"

    monkeypatch.setattr(asyncio, "open_connection", silent)
    run(scenario())
