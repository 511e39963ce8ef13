"""One HTTP exchange, judged: what comes back is an `Answer` or a CodedError, nothing in between.

A 200 is not a success yet: the body must arrive whole, be what it says it is, and hold no error
event. One that says it has no body holds None. Posters and the local client share this.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import time
from typing import Any, Final

import httpx
import msgspec

from dispatch.posting.request import Answer, Item
from dispatch.posting.transports.client import Client
from dispatch.posting.transports.echo import without_echo
from faults import classify, classify_status
from protocol import CodedError, defuse
from protocol.carriers.http_reply import HEADER, error_from_reply
from protocol.foreign import excerpt
from protocol.walking import walk

MAX_BODY: Final = 64 * 1024 * 1024
"""Largest reply that is read, in bytes."""
MAX_ERROR_BODY: Final = 4096
"""How much of a failed reply's body is read and kept, in bytes."""
ERROR_BODY_TIMEOUT: Final = 2.0
"""Seconds that a failed reply's body is waited for: its status says enough without it."""
KEPT_HEADERS: Final = ("content-type", "retry-after", "server", "x-request-id", HEADER)
EVENT_STREAM: Final = "text/event-stream"

_BROKEN: Final = (ssl.SSLEOFError, ssl.SSLSyscallError, ssl.SSLZeroReturnError)
_LINE_END = re.compile("\r\n|\n|\r")  # of an event stream; str.splitlines() knows more, which JSON may hold


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
                raise _refused(response, headers, await _start_of(response), item.body, facts)
            body = await _whole(response, facts)
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as exc:
        _tame(exc)
        if 200 <= status < 300 and isinstance(exc, httpx.DecodingError):  # it came, and is not what it says
            detail = f"the reply's body from {item.url} cannot be decoded: {exc}"
            raise CodedError.from_exception(exc, "UPSTREAM.BAD_BODY", detail, facts) from exc
        if 200 <= status < 300:  # the head had come: the body was cut
            detail = f"the reply's body from {item.url} was cut short: {exc}"
            raise CodedError.from_exception(exc, "UPSTREAM.TRUNCATED", detail, facts) from exc
        raise CodedError.from_exception(exc, _named(exc), data=facts) from exc
    if headers.get("content-type", "").startswith(EVENT_STREAM):
        data: Any = _events(body, item.body, facts)
    elif not body and _says_it_is_empty(response):  # as SGLang answers /abort_request
        data = None
    else:
        data = _json(body, item.body, headers.get("content-type", ""), status, facts)
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


def _says_it_is_empty(response: httpx.Response) -> bool:
    """Whether the reply's framing says that there is no body; where nothing does, it may have been cut."""
    if response.num_bytes_downloaded:  # something came, and was decoded to nothing
        return False
    return (
        response.status_code == 204
        or response.http_version.startswith("HTTP/2")  # whose frames mark the end
        or response.headers.get("content-length") == "0"
        or response.headers.get("transfer-encoding", "").rpartition(",")[2].strip().lower() == "chunked"
    )


def _named(exc: Exception) -> str:
    """The code of a client's exception. httpx knows no failure of TLS but calls it one to connect, which
    would be tried again; a connection that only breaks in the handshake may be."""
    code = str(classify(exc).code)
    if code == "TRANSPORT.CONNECT" and any(
        isinstance(one, ssl.SSLError) and not isinstance(one, _BROKEN) for one in walk(exc, context=True)
    ):
        return "TRANSPORT.TLS"
    return code


def _tame(exc: BaseException) -> None:
    """Defuse the texts of a client's exception: they quote what the server sent instead of HTTP."""
    for one in walk(exc, context=True):
        # httpcore's exceptions hold h11's as an argument, aiohttp's a parsed head, reqwest's their causes.
        one.args = tuple(a if a is None or isinstance(a, int) else defuse(str(a)) for a in one.args)
        message = getattr(one, "message", None)  # which aiohttp's write instead of their arguments
        if message is not None and hasattr(one, "__dict__"):
            vars(one)["message"] = defuse(str(message))


def _refused(
    response: httpx.Response, headers: dict[str, str], body: bytes, sent: bytes, facts: dict[str, Any]
) -> CodedError:
    text = _words(body, sent)
    status, start = response.status_code, excerpt(text)
    fault = classify_status(status, headers, start)
    if fault is None:  # 1xx never ends an exchange
        return CodedError("TRANSPORT.PROTOCOL", f"HTTP status {status} ended the exchange", facts)
    data = {**facts, "status": status, "body": start, "retry_after": fault.retry_after}
    detail = f"HTTP {status} from {response.request.url}: {excerpt(text, 600)}"
    if status < 500:  # what describes the request is the status's to say
        return CodedError(fault.code, detail, data)
    # Header and document alone: what else stands in the body may be a model's.
    said = error_from_reply(status, headers, body, code=fault.code, text=False)
    return CodedError(said.code, detail, {**said.data, **data}, id=said.id)


def _words(body: bytes, sent: bytes) -> str:
    """The start of what a server says, without what it repeats of the request ``sent``."""
    return without_echo(body[:MAX_ERROR_BODY].decode("utf-8", "replace"), sent)


def _json(body: bytes, sent: bytes, content_type: str, status: int, facts: dict[str, Any]) -> Any:
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
            f"({defuse(content_type) or 'no content type'}): {excerpt(_words(body, sent), 200)}",
            facts,
        ) from exc


def _events(body: bytes, sent: bytes, facts: dict[str, Any]) -> list[Any]:
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
        event = _json(value.encode(), sent, EVENT_STREAM, 200, facts)
        if isinstance(event, dict) and event.get("error") is not None:
            said = excerpt(_words(json.dumps(event["error"], default=str).encode(), sent), 600)
            raise CodedError(
                "UPSTREAM.STREAM_ERROR", f"error event in the stream from {facts['url']}: {said}", facts
            )
        events.append(event)
    raise CodedError(
        "UPSTREAM.TRUNCATED",
        f"the stream from {facts['url']} ended after {len(events)} events without [DONE]",
        facts,
    )
