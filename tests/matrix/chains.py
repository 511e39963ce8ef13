"""Chains: one failure through several boundaries of different kinds, each far side calling the next.

``go(("ray", "http", "child"), shape)`` calls a Ray task, which asks an HTTP server, whose handler starts a
child process, which fails with that shape. What arrives at the start of the chain is raised there.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import httpx
import ray
from aiohttp import web

from faults import name_of
from protocol import coded
from protocol.carriers.error_file import failure_of
from protocol.carriers.http_middleware import problem_middleware
from protocol.carriers.http_reply import error_from_reply
from tests.matrix.shapes import fail
from tests.protocol.http.servers import Application

ADDRESS: Final = "FAILSOFT_TEST_RAY"
"""Environment variable: the cluster that a process of a chain, which is no worker of it, connects to."""
HOP: Final = 60.0

Chain = tuple[str, ...]


@coded(name=name_of)
def go(chain: Chain, shape: str) -> None:
    """Cross the first boundary of ``chain``, and from its far side the others; then fail."""
    if not chain:
        fail(shape)
    KINDS[chain[0]](chain[1:], shape)


def through_ray(rest: Chain, shape: str) -> None:
    if not ray.is_initialized():
        ray.init(address=os.environ[ADDRESS], log_to_driver=False, logging_level="ERROR")
    ray.get(ray.remote(go).options(num_cpus=0, max_retries=0).remote(rest, shape), timeout=HOP)


def through_pool(rest: Chain, shape: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(go, rest, shape).result(HOP)


def through_child(rest: Chain, shape: str) -> None:
    with tempfile.TemporaryDirectory(prefix="failsoft-chain-") as folder:
        path = Path(folder) / "failure"
        command = [sys.executable, "-m", "protocol.carriers.child", "--error-file", str(path)]
        done = subprocess.run(
            [*command, "-m", "tests.matrix.child", shape, *rest], capture_output=True, timeout=HOP
        )
        error = failure_of(done.returncode, path)
        assert error is not None
        raise error


def through_http(rest: Chain, shape: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.to_thread(go, rest, shape)
        raise AssertionError("it fails")

    app = web.Application(middlewares=[problem_middleware(name=name_of)])
    app.router.add_get("/", handler)
    with Application(app) as server:
        reply = httpx.get(server.url, timeout=HOP)
    raise error_from_reply(reply.status_code, reply.headers, reply.content)


KINDS: Final[dict[str, Callable[[Chain, str], None]]] = {
    "ray": through_ray,
    "pool": through_pool,
    "child": through_child,
    "http": through_http,
}
