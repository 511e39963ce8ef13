"""A real nginx as a child of the test, with a configuration of its own and nothing outside its folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support.wait import until_sync

CONFIG = """
daemon off;
master_process off;
error_log {folder}/error.log info;
pid {folder}/pid;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    default_type text/html;
    proxy_connect_timeout 5s;
    proxy_read_timeout 20s;
    server {{
        listen 127.0.0.1:{port};
        root {folder}/pages;
        {server}
    }}
}}
"""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


class Nginx:
    """nginx with ``server`` as the body of its server block; ``pages`` are files under its root."""

    def __init__(self, folder: Path, server: str, pages: dict[str, str] | None = None) -> None:
        found = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
        if found is None:
            pytest.fail("nginx is not installed: apt-get install nginx (.ci/run does)")
        self._program = found
        self._folder = folder
        self._server = server
        (folder / "pages").mkdir()
        for name, text in (pages or {}).items():
            (folder / "pages" / name).write_text(text)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        for _ in range(5):  # another program may take the port between its choice and nginx's start
            self.port = free_port()
            config = self._folder / "nginx.conf"
            config.write_text(CONFIG.format(folder=self._folder, port=self.port, server=self._server))
            errors = self._folder / "error.log"
            self._process = subprocess.Popen(
                [self._program, "-p", str(self._folder), "-c", str(config), "-e", str(errors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            until_sync(lambda: self._process.poll() is not None or self._answers(), what="nginx listens")
            if self._process.poll() is None:
                return self
            said = errors.read_text() if errors.exists() else "nothing"
            if "Address already in use" not in said:
                pytest.fail(f"nginx did not start: {said}")
        pytest.fail("nginx found no free port in five attempts")

    def _answers(self) -> bool:
        with socket.socket() as asked:
            return asked.connect_ex(("127.0.0.1", self.port)) == 0

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
