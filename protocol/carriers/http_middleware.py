"""Over HTTP, in front of an application: what escapes a handler becomes the reply that names it.

`ProblemMiddleware` is pure ASGI, for Ray Serve, FastAPI and Starlette (``app.add_middleware(
ProblemMiddleware)``); `problem_middleware` is aiohttp's. Neither imports a web framework before it is
used. A reply that has begun cannot be replaced: then the exception goes on to the server, which breaks
the connection off, and the client sees a body that is cut.

The server never sees an exception that was turned into a reply, so it is logged here, once, by the
stdlib logger ``failsoft``. Cancellation is not an exception in this sense and passes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from protocol.boundary import Namer
from protocol.carriers.http_problem import Problem, problem
from protocol.carriers.http_reply import HEADER

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_log = logging.getLogger("failsoft")


class ProblemMiddleware:
    """An ASGI application around ``app``. ``name`` names exceptions that have no code
    (`faults.name_of`)."""

    def __init__(self, app: App, *, name: Namer | None = None) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as exc:  # whatever escapes becomes the reply, and is logged
            if begun:
                raise
            made = _made(exc, self._name)
            headers = [(key.encode("ascii"), value.encode("ascii")) for key, value in made.headers.items()]
            headers.append((b"content-length", str(len(made.body)).encode("ascii")))
            await send({"type": "http.response.start", "status": made.status, "headers": headers})
            await send({"type": "http.response.body", "body": made.body})


def problem_middleware(*, name: Namer | None = None) -> Middleware:
    """A middleware for ``aiohttp.web.Application(middlewares=[...])``, the first of the list. aiohttp's
    own HTTPException is a reply and passes. ``name`` as in `ProblemMiddleware`."""
    from aiohttp import web

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except Exception as exc:  # whatever escapes becomes the reply, and is logged
            if request.writer.output_size > 0:
                raise
            made = _made(exc, name)
            return web.Response(status=made.status, headers=made.headers, body=made.body)

    return middleware


def _made(exc: Exception, name: Namer | None) -> Problem:
    made = problem(exc, name=name)
    _log.error("a request ended as %d %s", made.status, made.headers[HEADER], exc_info=exc)
    return made
