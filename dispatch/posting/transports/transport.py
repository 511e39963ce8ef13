"""One HTTP exchange, judged: what comes back is an `Answer` or a CodedError, nothing in between.

A 200 is not a success yet: the body must arrive whole, be what it says it is, and hold no error
event. Posters and the local client share this. What carries the exchange is exchangeable: any transport
of httpx's kind, asked without httpx's client, whose cookies, redirects and authentication nobody needs here
and every POST would pay for (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

import httpx
import msgspec

from dispatch.posting.request import Answer, Item
from dispatch.posting.transports.aiohttp_transport import KEEPALIVE, AiohttpTransport, trusted
from faults import classify, classify_status
from protocol import CodedError, defuse
from protocol.carriers.http_reply import HEADER, error_from_reply
from protocol.errors import walk
from protocol.foreign import excerpt

CONNECT_TIMEOUT: Final = 10.0
REQWEST_LATER: Final = 1.0
"""Seconds that reqwest's timeout, kept on another thread, lets the exchange's own speak first."""
LEAK_LOOK: Final = 1.0
"""Seconds between two looks at how many connections are open."""
LEAK_BOUND: Final = 30.0
"""Seconds for which connections may stay open that belong to nothing; then the transport is replaced."""
MAX_URLS: Final = 1024
"""How many parsed URLs a client keeps."""
MAX_BODY: Final = 64 * 1024 * 1024
"""Largest reply that is read, in bytes."""
MAX_ERROR_BODY: Final = 4096
"""How much of a failed reply's body is read and kept, in bytes."""
ERROR_BODY_TIMEOUT: Final = 2.0
"""Seconds that a failed reply's body is waited for: its status says enough without it."""
KEPT_HEADERS: Final = ("content-type", "retry-after", "server", "x-request-id", HEADER)
EVENT_STREAM: Final = "text/event-stream"
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
connections, and it uses a connection that brought a 5xx again. "reqwest" is a Rust client on a thread of its
own (``pip install 'failsoft[reqwest]'``), with differences of its own: see `ReqwestTransport`."""

_LINE_END = re.compile("\r\n|\n|\r")  # of an event stream; str.splitlines() knows more, which JSON may hold


def check_transport(value: Any) -> Transport:
    """``value`` if it is a `Transport` that can be had here; else CodedError CONFIG.INVALID."""
    if isinstance(value, str):
        if value not in get_args(Name):
            names = ", ".join(map(repr, get_args(Name)))
            raise CodedError("CONFIG.INVALID", f"transport {value!r}: one of {names}, or a factory, please")
        if value == "reqwest":
            _reqwest_package()
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
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=connections, keepalive_expiry=KEEPALIVE
        )
        return httpx.AsyncHTTPTransport(verify=trusted(), limits=limits, trust_env=False)
    if transport == "reqwest":
        return ReqwestTransport(connections)
    return AiohttpTransport()


def _reqwest_package() -> Any:
    try:
        from pyreqwest import client, exceptions
    except ImportError as exc:
        detail = "transport 'reqwest' needs a package: pip install 'failsoft[reqwest]'"
        raise CodedError.from_exception(exc, "CONFIG.INVALID", detail) from exc
    return client.ClientBuilder, exceptions


class ReqwestTransport(httpx.AsyncBaseTransport):
    """httpx's transport over pyreqwest.

    Not the one that pyreqwest brings: that calls a server that hangs up before it answers a ConnectError,
    and one that never answers a ConnectTimeout; it loses the status where the body is cut early, and takes
    the sum of all timeouts for the exchange's.

    What no setting changes: a request that is cancelled before its reply has begun stays open until then, or
    until its timeout (for a POST its budget), so the server works on; a connection that brought a 5xx is used
    again; the one timeout is the whole exchange's, so an exchange that ends while it connects ends as a
    ReadTimeout, of unknown outcome, unless `CONNECT_TIMEOUT` had passed; and a request of which no byte was
    written when its kept-alive connection turned out to be closed goes out on another, once."""

    def __init__(self, connections: int) -> None:
        builder, self._exceptions = _reqwest_package()
        builder = (
            builder()
            .no_proxy()
            .follow_redirects(False)
            .referer(False)
            .connect_timeout(datetime.timedelta(seconds=CONNECT_TIMEOUT))
            .pool_idle_timeout(datetime.timedelta(seconds=KEEPALIVE))
            .pool_max_idle_per_host(connections)
        )
        for coding in ("gzip", "deflate", "brotli", "zstd"):  # httpx decodes
            builder = getattr(builder, coding)(False)
        self._client = builder.build()
        self.failure: type[Exception] = self._exceptions.PyreqwestError

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``; the reply's body is still to be read, or closed."""
        names = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        body = await request.aread()
        limit = request.extensions.get("timeout", {}).get("read")
        try:
            builder = self._client.request(request.method, str(request.url)).headers(names).body_bytes(body)
            if limit is not None:
                builder = builder.timeout(datetime.timedelta(seconds=limit + REQWEST_LATER))
            # Without a buffer of its own: it would be filled before the status is told.
            sent = builder.streamed_read_buffer_limit(0).build_streamed()
            response = await _heeding(sent.__aenter__(), sent)
        except self.failure as exc:
            raise self.named(exc) from exc
        return httpx.Response(
            response.status,
            headers=list(response.headers.items()),
            stream=_ReqwestBody(self, sent, response.body_reader),
            request=request,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.close()

    def named(self, exc: Exception) -> Exception:
        """The httpx exception for ``exc``: only a failure of the connect phase says that nothing was sent."""
        known = self._exceptions
        causes = [cause["message"] for cause in (getattr(exc, "details", None) or {}).get("causes") or ()]
        if isinstance(exc, known.BuilderError):
            kind: type[Exception] = httpx.LocalProtocolError
        elif "client error (Connect)" in causes:
            kind = httpx.ConnectTimeout if isinstance(exc, TimeoutError) else httpx.ConnectError
        elif isinstance(exc, TimeoutError):
            kind = httpx.ReadTimeout
        elif isinstance(exc, known.DecodeError):
            kind = httpx.RemoteProtocolError
        else:
            kind = httpx.ReadError
        return kind(": ".join([str(exc.args[0]), *causes[1:]]))


async def _heeding(awaited: Awaitable[Any], opened: Any = None) -> Any:
    """The result of pyreqwest's ``awaited``, which by itself forgets a cancellation that meets its result;
    what was ``opened`` by then is closed."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await awaited
    if task.cancelling() > before:
        if opened is not None:
            await opened.__aexit__(None, None, None)
        raise asyncio.CancelledError
    return result


class _ReqwestBody(httpx.AsyncByteStream):
    def __init__(self, transport: ReqwestTransport, sent: Any, reader: Any) -> None:
        self._owner = transport
        self._sent = sent
        self._reader = reader

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (chunk := await _heeding(self._reader.read_chunk())) is not None:
                yield bytes(chunk)
        except self._owner.failure as exc:
            raise self._owner.named(exc) from exc

    async def aclose(self) -> None:
        await self._sent.__aexit__(None, None, None)


async def exchange(client: Client, item: Item, budget: float) -> Answer:
    """POST ``item`` and judge the reply, within ``budget`` seconds.

    Raises CodedError: TIMEOUT.*, TRANSPORT.*, UPSTREAM.*, REQUEST.* or BACKPRESSURE.*; its data
    holds url, status and retry_after where they are known."""
    facts: dict[str, Any] = {"url": item.url, "request_id": item.id}
    late = f"no whole reply from {item.url} within {budget:.3g} s"
    if client.cancels_cleanly:
        try:
            async with asyncio.timeout(budget):
                return await _exchange(client, item, budget, facts)
        except TimeoutError:
            raise CodedError("TIMEOUT.DEADLINE", late, facts) from None
    # httpcore's clean-up does not survive a second cancellation: the connection would stay open, unseen.
    # So the HTTP work is a task of its own, which is cancelled once, whatever cancels its owner.
    work = asyncio.create_task(_exchange(client, item, budget, facts))
    try:
        await asyncio.wait({work}, timeout=budget)
    finally:
        await _end(work)
    if work.cancelled():
        raise CodedError("TIMEOUT.DEADLINE", late, facts)
    return work.result()


async def _end(work: asyncio.Task[Any]) -> None:
    """Cancel ``work`` once, where it runs, and wait until it has ended, even if cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    if not work.done():
        work.cancel()
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    if not work.cancelled():
        work.exception()  # looked at, even where a cancelled owner never asks for the result


async def _exchange(client: Client, item: Item, budget: float, facts: dict[str, Any]) -> Answer:
    began = time.monotonic()
    status = 0
    try:
        async with client.post(item, budget) as response:
            status = facts["status"] = response.status_code
            headers = {k: v for k in KEPT_HEADERS if (v := response.headers.get(k)) is not None}
            if not 200 <= status < 300:
                raise _refused(response, headers, await _start_of(response), facts)
            body = await _whole(response, facts)
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as exc:
        _tame(exc)
        if 200 <= status < 300 and isinstance(exc, httpx.DecodingError):  # it came, and is not what it says
            detail = f"the reply's body from {item.url} cannot be decoded: {exc}"
            raise CodedError.from_exception(exc, "UPSTREAM.BAD_BODY", detail, facts) from exc
        if 200 <= status < 300:  # the head had come: the body was cut
            detail = f"the reply's body from {item.url} was cut short: {exc}"
            raise CodedError.from_exception(exc, "UPSTREAM.TRUNCATED", detail, facts) from exc
        raise CodedError.from_exception(exc, classify(exc).code, data=facts) from exc
    if headers.get("content-type", "").startswith(EVENT_STREAM):
        data: Any = _events(body, facts)
    else:
        data = _json(body, headers.get("content-type", ""), status, facts)
    return Answer(status, headers, data, time.monotonic() - began)


async def _start_of(response: httpx.Response) -> bytes:
    # Whatever is wrong with the body, the status has come and is the verdict: a 400 stays a 400.
    start = b""
    with contextlib.suppress(httpx.HTTPError, httpx.StreamError, OSError, TimeoutError):
        async with asyncio.timeout(ERROR_BODY_TIMEOUT):
            async for chunk in response.aiter_bytes():
                start += chunk[:MAX_ERROR_BODY]
                if len(start) >= MAX_ERROR_BODY:
                    break
    return start[:MAX_ERROR_BODY]


async def _whole(response: httpx.Response, facts: dict[str, Any]) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MAX_BODY:
            raise CodedError("UPSTREAM.BAD_BODY", f"the reply is larger than {MAX_BODY} bytes", facts)
        parts.append(chunk)
    return b"".join(parts)


def _tame(exc: BaseException) -> None:
    """Defuse the texts of a client's exception: they quote what the server sent instead of HTTP."""
    for one in walk(exc, context=True):
        # httpcore's exceptions hold h11's as an argument, aiohttp's a parsed head, reqwest's their causes.
        one.args = tuple(a if a is None or isinstance(a, int) else defuse(str(a)) for a in one.args)
        message = getattr(one, "message", None)  # which aiohttp's write instead of their arguments
        if message is not None and hasattr(one, "__dict__"):
            vars(one)["message"] = defuse(str(message))


def _refused(
    response: httpx.Response, headers: dict[str, str], body: bytes, facts: dict[str, Any]
) -> CodedError:
    status, start = response.status_code, excerpt(body)
    fault = classify_status(status, headers, start)
    if fault is None:  # 1xx never ends an exchange
        return CodedError("TRANSPORT.PROTOCOL", f"HTTP status {status} ended the exchange", facts)
    data = {**facts, "status": status, "body": start, "retry_after": fault.retry_after}
    detail = f"HTTP {status} from {response.request.url}: {excerpt(body, 600)}"
    if status < 500:  # what describes the request is the status's to say
        return CodedError(fault.code, detail, data)
    # Header and document alone: what else stands in the body may be a model's.
    said = error_from_reply(status, headers, body, code=fault.code, text=False)
    return CodedError(said.code, detail, {**said.data, **data}, id=said.id)


def _json(body: bytes, content_type: str, status: int, facts: dict[str, Any]) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(body)  # engines write NaN, which is not JSON but is meant
    except (ValueError, RecursionError) as exc:
        raise CodedError(
            "UPSTREAM.BAD_BODY",
            f"HTTP {status} from {facts['url']}, but the body is not JSON "
            f"({defuse(content_type) or 'no content type'}): {excerpt(body, 200)}",
            facts,
        ) from exc


def _events(body: bytes, facts: dict[str, Any]) -> list[Any]:
    """The events of a stream. It counts only with its end: ``data: [DONE]``, as SGLang, vLLM and the
    OpenAI API send it; and an error event makes the whole of it a failure."""
    events: list[Any] = []
    for line in _LINE_END.split(body.decode("utf-8", "replace")):
        field, _, value = line.partition(":")
        if field != "data":
            continue
        value = value.strip()
        if value == "[DONE]":
            return events
        event = _json(value.encode(), EVENT_STREAM, 200, facts)
        if isinstance(event, dict) and event.get("error") is not None:
            said = excerpt(json.dumps(event["error"], default=str), 600)
            raise CodedError(
                "UPSTREAM.STREAM_ERROR", f"error event in the stream from {facts['url']}: {said}", facts
            )
        events.append(event)
    raise CodedError(
        "UPSTREAM.TRUNCATED",
        f"the stream from {facts['url']} ended after {len(events)} events without [DONE]",
        facts,
    )
