"""Faults on request: real bad behaviour on real sockets, armed through `POST /faults` under `--faults`.

Every kind copies something seen from an engine or from a proxy before it. A fault takes the next `times`
requests that match (`times: null`: for ever), each counted as `faulted` by the witness; `contains` limits it
to prompts with that text. `DELETE /faults` disarms all, lets hung requests go on (they are then answered the
ordinary way) and thaws the scheduler.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal

import msgspec
from aiohttp import web

from dispatch.engines.embedded.dialects import MAX_NEW_TOKENS
from dispatch.engines.embedded.replies import DONE, Ticket, event, json_response, serve

Kind = Literal[
    "status",  # answer with `status` (default 500), `headers` and `body`, having run nothing
    "abort",  # 200 with finish_reason abort after `after_tokens` tokens
    "cut_body",  # run it, declare the whole Content-Length, send half, close the socket
    "not_json",  # 200 application/json whose body isn't JSON
    "wrong_shape",  # 200 with JSON of another shape (`body` overrides it)
    "html",  # a proxy's page, `status` (default 200)
    "hang",  # accept, answer only once released
    "slow",  # run it, send a byte every `interval` seconds
    "close",  # close the socket without a byte
    "reset",  # the same with a TCP reset
    "stream_error",  # streams only: an error event, then [DONE], under 200
    "stream_cut",  # streams only: a well-formed end of body without [DONE]
    "exit",  # the process ends at once with `exit_code`: a prompt that kills its engine
    "freeze",  # nothing is generated until released, while the server answers; matches no request
]

_STREAM_ONLY = frozenset({"stream_error", "stream_cut"})
_PAGE = "<html><head><title>Bad Gateway</title></head><body><h1>Bad Gateway</h1></body></html>"


class FaultSpec(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /faults` takes. `interval` is seconds; `after_tokens` bounds how much partial text comes."""

    kind: Kind
    times: int | None = 1
    contains: str | None = None
    status: int | None = None
    body: Any = None
    headers: dict[str, str] = {}
    after_tokens: int = 3
    interval: float = 1.0
    exit_code: int = 1

    def __post_init__(self) -> None:
        if self.times is not None and self.times < 1:
            raise ValueError("times must be at least 1, or null")
        if self.status is not None and not 200 <= self.status <= 599:
            raise ValueError("status must be between 200 and 599")
        if self.after_tokens < 1 or self.interval < 0 or not 0 <= self.exit_code <= 255:
            raise ValueError("after_tokens, interval or exit_code is out of range")


class FaultBook:
    """The armed faults, oldest first; the first that matches takes the request."""

    def __init__(self) -> None:
        self.armed: list[FaultSpec] = []
        self.released = asyncio.Event()

    def take(self, prompt: str, stream: bool) -> FaultSpec | None:
        for spec in self.armed:
            if spec.kind in _STREAM_ONLY and not stream:
                continue
            if spec.contains is not None and spec.contains not in prompt:
                continue
            if spec.times is not None:
                spec.times -= 1
                if spec.times == 0:
                    self.armed.remove(spec)
            return spec
        return None

    def clear(self) -> None:
        self.armed.clear()
        self.released.set()
        self.released = asyncio.Event()


async def act(spec: FaultSpec, book: FaultBook, ticket: Ticket) -> web.StreamResponse:
    """Do the bad thing to this request."""
    ticket.visit.outcome = "faulted"
    ticket.visit.label = spec.kind
    if spec.kind == "hang":
        await book.released.wait()
        return await serve(ticket)
    return await _ACTS[spec.kind](spec, ticket)


async def _status(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    status = spec.status or 500
    if isinstance(spec.body, str):
        return web.Response(text=spec.body, status=status, headers=spec.headers)
    body = ticket.dialect.error(status, f"fault: status {status}") if spec.body is None else spec.body
    return json_response(body, status, spec.headers)


async def _abort(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    return await serve(_curtailed(spec, ticket))


def _curtailed(spec: FaultSpec, ticket: Ticket) -> Ticket:
    """The same request, bound to end as aborted after `after_tokens` tokens and in no other way."""
    sampling = replace(
        ticket.order.sampling,
        max_new_tokens=MAX_NEW_TOKENS,
        stop=(),
        ignore_eos=True,
        abort_after=spec.after_tokens,
    )
    return replace(ticket, order=replace(ticket.order, sampling=sampling))


async def _cut_body(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    body = await ticket.whole_body()
    response = await _declared(ticket, body)
    await response.write(body[: len(body) // 2])
    return _hang_up(ticket, response)


async def _slow(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    body = await ticket.whole_body()
    response = await _declared(ticket, body)
    for place in range(len(body)):
        await response.write(body[place : place + 1])
        await asyncio.sleep(spec.interval)
    return response


async def _declared(ticket: Ticket, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(ticket.request)
    return response


async def _not_json(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    return web.Response(body=b'{"text": "half of', content_type="application/json")


async def _wrong_shape(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    return json_response({"result": []} if spec.body is None else spec.body)


async def _html(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    return web.Response(text=_PAGE, content_type="text/html", status=spec.status or 200)


async def _close(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    return _hang_up(ticket, web.Response())


async def _reset(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    transport = ticket.request.transport
    if isinstance(transport, asyncio.WriteTransport):
        linger_none = struct.pack("ii", 1, 0)  # on, for zero seconds: the kernel sends RST and not FIN
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
        transport.abort()
    return web.Response()


async def _stream_error(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    response = await _partial_stream(spec, ticket)
    await response.write(event(ticket.dialect.error(500, "fault: the engine failed in mid-stream")))
    await response.write(DONE)
    return response


async def _stream_cut(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    return await _partial_stream(spec, ticket)


async def _partial_stream(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    """Open a stream and send its first tokens in one event that promises more; its end is the caller's."""
    ticket = _curtailed(spec, ticket)
    with ticket.submitted() as generation:
        response = await ticket.open_stream()
        await generation.done.wait()
        generation.finish = None  # the event has to read like one from the middle of a text
        await response.write(event(ticket.dialect.event(ticket.names[0], ticket.order, generation, 0)))
    return response


async def _exit(spec: FaultSpec, ticket: Ticket) -> web.StreamResponse:
    os._exit(spec.exit_code)


def _hang_up(ticket: Ticket, response: web.StreamResponse) -> web.StreamResponse:
    """Close the connection after what was written so far; nothing that is sent later arrives."""
    if ticket.request.transport is not None:
        ticket.request.transport.close()
    return response


_ACTS: dict[str, Callable[[FaultSpec, Ticket], Awaitable[web.StreamResponse]]] = {
    "status": _status,
    "abort": _abort,
    "cut_body": _cut_body,
    "not_json": _not_json,
    "wrong_shape": _wrong_shape,
    "html": _html,
    "slow": _slow,
    "close": _close,
    "reset": _reset,
    "stream_error": _stream_error,
    "stream_cut": _stream_cut,
    "exit": _exit,
}
