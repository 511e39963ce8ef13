"""The columns: ways from where a failure is raised to where it is read, each crossed for real.

A crossing takes the name of a shape, has it raised on the far side (named there by `coded`), and returns
what the near side holds: an exception, a response, a line of text.
"""

from __future__ import annotations

import asyncio
import html
import json
import pickle
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx
import ray
from aiohttp import web

from faults import name_of
from protocol import Events, Trust, coded, keys
from protocol.carriers.error_file import failure_of
from protocol.carriers.http_middleware import problem_middleware
from tests.matrix.shapes import fail, failure
from tests.protocol.http.proxies import Nginx
from tests.protocol.http.servers import Application

RUN: Final = "matrix"
CUT: Final = 2048
"""Bytes that a log shipper leaves of a line."""


class Boundary(NamedTuple):
    """How it is crossed, and how far what is read on the near side may be believed."""

    cross: Callable[[str], Awaitable[object]]
    trust: Trust


@ray.remote(max_retries=0, num_cpus=0)
def task(shape: str) -> None:
    fail(shape)


@coded(name=name_of)
class Failing:
    """The same methods for a sync and for a threaded actor."""

    def run(self, shape: str) -> None:
        fail(shape)

    def stream(self, shape: str) -> Iterator[int]:
        yield 1
        fail(shape)


@coded(name=name_of)
class FailingAsync:
    """With ``below``, it asks another one."""

    def __init__(self, below: Any = None) -> None:
        self._below = below

    async def run(self, shape: str) -> None:
        if self._below is None:
            fail(shape)
        await self._below.run.remote(shape)


@coded(name=name_of)
class FailsAtInit:
    """A trusted role: it holds the run's key, so that the one text that Ray keeps is signed."""

    def __init__(self, shape: str) -> None:
        keys.hold(asyncio.run(keys.fetch(RUN)))
        fail(shape)

    def run(self) -> None:
        raise AssertionError("it never starts")


def text_without_a_key(shape: str) -> str:
    """What an engine's process, which has no key, makes of a failure."""
    assert keys.held() is None
    return str(failure(shape))


async def caught(awaitable: Awaitable[object]) -> BaseException:
    """The exception that it raises."""
    try:
        await awaitable
    except Exception as exc:  # noqa: BLE001 - whatever arrives is what is looked at
        return exc
    raise AssertionError("nothing was raised")


class Crossings:
    """The far sides, started once: actors, a pool of processes, servers. Needs Ray and the run's key."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._runs = 0
        self._pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        app = web.Application(middlewares=[problem_middleware(name=name_of)])
        app.router.add_get("/fail", self._fail)
        app.router.add_get("/engine", self._engine)
        self._server = stack.enter_context(Application(app))
        replaces = (
            f"location / {{ proxy_pass {self._server.url}; proxy_intercept_errors on;"
            " error_page 500 501 502 503 504 507 @page; }"
            " location @page { add_header x-failsoft-code $upstream_http_x_failsoft_code always;"
            " try_files /50x.html =500; }"
        )
        pages = {"50x.html": "<html><h1>An error occurred</h1></html>"}
        (folder / "nginx").mkdir()
        self._nginx = stack.enter_context(Nginx(folder / "nginx", replaces, pages))
        plain, threaded = ray.remote(Failing), ray.remote(Failing).options(max_concurrency=4)
        self._sync, self._threaded = plain.options(num_cpus=0).remote(), threaded.remote()
        asynchronous: Any = ray.remote(FailingAsync).options(num_cpus=0)
        self._async = asynchronous.remote()
        self._hops = asynchronous.remote(asynchronous.remote(asynchronous.remote()))

    def all(self) -> dict[str, Boundary]:
        """Every boundary, by its name."""
        structured, signed = Trust.STRUCTURED, Trust.SIGNED
        return {
            "same process": Boundary(lambda s: caught(self._here(s)), structured),
            "pickle, all protocols": Boundary(self._pickled, structured),
            "process pool": Boundary(lambda s: caught(self._in_pool(s)), structured),
            "child process, error file": Boundary(self._child, structured),
            "Ray task": Boundary(lambda s: caught(task.remote(s)), structured),
            "Ray sync actor": Boundary(lambda s: caught(self._sync.run.remote(s)), structured),
            "Ray threaded actor": Boundary(lambda s: caught(self._threaded.run.remote(s)), structured),
            "Ray async actor": Boundary(lambda s: caught(self._async.run.remote(s)), structured),
            "Ray actor `__init__`": Boundary(lambda s: caught(self._at_init(s)), signed),
            "Ray streaming generator": Boundary(lambda s: caught(self._streamed(s)), structured),
            "Ray, three hops": Boundary(lambda s: caught(self._hops.run.remote(s)), structured),
            "HTTP problem+json": Boundary(lambda s: self._get(f"{self._server.url}/fail", s), signed),
            "nginx that replaces the body": Boundary(
                lambda s: self._get(f"{self._nginx.url}/fail", s), signed
            ),
            "vLLM's error JSON": Boundary(
                lambda s: self._get(f"{self._server.url}/engine", s), Trust.CHECKSUMMED
            ),
            "event in a log": Boundary(self._event, structured),
            "its first 2048 bytes": Boundary(self._first_bytes, Trust.HEURISTIC),
            "its last 2048 bytes": Boundary(self._last_bytes, signed),
            "Ray worker's log": Boundary(self._worker_log, signed),
            "repr, HTML and URL escapes": Boundary(self._escaped, signed),
        }

    async def _here(self, shape: str) -> None:
        fail(shape)

    async def _pickled(self, shape: str) -> object:
        error: Any = failure(shape)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(error, protocol))
            assert again == error
            error = again
        return error

    async def _in_pool(self, shape: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, fail, shape)

    async def _child(self, shape: str) -> object:
        self._runs += 1
        path = self._folder / f"failure-{self._runs}"
        command = [sys.executable, "-m", "protocol.carriers.child", "--error-file", str(path)]
        done = await asyncio.to_thread(
            subprocess.run, [*command, "-m", "tests.matrix.child", shape], capture_output=True, timeout=60
        )
        return failure_of(done.returncode, path)

    async def _at_init(self, shape: str) -> None:
        await ray.remote(FailsAtInit).options(num_cpus=0).remote(shape).run.remote()

    async def _streamed(self, shape: str) -> None:
        got = [await ref async for ref in self._sync.stream.options(num_returns="streaming").remote(shape)]
        raise AssertionError(f"the stream ended with {got}")

    async def _fail(self, request: web.Request) -> web.Response:
        fail(request.query["shape"])
        raise AssertionError

    async def _engine(self, request: web.Request) -> web.Response:
        text = await asyncio.get_running_loop().run_in_executor(
            self._pool, text_without_a_key, request.query["shape"]
        )
        message = f"Call to collective_rpc method failed: Worker failed with error '{text}'"
        error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        return web.json_response({"error": error}, status=500)

    async def _get(self, url: str, shape: str) -> object:
        async with httpx.AsyncClient(timeout=30) as client:
            return await client.get(url, params={"shape": shape})

    async def _event(self, shape: str) -> object:
        path = self._folder / "events.jsonl"
        path.unlink(missing_ok=True)
        with Events.to_file(path, run=RUN, role="matrix") as events:
            events.emit("engine.died", level="error", error=failure(shape), key="engine/0", filler="x" * CUT)
        return path.read_text()

    async def _first_bytes(self, shape: str) -> object:
        return str(await self._event(shape)).encode()[:CUT].decode("utf-8", "replace")

    async def _last_bytes(self, shape: str) -> object:
        return str(await self._event(shape)).encode()[-CUT:].decode("utf-8", "replace")

    async def _worker_log(self, shape: str) -> object:
        printed = "".join(traceback.format_exception(failure(shape), chain=False))
        prefix = "\x1b[36m(Rollout pid=4711, ip=10.0.0.2)\x1b[0m "
        return "".join(f"{prefix}{line}\n" for line in printed.splitlines())

    async def _escaped(self, shape: str) -> object:
        return quote(html.escape(json.dumps(repr(repr(f"failed:\n{failure(shape)}\n")))))


@contextmanager
def crossings(folder: Path) -> Iterator[dict[str, Boundary]]:
    """The boundaries, ready to be crossed; Ray must run. The process holds the run's key meanwhile."""
    with ExitStack() as stack:
        keeper = keys.start_keeper(RUN)
        stack.callback(ray.kill, keeper)
        keys.hold(asyncio.run(keys.fetch(RUN)))
        stack.callback(keys.hold, None)
        yield Crossings(folder, stack).all()
