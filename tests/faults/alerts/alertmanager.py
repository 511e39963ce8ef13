"""A real Prometheus Alertmanager with a webhook receiver, for tests here and in the chaos room.

async with RealAlertmanager(tmp_path) as real:
    sink = Alertmanager(real.url)
    ...
    alert = await real.wait_for("firing", code="ACTOR.DIED")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import IO, Any, Self

import httpx
import pytest
from aiohttp import web

BINARY = "prometheus-alertmanager"


def binary() -> str:
    """The program's path; its absence fails the test, for a skipped check is no check."""
    found = shutil.which(BINARY) or shutil.which("alertmanager")
    if found is None:
        pytest.fail(f"{BINARY} is not installed; install it with: apt-get install {BINARY}", pytrace=False)
    return found


class RealAlertmanager:
    """One process on loopback, and the receiver of its notifications.

    ``notifications`` holds the bodies of its webhook (version 4 of Alertmanager's own format), in
    order. Grouping is quick: 100 ms for a new group, ``group_interval`` (1 s) for its changes.
    ``repeat`` repeats nothing within a test."""

    def __init__(self, folder: Path, *, group_by: tuple[str, ...] = ("alertname", "code", "key")) -> None:
        self.url = ""
        self.notifications: list[dict[str, Any]] = []
        self._folder = folder / "alertmanager"
        self._group_by = group_by
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> Self:
        """Start the receiver, then the process, and wait until it says that it is ready."""
        program = binary()
        self._folder.mkdir(parents=True, exist_ok=True)
        receiver = await self._start_receiver()
        config = self._folder / "alertmanager.yml"
        config.write_text(  # JSON is YAML
            json.dumps(
                {
                    "route": {
                        "receiver": "test",
                        "group_by": list(self._group_by),
                        "group_wait": "100ms",
                        "group_interval": "1s",
                        "repeat_interval": "1h",
                    },
                    "receivers": [
                        {"name": "test", "webhook_configs": [{"url": receiver, "send_resolved": True}]}
                    ],
                }
            )
        )
        for _ in range(3):  # another process may take the port between our look and its bind
            self._start_process(program, config)
            if await self._ready(20.0):
                return self
            await self._stop_process()
        log = (self._folder / "log").read_text(errors="replace")[-2000:]
        await self.stop()
        pytest.fail(f"Alertmanager did not become ready; the end of its log:\n{log}", pytrace=False)

    async def stop(self) -> None:
        """End the process and the receiver. Idempotent."""
        await self._stop_process()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await self.stop()
            raise

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def alerts(self, status: str, **labels: str) -> list[dict[str, Any]]:
        """The alerts notified so far with that status (``firing``, ``resolved``) and those labels."""
        return [
            alert
            for notification in self.notifications
            for alert in notification["alerts"]
            if alert["status"] == status and labels.items() <= alert["labels"].items()
        ]

    async def wait_for(self, status: str, deadline: float = 15.0, **labels: str) -> dict[str, Any]:
        """The first such alert, as soon as it was notified; fails after ``deadline`` seconds."""
        end = time.monotonic() + deadline
        while not (found := self.alerts(status, **labels)):
            if time.monotonic() > end:
                pytest.fail(
                    f"no {status} notification with {labels} within {deadline} s; got: {self.notifications}"
                )
            await asyncio.sleep(0.02)
        return found[0]

    async def _start_receiver(self) -> str:
        async def take(request: web.Request) -> web.Response:
            self.notifications.append(await request.json())
            return web.Response()

        app = web.Application()
        app.router.add_post("/", take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/"

    def _start_process(self, program: str, config: Path) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.path={self._folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    async def _ready(self, deadline: float) -> bool:
        end = time.monotonic() + deadline
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while time.monotonic() < end and self._process is not None and self._process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.url}/-/ready")).status_code == 200:
                        return True
                await asyncio.sleep(0.05)
        return False

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        log, self._log = self._log, None
        if log is not None:
            log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
