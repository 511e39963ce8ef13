"""Asking a running fleet: its status, a drain, its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from dispatch.engines.config import read_engines
from dispatch.processes import is_alive, until
from failsoft.serving.control import FleetStatus
from failsoft.serving.place import answers, socket_of, sockets
from protocol import CodedError
from protocol.carriers.http_reply import error_from_reply

ANSWER: Final = 20.0
"""Seconds for an answer. A fleet whose Ray is just starting does nothing else for some of them."""
GONE: Final = 60.0
"""Seconds within which the fleet's process must have ended once its engines have: Ray's own end."""
_EVERY: Final = 0.3
"""Seconds between two looks while something goes on."""


class NobodyRuns(Exception):
    """No fleet of that name runs; the text says it, with the remedy."""


def find(which: str | None) -> Path:
    """The socket of a fleet by its name or its engines file; None: the one fleet that runs.

    Raises NobodyRuns, and CodedError CONFIG.* for a bad file or when it is not clear which one."""
    if which is not None:
        named = not which.endswith(".toml") and not os.path.isfile(which)
        name = which if named else read_engines(which).fleet.name
        path = None if "/" in name or "\0" in name else socket_of(name)
        if path is None:
            raise NobodyRuns(f"no fleet {name!r} runs; `failsoft engines up FILE` starts one")
        return path
    found = {name: path for name, path in sockets().items() if answers(path)}
    if not found:
        raise NobodyRuns("no fleet runs; `failsoft engines up FILE` starts one")
    if len(found) > 1:
        raise CodedError(
            "CONFIG.INVALID", f"several fleets run, name one of them: {', '.join(sorted(found))}"
        )
    return next(iter(found.values()))


class Asking:
    """A client of the fleet at a socket. Every method raises NobodyRuns when nobody listens there, and
    CodedError: what the fleet says is wrong, or TIMEOUT.READ when it says nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The host is never looked up; it only has to be one.
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://fleet", timeout=ANSWER
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def status(self) -> FleetStatus:
        """How the fleet stands now."""
        return await self._ask("GET", "/status", ANSWER)

    async def drain(
        self, key: str, timeout: float | None, watch: Callable[[FleetStatus], None]
    ) -> FleetStatus:
        """Drain one engine (its key or name), which has to be down after ``timeout`` seconds; how the fleet
        stands then. ``watch`` is told meanwhile."""
        return await self._order("/drain", {"key": key, "timeout": timeout}, watch)

    async def restart(
        self, key: str, timeout: float | None, watch: Callable[[FleetStatus], None]
    ) -> FleetStatus:
        """Restart one engine, which has to be ready again after ``timeout`` seconds; else as `drain`."""
        return await self._order("/restart", {"key": key, "timeout": timeout}, watch)

    async def down(self, timeout: float | None, watch: Callable[[FleetStatus], None]) -> FleetStatus:
        """End the fleet: returns when its process is gone. After ``timeout`` seconds engines are
        killed. What could not be stopped is in ``failures``."""
        last = await self._order("/down", {"timeout": timeout}, watch)
        if not await until(lambda: not is_alive(last.pid, last.create_time), GONE):
            raise CodedError(
                "TIMEOUT.DEADLINE", f"pid {last.pid} of fleet {last.name} is still there after {GONE:g} s"
            )
        return last

    async def _order(
        self, path: str, order: dict[str, Any], watch: Callable[[FleetStatus], None]
    ) -> FleetStatus:
        """Give an order, which takes as long as it takes, and look meanwhile: a fleet that has stopped
        answering is not waited for."""
        given = asyncio.create_task(self._ask("POST", path, None, order))
        try:
            while not given.done():
                watch(await self.status())
                await asyncio.wait({given}, timeout=_EVERY)
            return await given
        except (NobodyRuns, CodedError):
            # A fleet that ends answers the order first: its word is on the way.
            done, _ = await asyncio.wait({given}, timeout=_EVERY)
            if done:
                return await given
            raise
        finally:
            given.cancel()
            await asyncio.gather(given, return_exceptions=True)

    async def _ask(
        self, method: str, path: str, timeout: float | None, order: dict[str, Any] | None = None
    ) -> FleetStatus:
        try:
            # Connecting is bounded always.
            reply = await self._client.request(
                method, path, json=order, timeout=httpx.Timeout(timeout, connect=ANSWER)
            )
        except httpx.ConnectError as exc:
            raise NobodyRuns(
                f"no fleet {self._path.stem!r} runs; its socket is left from one that was killed"
            ) from exc
        except httpx.TimeoutException as exc:
            raise CodedError(
                "TIMEOUT.READ", f"fleet {self._path.stem} does not answer within {ANSWER:g} s"
            ) from exc
        except httpx.HTTPError as exc:
            raise CodedError(
                "TRANSPORT.DISCONNECTED", f"fleet {self._path.stem} ended before it had answered"
            ) from exc
        if reply.status_code != 200:
            raise error_from_reply(reply.status_code, reply.headers, reply.content)
        return msgspec.json.decode(reply.content, type=FleetStatus)
