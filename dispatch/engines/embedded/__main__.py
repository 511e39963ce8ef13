"""`python -m dispatch.engines.embedded`: bind, train, serve, and end well on SIGTERM or SIGINT.

The port is bound first, so that a taken port is known before any work is done and so that `/health` can say
503 while the model is trained; `listening on HOST:PORT` is printed once requests are served. On a signal the
server stops accepting, ends everything in flight as aborted with HTTP 200, and exits with status 0.
"""

import asyncio
import contextlib
import errno
import os
import signal
import sys

from aiohttp import web

from dispatch.engines.embedded import settings as flags
from dispatch.engines.embedded.engine import Engine
from dispatch.engines.embedded.litter import Litter, Litterer
from dispatch.engines.embedded.ngram import BadModel
from dispatch.engines.embedded.server import make_app

HANDLER_GRACE = 0.4
"""Seconds an open handler gets to send its last bytes after a signal. aiohttp spends it up to twice, which
keeps the whole exit under a second."""

BACKLOG = 1024
"""Connections the kernel holds before accept: enough that a burst of clients is queued by the engine, which
can say 503, and not dropped by the kernel, which can't."""


async def serve(settings: flags.Settings, litter: Litter | None = None) -> int:
    """Run the engine until a signal; the process's exit status."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    engine = Engine.make(settings, litter)
    runner = web.AppRunner(
        make_app(engine), handler_cancellation=True, access_log=None, shutdown_timeout=HANDLER_GRACE
    )
    await runner.setup()
    work = asyncio.create_task(engine.scheduler.run())
    opening = asyncio.create_task(_open(engine, runner))
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({opening, work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done() and opening.result() != 0:
            return opening.result()
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return _complain(f"the scheduler failed: {work.exception()!r}", 1)
        return 0
    finally:
        opening.cancel()
        engine.close()
        await runner.cleanup()
        for task in (opening, work, stopped):
            task.cancel()
        await asyncio.gather(opening, work, stopped, return_exceptions=True)


async def _open(engine: Engine, runner: web.AppRunner) -> int:
    """Bind, train, announce; 0, or the exit status of what went wrong."""
    settings = engine.settings
    site = web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG)
    try:
        await site.start()
    except OSError as error:
        return _cannot_listen(f"{settings.host}:{settings.port}", error)
    try:
        model = await engine.train(engine.model_path)
    except BadModel as error:
        return _complain(str(error), flags.EXIT_USAGE)
    await asyncio.sleep(settings.start_delay)
    engine.scheduler.install(model, settings.weight_version)
    engine.ready = True
    host, port = runner.addresses[0][:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # Written past the buffer: a reader that is gone must not cost the engine its life at exit.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"listening on {where}\n".encode())
    return 0


def _cannot_listen(where: str, error: OSError) -> int:
    if error.errno == errno.EADDRINUSE:
        return _complain(f"address {where} is already in use", flags.EXIT_ADDRESS_IN_USE)
    return _complain(f"can't listen on {where}: {error.strerror or error}", 1)


def _complain(message: str, status: int) -> int:
    print(f"embedded engine: {message}", file=sys.stderr, flush=True)
    return status


def main() -> int:
    settings = flags.parse()
    if not settings.litter:
        return asyncio.run(serve(settings))
    try:
        litterer = Litterer(settings.host, settings.litter_port)
    except OSError as error:
        return _cannot_listen(f"{settings.host}:{settings.litter_port}", error)
    try:
        return asyncio.run(serve(settings, litterer.litter))
    finally:
        litterer.clear()


if __name__ == "__main__":
    sys.exit(main())
