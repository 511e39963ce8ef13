"""An engine that a certain request kills, and that is started again on the same port: SGLang and its
supervisor in small."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from types import TracebackType
from typing import Self

from aiohttp import web

from tests.support.wait import until_sync
from tests.support.witness import ROOT

DEADLY = "deadly"


async def serve(port: int) -> None:
    async def generate(request: web.Request) -> web.Response:
        body = await request.text()
        if DEADLY in body:
            os._exit(1)
        await asyncio.sleep(json.loads(body).get("seconds", 0.0))
        finish = {"type": "stop"}
        meta = {"finish_reason": finish, "prompt_tokens": 1, "completion_tokens": 1}
        return web.json_response({"text": "well", "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await asyncio.Event().wait()


class Mortal:
    """The server and who restarts it. ``deaths``: how often it died of a request. Within ``async with``."""

    def __init__(self) -> None:
        # Bound all the while and never listening: what dies leaves its port to nobody else, and refuses.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.port = self._port.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.base}/generate"
        self.deaths = 0
        self._process = self._start()
        self._keeping: asyncio.Task[None] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.mortal", "--port", str(self.port)], cwd=ROOT
        )

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    async def _keep(self) -> None:
        while True:
            while self._process.poll() is None:  # noqa: ASYNC110 - a process's end has no event here
                await asyncio.sleep(0.01)
            self.deaths += 1
            await asyncio.sleep(0.3)  # as long as an engine's start, so that its absence can be seen
            self._process = self._start()

    async def __aenter__(self) -> Self:
        until_sync(self._listens)
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._keeping is not None
        self._keeping.cancel()
        self._process.kill()
        self._process.wait(10)
        self._port.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))
