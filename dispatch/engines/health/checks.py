"""Checks: a running engine asked again and again whether it can still be trusted.

They run beside the engine, in its supervisor, so that neither a busy driver nor the network between two
nodes makes a healthy engine look sick.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import httpx

from dispatch.engines.health import probe
from dispatch.engines.health.load import Load, read_load
from dispatch.engines.spec import EngineSpec
from protocol import CodedError

_GAP: Final = 0.05
"""Seconds between two checks at least, however many clients complain."""
_DEEP_GAP: Final = 1.0
"""Seconds between two generation checks at least, however many clients complain."""
_LATE: Final = 1.5
"""A check that took this many times its timeout was not late because of the engine: we were."""
_EXCUSES: Final = 3
"""Checks in a row that may be excused so. A machine that is always too busy has sick engines."""
_DRAIN_LOOK: Final = 0.1
"""Seconds between two looks at an engine that drains."""


class Checks:
    """The checks of the engine at ``url``. ``told`` is called with each new number of failed checks in a
    row and the last failure, ENGINE.UNHEALTHY; 0 when they pass again.

    ``/health`` is asked every ``probe_interval``. Every ``canary_interval``, and at once after a
    complaint, the engine has to show progress as well; once that failed it is part of each check until
    it passes, since a good ``/health`` in between proves nothing (vllm#39863). A frozen engine is found
    within ``health_failures * (probe_interval + health_timeout)`` seconds; one that only generates
    nothing within ``2 * canary_interval + health_failures * (canary_timeout + 2 * health_timeout)``."""

    def __init__(self, spec: EngineSpec, url: str, told: Callable[[int, CodedError | None], None]) -> None:
        self._spec = spec
        self._url = url
        self._told = told
        self._woken = asyncio.Event()
        self._complaint = False
        self._held_until = 0.0
        self._failed = 0
        self._excused = 0
        self._deep_failed = False
        self._last_deep = time.monotonic()
        self._load = Load()

    def complain(self) -> None:
        """A client had trouble: check now, progress included. Whether the engine is sick is decided by
        that check, never by the complaint."""
        self._complaint = True
        self._woken.set()

    def hold(self, seconds: float) -> None:
        """The engine is paused on purpose for at most ``seconds``: ask it nothing meanwhile, only see that
        its port is open. A paused SGLang does not answer ``/health``, so checks would kill it in the middle
        of a weight update."""
        self._held_until = time.monotonic() + seconds

    def release(self) -> None:
        """It goes on: ask again."""
        self._held_until = 0.0
        self._woken.set()

    @property
    def held(self) -> bool:
        """Whether it is held now."""
        return time.monotonic() < self._held_until

    async def run(self) -> None:
        """Check for ever."""
        async with probe.new_client() as client:
            self._load = await read_load(client, self._spec, self._url, self._spec.health_timeout)
            while True:
                await self._pause()
                await self._check(client)

    async def drained(self, timeout: float) -> bool:
        """Wait until the engine has nothing under way, twice in a row, for a request can be on its way to it
        when it says so first. False after ``timeout`` seconds, and for an engine that does not say."""
        deadline, idle = time.monotonic() + timeout, 0
        async with probe.new_client() as client:
            while (left := deadline - time.monotonic()) > 0:
                load = await read_load(client, self._spec, self._url, min(left, self._spec.health_timeout))
                idle = idle + 1 if load.under_way == 0 else 0
                if idle == 2:
                    return True
                await asyncio.sleep(min(left, _DRAIN_LOOK))
        return False

    async def _pause(self) -> None:
        await asyncio.sleep(min(_GAP, self._spec.probe_interval))
        self._woken.clear()
        if self._complaint:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._spec.probe_interval - _GAP)):
                await self._woken.wait()

    async def _check(self, client: httpx.AsyncClient) -> None:
        spec, now = self._spec, time.monotonic()
        if self.held:
            self._last_deep = now  # what was held owes no progress
            await self._connect()
            return
        since = now - self._last_deep
        asked, self._complaint = self._complaint and since >= _DEEP_GAP, False
        deep = self._deep_failed or asked or 0 < spec.canary_interval <= since
        longest = spec.health_timeout
        try:
            await probe.health(client, self._url, spec.health_timeout)
            if deep:
                self._deep_failed, self._last_deep = True, time.monotonic()
                longest += 2 * spec.health_timeout + spec.canary_timeout
                await self._progress(client, anew=asked)
                self._deep_failed = False
        except CodedError as exc:
            if self.held:
                return  # held in the middle of the check: its failure says nothing
            if time.monotonic() - now > _LATE * longest and self._excused < _EXCUSES:
                self._excused += 1
                return
            self._count(exc)
        else:
            self._passed()

    def _passed(self) -> None:
        self._excused = 0
        if self._failed:
            self._failed = 0
            self._told(0, None)

    async def _connect(self) -> None:
        """All that is asked of a held engine: that its port is open. One that was told to end closes it
        first, and may then wait for its disk for as long as it likes."""
        try:
            await probe.accepts(self._url, self._spec.health_timeout)
        except CodedError as exc:
            if self.held:
                self._count(exc)
        else:
            self._passed()

    async def _progress(self, client: httpx.AsyncClient, *, anew: bool) -> None:
        """A counter that moved since the last look is proof, without any load of ours, unless proof from now
        on is wanted (``anew``); else the engine has to generate, or to move its counter while we wait in
        its queue."""
        before, spec = self._load, self._spec
        self._load = await read_load(client, spec, self._url, spec.health_timeout)
        if self._load.moved_since(before) and not anew:
            return
        before = self._load
        try:
            await probe.progress(client, spec, self._url, spec.canary_timeout)
        except CodedError:
            self._load = await read_load(client, spec, self._url, spec.health_timeout)
            if not self._load.moved_since(before):
                raise

    def _count(self, error: CodedError) -> None:
        self._failed += 1
        text = f"{self._failed} checks in a row failed, the last: {error.detail}"
        self._told(self._failed, CodedError("ENGINE.UNHEALTHY", text, error.data))
