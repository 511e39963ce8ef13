"""What the alert tests share: rules from text, events, polling with a deadline, a recording server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from faults.alerts import RuleFile, parse_rules

POSTER = """
[[rule]]
name = "poster-died"
type = "any"
match = { event = "poster.died" }
group_by = ["key"]
resolve = { event = "poster.ready" }
severity = "critical"
summary = "{key} died: {detail}"
"""


def rules(text: str = POSTER) -> RuleFile:
    return parse_rules(text, "rules.toml")


def event(name: str, ts: float = 1_700_000_000.0, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "ts": ts,
        "level": "info",
        "event": name,
        "code": None,
        "id": None,
        "key": "",
        "run": "r1",
        "role": "driver",
        "host": "h",
        "pid": 1,
        "detail": "",
        "data": {},
    }
    return base | fields


def died(key: str = "poster/0", ts: float = 1_700_000_000.0, **fields: Any) -> dict[str, Any]:
    return event(
        "poster.died",
        ts,
        **({"key": key, "code": "ACTOR.DIED", "id": "ABCD2345", "detail": "killed"} | fields),
    )


def ready(key: str = "poster/0", ts: float = 1_700_000_001.2) -> dict[str, Any]:
    return event("poster.ready", ts, key=key)


def append(path: Path, *events: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in events)


async def until(condition: Callable[[], object], deadline: float = 10.0, what: str = "the condition") -> None:
    """Poll until ``condition`` holds; fails after ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {deadline} s"
        await asyncio.sleep(0.01)


class Recorder:
    """A real HTTP server that records JSON bodies and answers with the statuses it was given, in
    order, then 200. While ``gate`` is unset it holds its answers back."""

    def __init__(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        self.statuses = list(statuses)
        self.headers = headers or {}
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.paths.append(request.path)
        await self.gate.wait()
        status = self.statuses.pop(0) if self.statuses else 200
        return web.Response(status=status, text=f"answer {status}", headers=self.headers)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.gate.set()
        await self._runner.cleanup()
