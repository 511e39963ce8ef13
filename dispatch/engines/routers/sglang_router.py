"""SglangRouter: engines registered with a running sglang-router, over HTTP.

Behaviour as seen with sglang-router 0.3.2. It answers 202 and works later, so what was asked for counts
once its list shows it. It keeps a dead engine in its list and calls it healthy, sending requests
elsewhere without a word (retries of its own, by default up to five): whoever knows better has to remove
it. Removing does not end a registration that still tries to reach its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from dispatch.engines.health import probe
from dispatch.engines.routers.router import all_of, shown, tidy
from faults import classify_status, name_of
from protocol import CodedError
from protocol.foreign import excerpt

_PAUSE: Final = 0.02
"""Seconds between two looks at the list, at first; grows to ten times that."""
_SETTLE: Final = 1.0
"""Seconds that a removal waits for a registration that may still be under way: 0.1 s, where the engine
answers."""


class SglangRouter:
    """The workers of the sglang-router at ``base_url``. ``api_key`` is sent as a bearer token (the
    router's ``--api-key``) and appears in no message. ``timeout`` is seconds for one call as a whole;
    a router adds an engine once it has asked it for its health, within 0.1 s.

    Speaks ``/workers`` and, with routers that do not know it yet (0.1), ``/add_worker`` and its
    siblings. Every call raises CodedError: the code of the transport's failure or of the router's
    status (REQUEST.UNAUTHORIZED for a wrong key), UPSTREAM.BAD_BODY for a reply that is no list of
    workers, TIMEOUT.DEADLINE when the list does not show in time what was asked for, POOL.CLOSED after
    `close`. Belongs to one event loop."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float = 5.0) -> None:
        self._url = tidy(base_url)
        headers = {}
        if api_key is not None:
            if not api_key or not api_key.isascii() or not api_key.isprintable():
                # Here, since an HTTP library would name the header with its value.
                raise CodedError("CONFIG.INVALID", f"router {shown(base_url)}: api_key is no printable text")
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = probe.new_client()
        self._client.headers.update(headers)
        self._key = api_key
        self._timeout = timeout
        self._old = False  # speaks the older paths
        self._ours: set[str] = set()
        self._queued: set[str] = set()  # asked for, perhaps accepted, and not yet seen in the list

    async def add(self, url: str) -> None:
        """Register the engine at ``url`` and wait until the router lists it. When this fails or is
        cancelled the router may go on trying: `remove` or `reconcile` it afterwards."""
        url = tidy(url)
        async with self._deadline(f"did not take {shown(url)} in"):
            self._ours.add(url)
            if url in await self._list():
                self._queued.discard(url)
                return
            self._queued.add(url)
            if self._old:
                # Answers when the engine is in, and 400 when it is already.
                await self._ask("POST", "/add_worker", params={"url": url}, accept=(200, 400))
            else:
                await self._ask("POST", "/workers", json={"url": url}, accept=(200, 201, 202))
            for pause in _pauses():
                if url in await self._list():
                    self._queued.discard(url)
                    return
                await asyncio.sleep(pause)

    async def remove(self, url: str) -> None:
        """Take the engine at ``url`` from the router and wait until its list shows it no more."""
        url = tidy(url)
        async with self._deadline(f"did not let go of {shown(url)}"):
            settled = asyncio.get_running_loop().time() + _SETTLE
            asked: set[str] = set()  # a worker's id is asked for once
            for pause in _pauses():
                worker = (await self._list()).get(url)
                if worker is not None:
                    self._queued.discard(url)
                    if worker not in asked:
                        asked.add(worker)
                        await self._drop(url, worker)
                elif url not in self._queued:
                    self._ours.discard(url)
                    return
                elif asyncio.get_running_loop().time() > settled:
                    return  # still ours: should the registration succeed one day, `reconcile` ends it
                await asyncio.sleep(pause)

    async def urls(self) -> tuple[str, ...]:
        """The engines in the router's list, sorted."""
        async with self._deadline("did not answer"):
            return tuple(sorted(await self._list()))

    async def reconcile(self, wanted: Iterable[str]) -> None:
        """Add what is missing of ``wanted``, remove what this object had added and nobody wants."""
        urls = {tidy(url) for url in wanted}
        listed = set(await self.urls())
        await all_of(
            [
                *(self.add(url) for url in sorted(urls - listed)),
                *(self.remove(url) for url in sorted((self._ours & listed) - urls)),
            ]
        )

    async def close(self) -> None:
        """Close the client."""
        await self._client.aclose()

    # -- the router's two languages ------------------------------------------------------------------

    async def _list(self) -> dict[str, str]:
        """The router's workers: URL to id (the URL itself, where there are no ids)."""
        if self._old:
            reply = await self._ask("GET", "/list_workers")
        else:
            reply = await self._ask("GET", "/workers", accept=(200, 404))
            if reply.status_code == 404:
                self._old = True
                return await self._list()
        try:
            found = reply.json()
            pairs = (
                [(url, url) for url in found["urls"]]
                if self._old
                else [(worker["url"], worker["id"]) for worker in found["workers"]]
            )
            return {str(url).rstrip("/"): str(name) for url, name in pairs}
        except (ValueError, LookupError, TypeError) as exc:
            text = f"router {self._url}: {reply.request.method} {reply.url.path} answered 200, "
            raise CodedError(
                "UPSTREAM.BAD_BODY",
                f"{text}but not with its workers: is it an sglang-router?",
                {"body": self._excerpt(reply)},
            ) from exc

    async def _drop(self, url: str, worker: str) -> None:
        if self._old:
            await self._ask("POST", "/remove_worker", params={"url": url}, accept=(200, 404))
        else:
            await self._ask("DELETE", f"/workers/{worker}", accept=(200, 202, 404))

    @asynccontextmanager
    async def _deadline(self, late: str) -> AsyncIterator[None]:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                yield
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise CodedError(
                "TIMEOUT.DEADLINE", f"router {self._url} {late} within {self._timeout:g} s"
            ) from exc

    async def _ask(
        self, method: str, path: str, accept: tuple[int, ...] = (200,), **more: Any
    ) -> httpx.Response:
        where = f"router {self._url}: {method} {path}"
        if self._client.is_closed:
            raise CodedError("POOL.CLOSED", f"{where}: this object was closed")
        try:
            reply = await probe.exchange(
                self._client, method, self._url + path, timeout=self._timeout, **more
            )
        except httpx.HTTPError as exc:
            code = name_of(exc) or "TRANSPORT.DISCONNECTED"
            raise CodedError(code, f"{where}: {type(exc).__name__}") from exc
        if reply.status_code not in accept:
            fault = classify_status(reply.status_code, reply.headers)
            raise CodedError(
                fault.code if fault is not None else "UPSTREAM.BAD_BODY",
                f"{where} answered {reply.status_code}",
                {"status": reply.status_code, "body": self._excerpt(reply)},
            )
        return reply

    def _excerpt(self, reply: httpx.Response) -> str:
        body = reply.content
        return excerpt(body.replace(self._key.encode(), b"[api_key]") if self._key else body, 300)


def _pauses() -> Iterator[float]:
    """Seconds between looks, without an end: `SglangRouter._deadline` has it."""
    pause = _PAUSE
    while True:
        yield pause
        pause = min(1.5 * pause, 10 * _PAUSE)
