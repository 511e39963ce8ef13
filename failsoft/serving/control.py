"""What a running fleet answers on its socket: how it stands, and three orders.

``GET /status`` · ``POST /drain {"key", "timeout"}``, answered when that engine is down · ``POST /restart``
with the same, answered when it is ready again · ``POST /down {"timeout"}``, answered when all of them are
down. HTTP over a Unix socket, so that curl can ask as well.
Failures are problem documents (`protocol.carriers.http_problem`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web

from dispatch.engines.spec import EngineStatus
from failsoft.serving import LONGEST
from protocol import CodedError
from protocol.carriers.http_problem import problem

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]


class Engine(EngineStatus, frozen=True, kw_only=True):
    """One engine and what its file calls it."""

    name: str = ""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a fleet stands. ``pid`` and ``create_time`` (unix seconds) name the process that keeps it;
    ``since`` is when that began, in unix seconds too. ``ray`` is the cluster's address, empty while Ray
    starts. ``failures`` are the failures of its end."""

    name: str
    file: str
    state: Literal["starting", "running", "stopping"]
    pid: int
    create_time: float
    since: float
    ray: str = ""
    engines: tuple[Engine, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all of its engines may be used."""
        return bool(self.engines) and all(engine.routable for engine in self.engines)


class EngineOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``key``: the engine's key or name. ``timeout``: seconds in which it has to be done; None: the
    spec's deadlines added up."""

    key: str
    timeout: Seconds | None = None


class DownOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``timeout``: seconds after which engines that are still there are killed; None: their own."""

    timeout: Seconds | None = None


class Controlled(Protocol):
    """What is controlled."""

    def status(self) -> FleetStatus: ...

    async def drain(self, order: EngineOrder) -> None:
        """Raises CodedError."""

    async def restart(self, order: EngineOrder) -> None:
        """Raises CodedError."""

    async def down(self, order: DownOrder) -> None:
        """Returns when every engine is stopped, or was tried to be."""


_Order = TypeVar("_Order", EngineOrder, DownOrder)


@asynccontextmanager
async def listening(service: Controlled, path: Path) -> AsyncIterator[None]:
    """Answer on the socket ``path`` meanwhile."""

    def answer(status: FleetStatus) -> web.Response:
        return web.Response(body=msgspec.json.encode(status), content_type="application/json")

    async def status(request: web.Request) -> web.Response:
        return answer(service.status())

    async def drain(request: web.Request) -> web.Response:
        await service.drain(await _order(request, EngineOrder))
        return answer(service.status())

    async def restart(request: web.Request) -> web.Response:
        await service.restart(await _order(request, EngineOrder))
        return answer(service.status())

    async def down(request: web.Request) -> web.Response:
        await service.down(await _order(request, DownOrder))
        return answer(service.status())

    app = web.Application(middlewares=[_named])
    app.add_routes([web.get("/status", status)])
    app.add_routes([web.post("/drain", drain), web.post("/restart", restart), web.post("/down", down)])
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()


@web.middleware
async def _named(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    # Not protocol's middleware, which logs what it answers: a mistyped key is the asker's affair.
    try:
        return await handler(request)
    except CodedError as exc:
        made = problem(exc)
        return web.Response(status=made.status, headers=made.headers, body=made.body)


async def _order(request: web.Request, kind: type[_Order]) -> _Order:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.DecodeError as exc:  # ValidationError is one
        raise CodedError("REQUEST.INVALID", f"{request.method} {request.path}: {exc}") from exc
