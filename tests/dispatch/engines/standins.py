"""An engine as the checks see it, served from the test's own loop so that each answer can be chosen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class StandIn:
    """``healthy``, ``generating``, ``steps`` and ``under_way`` say how it answers; None for the last two: no
    metrics. ``asked`` counts the requests by path."""

    def __init__(self) -> None:
        self.url = ""
        self.healthy = True
        self.generating = True
        self.stepping = False
        self.steps: float | None = None
        self.under_way: int | None = None
        self.asked: dict[str, int] = {}
        self.met = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] = self.asked.get(request.path, 0) + 1
        self.met.set()
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/metrics":
            return self._metrics()
        if not self.generating:
            await asyncio.sleep(1000)
        return web.Response()

    def _metrics(self) -> web.Response:
        lines = []
        if self.steps is not None:
            self.steps += 1 if self.stepping else 0
            lines += ["# TYPE vllm:generation_tokens counter", f"vllm:generation_tokens_total {self.steps}"]
        if self.under_way is not None:
            lines += ["# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running {self.under_way}"]
        return web.Response(text="\n".join(lines) + "\n") if lines else web.Response(status=404)


@asynccontextmanager
async def standing_in() -> AsyncIterator[StandIn]:
    """A served stand-in."""
    one = StandIn()
    app = web.Application()
    app.router.add_get("/{path}", one.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield one
    finally:
        await runner.cleanup()
