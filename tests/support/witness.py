"""A witness: an HTTP server in its own process that counts what really arrives, and misbehaves on request.

``POST /<behaviour>?<parameters>`` on the work port; ``GET /counts`` and ``POST /reset`` on a control port
of its own, so that the control connections are never among those that it counts. It runs apart from the
test's event loop, which therefore cannot starve it: what it counts is what a server sees.

What it calls in flight are its handlers, and a handler learns that its client has hung up a moment after the
kernel has, or only begins then. So the peak is counted by the kernel's word: of the requests that are being
handled, those whose connection still stands.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]
ESTABLISHED = 1
"""The state, in tcp_info, of a connection that neither end has closed (enum in linux/tcp_states.h)."""
Behaviour = Callable[["Ledger", web.Request, bytes], Awaitable[web.StreamResponse]]


def stands(connection: asyncio.Transport) -> bool:
    """Whether neither end has closed it, as far as the kernel knows (tcp(7), TCP_INFO)."""
    try:
        state = connection.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:  # this end has closed it, and the descriptor with it
        return False
    return bool(state[0] == ESTABLISHED)


class Ledger:
    """What arrived, by X-Request-Id, and what is in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._connections: set[asyncio.Transport] = set()
        self.reset()

    @contextlib.contextmanager
    def handling(self, connection: asyncio.Transport | None) -> Iterator[None]:
        """One request is in flight meanwhile; ``connection`` is None where it was lost already."""
        self.in_flight += 1
        if connection is not None:
            self._connections.add(connection)
        if self.in_flight > self.peak:
            self.peak = max(self.peak, self._standing())
        try:
            yield
        finally:
            self.in_flight -= 1
            if connection is not None:
                self._connections.remove(connection)

    def reset(self) -> None:
        """Forget everything but what is in flight."""
        self.arrived: Counter[str] = Counter()
        self.disconnected: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.peak = self._standing()
        self.times: dict[str, list[float]] = {}

    def as_json(self, connections: int) -> dict[str, Any]:
        return {
            "arrived": self.arrived,
            "disconnected": self.disconnected,
            "finished": self.finished,
            "in_flight": self.in_flight,
            "peak": self.peak,
            "times": self.times,
            "connections": connections,
        }

    def _standing(self) -> int:
        return sum(map(stands, self._connections))


def _number(request: web.Request, name: str, default: float) -> float:
    return float(request.query.get(name, default))


def _hang_up(request: web.Request, *, abort: bool = False) -> None:
    assert request.transport is not None
    if abort:
        request.transport.abort()  # type: ignore[attr-defined]
    else:
        request.transport.close()


async def _gone() -> web.StreamResponse:
    # The connection is closed; the handler is cancelled as soon as the server notices.
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def ok(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.sleep(_number(request, "delay", 0.0))
    return web.json_response({"ok": True, "id": request.headers.get("X-Request-Id"), "bytes": len(body)})


async def echo(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    headers = [[name.lower(), value] for name, value in request.headers.items()]
    return web.json_response({"headers": headers, "body": body.decode("latin-1")})


async def status(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    code = int(_number(request, "status", 500))
    headers = {k[2:]: v for k, v in request.query.items() if k.startswith("h-")}
    text = request.query.get("body", f"status {code}") * int(_number(request, "times", 1))
    return web.Response(status=code, text=text, headers=headers)


async def repeats(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """Refuses with what it refuses in the reason, as FastAPI does: ``status`` 422, or any other."""
    reason = {"type": "missing", "msg": "Field required", "input": json.loads(body)}
    told = {"detail": [reason], "message": str([reason])}
    return web.json_response(told, status=int(_number(request, "status", 422)))


async def retry_after(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """429 or 503 with Retry-After as seconds, as a date, or as nonsense; succeeds at the second arrival."""
    if ledger.arrived[request.headers.get("X-Request-Id", "")] > 1:
        return web.json_response({"ok": True})
    seconds = _number(request, "seconds", 1.0)
    value = {
        "seconds": f"{seconds:g}",
        "date": formatdate(time.time() + seconds, usegmt=True),
        "nonsense": "soon, I promise",
    }[request.query.get("form", "seconds")]
    return web.Response(
        status=int(_number(request, "status", 429)), text="busy", headers={"Retry-After": value}
    )


async def flaky(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """The first ``fails`` arrivals of an id fail as ``how`` says, the later ones succeed."""
    if ledger.arrived[request.headers.get("X-Request-Id", "")] <= _number(request, "fails", 1):
        return await BEHAVIOURS[request.query.get("how", "status")](ledger, request, body)
    return web.json_response({"ok": True})


async def limited(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """429 for whatever comes while more than ``capacity`` are here already."""
    if ledger.in_flight > _number(request, "capacity", 4):
        return web.json_response({"error": "too many"}, status=429)
    return await ok(ledger, request, body)


async def stuck(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """The first time that an id comes, nothing happens; the next time it is answered at once."""
    if ledger.arrived[request.headers.get("X-Request-Id", "")] == 1:
        return await hang(ledger, request, body)
    return await ok(ledger, request, body)


async def html(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(text="<html>hello</html>", content_type="text/html")


async def raw(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """The query's ``body`` as the reply's, as application/json."""
    return web.Response(text=request.query.get("body", ""), content_type="application/json")


async def cut(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """A Content-Length that the body does not reach."""
    response = web.StreamResponse(
        status=int(_number(request, "status", 200)), headers={"Content-Type": "application/json"}
    )
    response.content_length = 10_000
    await response.prepare(request)
    await response.write(b'{"begun": ')
    _hang_up(request)
    return await _gone()


async def close(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    _hang_up(request, abort="abort" in request.query)
    return await _gone()


async def garbage(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """What is no HTTP at all."""
    assert request.transport is not None
    request.transport.write(request.query.get("text", "garbage").encode() + b"\r\n\r\n")  # type: ignore[attr-defined]
    _hang_up(request)
    return await _gone()


async def bad_gzip(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(
        status=int(_number(request, "status", 200)),
        body=b"not gzip at all",
        headers={"Content-Encoding": "gzip"},
    )


async def hang(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.sleep(600)
    return web.json_response({"ok": True})


async def slow(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """A byte a second, for ever."""
    response = web.StreamResponse(status=int(_number(request, "status", 200)))
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(_number(request, "every", 1.0))


async def big(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """A JSON string of ``size`` bytes."""
    return web.Response(
        text=json.dumps("x" * int(_number(request, "size", 1e6))), content_type="application/json"
    )


async def early(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """Answers, and closes the kept-alive connection ``ms`` later, whatever is on it by then."""
    transport = request.transport
    assert transport is not None
    asyncio.get_running_loop().call_later(_number(request, "ms", 20) / 1000, transport.close)
    return web.json_response({"ok": True})


async def sse(ledger: Ledger, request: web.Request, body: bytes) -> web.StreamResponse:
    """Three events; then the end, an error event, nonsense, or a silent close, as ``end`` says."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b": a comment\n\nid: 7\n")
    for n in range(3):
        await response.write(f"data: {json.dumps({'n': n})}\n\n".encode())
    end = request.query.get("end", "done")
    if end == "error":
        await response.write(b'data: {"error": {"message": "engine fell over"}}\n\ndata: [DONE]\n\n')
    elif end == "nonsense":
        await response.write(b"data: {nonsense\n\ndata: [DONE]\n\n")
    elif end == "done":
        await response.write(b"data: [DONE]\n\n")
    elif end == "cut":
        _hang_up(request)
        return await _gone()
    return response


BEHAVIOURS: dict[str, Behaviour] = {
    f.__name__: f
    for f in (
        ok, echo, status, repeats, retry_after, flaky, html, raw, cut, close, garbage, bad_gzip, hang, slow,
        big, early, sse, limited, stuck,
    )
}  # fmt: skip


async def serve(port: int) -> None:
    """Serve until the standard input ends: the witness goes with the test that started it."""
    ledger = Ledger()

    async def work(request: web.Request) -> web.StreamResponse:
        id = request.headers.get("X-Request-Id", "")
        ledger.arrived[id] += 1
        ledger.times.setdefault(id, []).append(time.time())
        with ledger.handling(request.transport):
            try:
                body = await request.read()
                response = await BEHAVIOURS[request.match_info["behaviour"]](ledger, request, body)
            except (asyncio.CancelledError, ConnectionError):
                ledger.disconnected[id] += 1
                raise
            else:
                ledger.finished[id] += 1
                return response

    app = web.Application(client_max_size=256 * 1024 * 1024)
    app.router.add_post("/{behaviour}", work)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    await site.start()

    async def counts(request: web.Request) -> web.Response:
        assert runner.server is not None
        return web.json_response(ledger.as_json(len(runner.server.connections)))

    async def reset(request: web.Request) -> web.Response:
        ledger.reset()
        return web.Response()

    control = web.Application()
    control.router.add_get("/counts", counts)
    control.router.add_post("/reset", reset)
    control_runner = web.AppRunner(control, access_log=None)
    await control_runner.setup()
    control_site = web.TCPSite(control_runner, "127.0.0.1", 0)
    await control_site.start()
    ports = [s._server.sockets[0].getsockname()[1] for s in (site, control_site)]  # type: ignore[union-attr]
    print(*ports, flush=True)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: sys.stdin.buffer.read1() or ended.set())  # type: ignore[union-attr]
    await ended.wait()


class Witness:
    """A witness process, seen from the test. Use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.witness"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port, self._control = (int(word) for word in self._process.stdout.readline().split())
        self.base = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def url(self, behaviour: str, query: str = "") -> str:
        return f"{self.base}/{behaviour}{'?' + query if query else ''}"

    def counts(self) -> dict[str, Any]:
        return self._ask("GET", "/counts")

    def arrivals(self, id: str) -> int:
        return int(self.counts()["arrived"].get(id, 0))

    def reset(self) -> None:
        self._ask("POST", "/reset")

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait(10)

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._control, timeout=20)
        try:
            connection.request(method, path, headers={"Connection": "close"})
            body = connection.getresponse().read()
        finally:
            connection.close()
        return dict(json.loads(body)) if body else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="the work port; 0 for any")
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
