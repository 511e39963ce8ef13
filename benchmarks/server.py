"""A server that answers each POST after a fixed time, in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving(service_time: float) -> Iterator[str]:
    """Start the server; yields the URL to POST to. ``service_time`` in seconds."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.server", "--service-time", str(service_time)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield f"http://127.0.0.1:{int(child.stdout.readline())}/generate"
    finally:
        child.kill()
        child.wait()


async def _serve(service_time: float) -> None:
    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(service_time)
        return web.json_response({"text": "x" * 200})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--service-time", type=float, default=0.1)
    asyncio.run(_serve(parser.parse_args().service_time))
