"""Kills a real engine part by part under the supervisor, and looks each time at what is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from dispatch.engines import EngineSpec, EngineStatus, EngineSupervisor
from tests.real_engines.parts import SHARED, Parts
from tests.support.wait import until

GONE = 5.0
"""Seconds after a stop within which nothing may be left."""
FOUND = 150.0
"""Seconds until a fault is known at most; SGLang hangs for a minute when its detokenizer dies."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""vLLM's sockets between its processes, in the temporary directory."""


@dataclass(frozen=True)
class Case:
    """``signal`` to the process whose name begins with ``victim``; "" is the engine's first one, "guard" the
    one above it. ``look`` looks at the injured engine before anything is done about it."""

    victim: str
    signal: signal.Signals
    look: Callable[[EngineStatus], Awaitable[None]] | None = None


class Killer:
    """One engine, its supervisor, and a request body that keeps it busy for some seconds."""

    def __init__(self, spec: EngineSpec, parts: Parts, path: str, body: dict[str, Any]) -> None:
        self._spec = spec
        self._parts = parts
        self._path = path
        self._body = body
        self._supervisor = EngineSupervisor(spec)
        self._others = temporary()

    async def run(self, cases: list[Case]) -> None:
        """All cases one after the other: the start after one is the engine of the next."""
        segments: set[str] = set()
        try:
            began = time.monotonic()
            status = await self._supervisor.start()
            print(f"\nstarted in {time.monotonic() - began:.1f} s: {sorted(self._parts.pids().values())}")
            for case in cases:
                status = await self._one(case, status)
            segments = self._parts.segments()
        finally:
            report = await self._supervisor.stop()
            print("last stop:", {name: round(seconds, 1) for name, seconds in report.stages.items()})
        await self._nothing_left(segments)

    async def _one(self, case: Case, status: EngineStatus) -> EngineStatus:
        sight = await self._supervisor.look(0, 0)
        assert (sight.status.state, sight.failed) == ("ready", 0)
        victim = {"": status.pid, "guard": psutil.Process(status.pid).ppid()}.get(case.victim)
        victim = victim or self._parts.named(case.victim)
        segments = self._parts.segments()
        async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
            requests = [
                asyncio.create_task(client.post(status.url + self._path, json=self._body)) for _ in range(4)
            ]
            try:
                await asyncio.sleep(0.5)  # into the middle of them: no engine says when that is
                os.kill(victim, case.signal)
                began = time.monotonic()
                if case.look is not None:
                    await case.look(status)
                how = await self._found()
                found = time.monotonic() - began
                await self._supervisor.stop()
                stopped = time.monotonic() - began - found
                gone = await self._nothing_left(segments)
            finally:
                for request in requests:
                    request.cancel()
                ends = await asyncio.gather(*requests, return_exceptions=True)
        began = time.monotonic()
        again = await self._supervisor.start()
        assert again.state == "ready"
        assert again.url != status.url
        print(
            f"{case.signal.name} {case.victim or 'first process'}: {how}, found after {found:.1f} s, "
            f"stop {stopped:.1f} s, nothing left {gone:.1f} s later ({len(segments)} segments before), "
            f"serves again after {time.monotonic() - began:.1f} s; requests: {summed_up(ends)}"
        )
        return again

    async def _found(self) -> str:
        """Wait until the supervisor knows, and say how: an exit, or checks that fail."""
        number, deadline = 0, time.monotonic() + FOUND
        while (left := deadline - time.monotonic()) > 0:
            sight = await self._supervisor.look(number, left)
            number = sight.number
            if sight.exit is not None:
                assert not sight.exit.planned
                return sight.exit.how
            if sight.failed >= self._spec.health_failures:
                assert sight.error is not None
                return f"{sight.error.code} ({sight.error.detail:.120})"
        raise AssertionError(f"not found within {FOUND} s: {sight}")

    async def _nothing_left(self, segments: set[str]) -> float:
        began = time.monotonic()
        await until(lambda: not self._parts.pids(), GONE, f"gone: {self._parts.pids()}")
        left = segments & set(os.listdir(SHARED))
        assert not left, f"shared memory is left: {left}"
        assert temporary() <= self._others, f"files are left: {temporary() - self._others}"
        return time.monotonic() - began


def temporary() -> set[str]:
    """Sockets of vLLM's kind in the temporary directory."""
    return {name for name in os.listdir(tempfile.gettempdir()) if UUID.fullmatch(name)}


def summed_up(ends: list[httpx.Response | BaseException]) -> str:
    """What became of the requests that were under way."""
    texts = [
        f"{end.status_code} {end.text[:60]}" if isinstance(end, httpx.Response) else type(end).__name__
        for end in ends
    ]
    return ", ".join(f"{texts.count(text)}x {text}" for text in sorted(set(texts)))
