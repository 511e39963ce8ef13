"""The client: POSTs over one transport, which is made anew when it leaks connections.

The transport is exchangeable: any of httpx's kind, asked without httpx's client, whose cookies, redirects and
authentication nobody needs here and every POST would pay for (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

import httpx

from dispatch.posting.request import Item
from dispatch.posting.transports.aiohttp_transport import AiohttpTransport
from dispatch.posting.transports.httpx_transport import HttpxTransport
from dispatch.posting.transports.reqwest_transport import CONNECT_TIMEOUT, ReqwestTransport, reqwest_package
from protocol import CodedError

LEAK_LOOK: Final = 1.0
"""Seconds between two looks at how many connections are open."""
LEAK_BOUND: Final = 30.0
"""Seconds for which connections may stay open that belong to nothing; then the transport is replaced."""
MAX_URLS: Final = 1024
"""How many parsed URLs a client keeps."""
SENT: Final = {
    "accept": "*/*",
    "accept-encoding": "gzip, deflate",  # what httpx decodes without further packages
    "user-agent": "failsoft",
    "content-type": "application/json",
}
"""Headers of every POST; a caller's replace them."""

Name: TypeAlias = Literal["aiohttp", "httpx", "reqwest"]
Transport: TypeAlias = Name | Callable[[int], httpx.AsyncBaseTransport]
"""What carries the exchanges: a name, or a factory (picklable: posters make their own) that gets the most
exchanges at once that its transport will be asked for.

"aiohttp" is the default. "httpx" is httpx's own transport, httpcore: its cost grows with the number of
connections. "reqwest" is a Rust client on a thread of its own (``pip install 'failsoft[reqwest]'``), with
differences of its own: see `ReqwestTransport`. None of the three uses a connection again that has brought a
5xx (reqwest as far as it can be told): vLLM closes it after a 500, and the next request would meet the close.
"""


def check_transport(value: Any) -> Transport:
    """``value`` if it is a `Transport` that can be had here; else CodedError CONFIG.INVALID."""
    if isinstance(value, str):
        if value not in get_args(Name):
            names = ", ".join(map(repr, get_args(Name)))
            raise CodedError("CONFIG.INVALID", f"transport {value!r}: one of {names}, or a factory, please")
        if value == "reqwest":
            reqwest_package()
    elif not callable(value):
        raise CodedError(
            "CONFIG.INVALID", f"transport is {type(value).__name__}: a name or a factory, please"
        )
    return cast("Transport", value)


def make_client(connections: int, transport: Transport = "aiohttp") -> Client:
    """A client for up to ``connections`` exchanges at once. How many there are is decided by the pool's
    admission; the client itself never makes a request wait. CodedError CONFIG.INVALID for no `Transport`."""
    return Client(connections, check_transport(transport))


class Client:
    """POSTs over a transport, which is made anew when it leaks connections; `make_client` makes one.

    Engines are inside the cluster: no transport asks a proxy of the environment, which is meant for the
    outside world; none follows a redirect, or keeps cookies."""

    def __init__(self, connections: int, transport: Transport) -> None:
        self._connections = connections
        self._transport: Transport = transport
        self._targets: dict[str, _Target] = {}
        self._line = self._open()
        self._look_at = 0.0
        self._leaking_since: float | None = None
        self.rebuilt = 0
        """How often the transport was replaced."""

    @property
    def leaked(self) -> int:
        """Connections that are open though they belong to no exchange and are not kept for the next; 0 for
        a transport that cannot tell."""
        line = self._line
        return line.transport.lost(line.exchanges) if isinstance(line.transport, AiohttpTransport) else 0

    @property
    def cancels_cleanly(self) -> bool:
        """Whether an exchange's clean-up waits for nothing, so that no cancellation can break it off."""
        return isinstance(self._line.transport, AiohttpTransport)

    @contextlib.asynccontextmanager
    async def post(self, item: Item, budget: float) -> AsyncIterator[httpx.Response]:
        """POST ``item``; yields the reply, whose body is to be read within."""
        target = self._targets.get(item.url) or self._target(item.url)
        headers = {**SENT, **target.headers, **item.headers, "x-request-id": item.id}
        headers.pop("transfer-encoding", None)
        headers["content-length"] = str(len(item.body))
        request = httpx.Request(
            "POST",
            target.url,
            # As bytes and as a stream httpx takes them as they are, at an eighth of the cost.
            headers=[(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()],
            stream=httpx.ByteStream(item.body),
            extensions={"timeout": _timeouts(budget)},
        )
        async with self._sent(request) as response:
            yield response

    async def get(self, url: str, *, headers: Mapping[str, str], timeout: float) -> httpx.Response:
        """The whole reply to a GET; raises httpx's exceptions, a ReadTimeout after ``timeout`` seconds."""
        request = httpx.Request(
            "GET", url, headers={**SENT, **headers}, extensions={"timeout": _timeouts(timeout)}
        )
        try:
            async with asyncio.timeout(timeout), self._sent(request) as response:
                await response.aread()
        except TimeoutError as exc:
            raise httpx.ReadTimeout(f"no whole reply within {timeout:.3g} s", request=request) from exc
        return response

    async def replace(self) -> None:
        """Make the transport anew; the old one is closed when its last exchange has ended."""
        old, self._line = self._line, self._open()
        old.retired = True
        self.rebuilt += 1
        self._leaking_since = None
        if not old.exchanges:
            await old.transport.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._line.transport.aclose()

    @contextlib.asynccontextmanager
    async def _sent(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        now = time.monotonic()
        if now >= self._look_at:
            await self._look(now)
        line = self._line
        line.exchanges += 1
        try:
            response = await line.transport.handle_async_request(request)
            response.request = request
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.PoolTimeout:  # a client that never makes a request wait has lost count
            if line is self._line:
                await self.replace()
            raise
        finally:
            line.exchanges -= 1
            if line.retired and not line.exchanges:
                await line.transport.aclose()

    def _open(self) -> _Line:
        return _Line(_make(self._transport, self._connections))

    def _target(self, url: str) -> _Target:
        if len(self._targets) >= MAX_URLS:
            self._targets.clear()
        made = self._targets[url] = _parsed(url)
        return made

    async def _look(self, now: float) -> None:
        self._look_at = now + LEAK_LOOK
        if not self.leaked:
            self._leaking_since = None
        elif self._leaking_since is None:
            self._leaking_since = now
        elif now - self._leaking_since >= LEAK_BOUND:
            await self.replace()


class _Line:
    """A transport and how many exchanges are open on it."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport
        self.exchanges = 0
        self.retired = False


class _Target(NamedTuple):
    """A parsed URL, and the headers that follow from it."""

    url: httpx.URL
    headers: dict[str, str]


def _parsed(url: str) -> _Target:
    parsed = httpx.URL(url)
    try:
        parsed.raw_host.decode("ascii").encode("idna")  # as the resolver will, whose complaint is no OSError
    except UnicodeError as exc:
        raise httpx.InvalidURL(f"the host of {url[:200]!r} cannot be resolved: {exc}") from exc
    headers = {"host": parsed.netloc.decode("ascii")}
    if parsed.userinfo:
        user = f"{parsed.username}:{parsed.password}".encode()
        headers["authorization"] = f"Basic {base64.b64encode(user).decode('ascii')}"
    return _Target(parsed.copy_with(userinfo=b""), headers)


def _timeouts(budget: float) -> dict[str, float]:
    connect = min(budget, CONNECT_TIMEOUT)
    return {"connect": connect, "read": budget, "write": budget, "pool": connect}


def _make(transport: Transport, connections: int) -> httpx.AsyncBaseTransport:
    if callable(transport):
        return transport(connections)
    if transport == "httpx":
        return HttpxTransport(connections)
    if transport == "reqwest":
        return ReqwestTransport(connections)
    return AiohttpTransport()
