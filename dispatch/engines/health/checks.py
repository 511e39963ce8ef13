"""Checks: watching a running engine until it can no longer be trusted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from dispatch.engines.health import probe
from dispatch.engines.spec import EngineSpec
from protocol import CodedError

_GAP: Final = 0.05
"""Seconds between two checks at least, however many clients complain."""
_DEEP_GAP: Final = 1.0
"""Seconds between two generation checks at least, however many clients complain."""


async def until_unhealthy(spec: EngineSpec, url: str, complaint: asyncio.Event) -> CodedError:
    """Check the engine at ``url`` until ``spec.health_failures`` checks in a row have failed, then
    answer why: ENGINE.UNHEALTHY. Runs for ever on a healthy engine.

    ``/health`` is asked every ``probe_interval``. Every ``canary_interval``, and at once when
    ``complaint`` is set, the engine has to generate as well; once that failed it is part of each check
    until it passes, since a good ``/health`` in between proves nothing (vllm#39863). A frozen engine is
    found within ``health_failures * (probe_interval + health_timeout)`` seconds; one that only
    generates nothing within ``canary_interval + health_failures * canary_timeout``."""
    failures, deep_failed, last_deep = 0, False, time.monotonic()
    async with probe.new_client() as client:
        while True:
            await asyncio.sleep(min(_GAP, spec.probe_interval))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, spec.probe_interval - _GAP)):
                    await complaint.wait()
            since_deep = time.monotonic() - last_deep
            due = 0 < spec.canary_interval <= since_deep
            deep = deep_failed or due or (complaint.is_set() and since_deep >= _DEEP_GAP)
            complaint.clear()
            try:
                await probe.health(client, url, spec.health_timeout)
                if deep:
                    deep_failed, last_deep = True, time.monotonic()
                    await probe.progress(client, spec, url, spec.canary_timeout)
                    deep_failed = False
                failures = 0
            except CodedError as exc:
                failures += 1
                if failures >= spec.health_failures:
                    text = f"{failures} checks in a row failed, the last: {exc.detail}"
                    return CodedError("ENGINE.UNHEALTHY", text, exc.data)
