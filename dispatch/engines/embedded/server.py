"""The engine as an HTTP server: its generation endpoints, its errors and its routes.

The handlers run with aiohttp's `handler_cancellation`: a lost connection cancels its handler, which leaves
the `submitted` block and so aborts the request. Every error has a JSON body in its endpoint's dialect.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from aiohttp import web

from dispatch.engines.embedded import control, misbehave
from dispatch.engines.embedded.dialects import Dialect, OpenAI, Refusal, Sglang
from dispatch.engines.embedded.engine import ENGINE, Engine
from dispatch.engines.embedded.replies import json_response, serve
from dispatch.engines.embedded.witness import Visit

MAX_BODY_BYTES = 1 << 20
"""A larger body is a 413; at one token a character it would be far beyond any input limit."""

SGLANG = Sglang()
OPENAI = OpenAI()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def generation_endpoint(dialect: Dialect) -> Handler:
    """The handler of one generation endpoint: count it, read it, run it, and say what went wrong."""

    async def handle(request: web.Request) -> web.StreamResponse:
        engine = request.app[ENGINE]
        with engine.witness.visit() as visit:
            try:
                return await _answer(engine, request, visit, dialect)
            except Refusal as refusal:
                if visit.outcome != "faulted":
                    visit.outcome, visit.label = "refused", str(refusal.status)
                return json_response(
                    dialect.error(refusal.status, refusal.message), refusal.status, refusal.headers
                )
            except web.HTTPRequestEntityTooLarge as error:
                visit.outcome, visit.label = "refused", "413"
                return json_response(dialect.error(413, error.text or error.reason), 413)
            except ConnectionResetError:
                # The client left while it was written to; there is nobody to answer.
                return web.Response()
            finally:
                if engine.settings.log_requests:
                    print(
                        f"{request.path} {visit.request_id!r} {visit.outcome} {visit.label}",
                        file=sys.stderr,
                        flush=True,
                    )

    return handle


async def _answer(engine: Engine, request: web.Request, visit: Visit, dialect: Dialect) -> web.StreamResponse:
    header = request.headers.get("X-Request-Id")
    raw = await request.read()
    try:
        order = dialect.read(raw)
    except Refusal:
        engine.witness.arrive(visit, header)
        raise
    engine.witness.arrive(visit, header or order.rid)
    engine.require_open()
    ticket = engine.ticket(request, visit, dialect, order)
    if engine.faults.armed:
        prompt = order.prompt if isinstance(order.prompt, str) else engine.vocabulary.decode(ticket.ids)
        spec = engine.faults.take(prompt, order.stream)
        if spec is not None:
            return await misbehave.act(spec, engine.faults, ticket)
    return await serve(ticket)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON everywhere: refusals of the control endpoints, unknown paths, wrong methods, bugs."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return json_response(SGLANG.error(refusal.status, refusal.message), refusal.status, refusal.headers)
    except web.HTTPException as error:
        kept = {name: value for name, value in error.headers.items() if name == "Allow"}
        return json_response(SGLANG.error(error.status, error.reason), error.status, kept)
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001  the last stop of a server: a bug becomes a named 500
        print(f"embedded engine: {request.path}: {error!r}", file=sys.stderr, flush=True)
        return json_response(SGLANG.error(500, f"internal error: {error!r}"), 500)


def make_app(engine: Engine) -> web.Application:
    """The application with every route. `/faults` exists only where the flag allowed it."""
    app = web.Application(middlewares=[json_errors], client_max_size=MAX_BODY_BYTES)
    app[ENGINE] = engine
    app.router.add_post("/generate", generation_endpoint(SGLANG))
    app.router.add_post("/v1/completions", generation_endpoint(OPENAI))
    control.add_routes(app, faults=engine.settings.faults)
    return app
