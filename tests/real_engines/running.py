"""Programs that tests run beside what is tested: a real sglang-router, and llama.cpp as its worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import httpx

from tests.real_engines.places import HERE, free_port, with_servers
from tests.support.wait import until_sync

START = 40.0
"""Seconds to start: below one on a machine that has nothing else to do."""


class Running:
    """A server in the foreground, known by its address and ended for certain."""

    def __init__(self, command: list[str], port: int, env: dict[str, str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = command
        self._env = {**os.environ, **with_servers(), **env}
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it and wait until it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)
        until_sync(self._answers, START, f"{self._command} answers, see {self._log.read_text()[-2000:]}")
        return self

    def kill(self) -> None:
        """SIGKILL, and see it gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        try:
            return httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def sglang_router(folder: Path, env: dict[str, str], api_key: str) -> Running:
    """A real sglang-router, not started yet."""
    port, metrics = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(port), "--api-key", api_key),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
    ]
    return Running(command, port, env, folder / f"router-{port}.log")


def llama_worker(folder: Path, env: dict[str, str], model: Path, port: int | None = None) -> Running:
    """llama.cpp's server, not started yet."""
    port = port or free_port()
    command = [sys.executable, str(HERE / "llama_server.py"), str(model), "--port", str(port)]
    return Running(command, port, env, folder / f"llama-{port}.log")
