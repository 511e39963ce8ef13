"""Servers for the tests of HTTP: an aiohttp application, and a socket that writes the bytes it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Script = Callable[[str, bytes], Iterable[bytes]]
"""From a request's path and its head to the pieces of the reply, after which the connection is closed."""


class Wire:
    """A server that writes just the bytes of its script, whatever HTTP thinks of them, and counts those
    that the kernel took."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.sent = 0
        self.idle = threading.Event()
        self._accepting = threading.Thread(target=self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed: the test is over
                return
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        self.idle.clear()
        connection.settimeout(20)
        with connection, contextlib.suppress(OSError):  # the client went away: that is what is tested
            head = b""
            while b"\r\n\r\n" not in head:
                piece = connection.recv(65536)
                if not piece:
                    return
                head += piece
            for piece in self._script(head.split(b" ")[1].decode(), head):
                connection.sendall(piece)
                self.sent += len(piece)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(2)
            while connection.recv(65536):  # closing over unread bytes would be a reset
                pass
        self.idle.set()

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
        self._listener.close()
        self._accepting.join(30)
        assert not self._accepting.is_alive()


class Application:
    """An aiohttp application on a loop and a thread of its own."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _start(self) -> None:
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]  # aiohttp has no public way

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def plain(body: bytes, *, status: int = 500, length: int | None = None, **headers: str) -> bytes:
    """A whole reply on the wire, with a Content-Length that may lie."""
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status} Said\r\n{named}Content-Length: {length}\r\n\r\n".encode() + body


def chunked(body: bytes, *, size: int = 64, status: int = 500, **headers: str) -> bytes:
    """The same, chunked."""
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    out = f"HTTP/1.1 {status} Said\r\n{named}Transfer-Encoding: chunked\r\n\r\n".encode()
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        out += f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    return out + b"0\r\n\r\n"


def asgi(app: Any) -> Callable[[web.Request], Any]:
    """An ASGI application as a handler of aiohttp's: what an ASGI server does, over a real socket."""

    async def handler(request: web.Request) -> web.StreamResponse:
        scope = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
        }
        response: web.StreamResponse | None = None

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await request.read(), "more_body": False}

        async def send(message: Any) -> None:
            nonlocal response
            if message["type"] == "http.response.start":
                assert response is None, "a second start"
                response = web.StreamResponse(status=message["status"])
                for name, value in message["headers"]:
                    response.headers.add(name.decode(), value.decode())
                await response.prepare(request)
            else:
                assert response is not None
                await response.write(message.get("body", b""))

        try:
            await app(scope, receive, send)
        except Exception:
            if response is None:
                raise
            assert request.transport is not None
            request.transport.close()  # begun: all that a server can do is to break it off
        assert response is not None
        return response

    return handler
