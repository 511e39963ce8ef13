"""A generation served over HTTP: whole or as a stream, ended early when the client is gone."""

import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from dispatch.engines.embedded.dialects import Dialect, Order, Refusal
from dispatch.engines.embedded.generation import Generation
from dispatch.engines.embedded.scheduler import QueueFull, Scheduler
from dispatch.engines.embedded.witness import Visit

DONE = b"data: [DONE]\n\n"
"""How both dialects say that a stream is complete; without it, it isn't."""

RETRY_AFTER = {"Retry-After": "1"}
"""Seconds a client should stay away from a full or starting engine; a slot frees sooner than that."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON reply encoded by msgspec, several times faster than the standard library's encoder."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Ticket:
    """An accepted request with all that is needed to run it and to answer it."""

    request: web.Request
    visit: Visit
    dialect: Dialect
    order: Order
    ids: list[int]
    names: tuple[str, ...]
    """The ids it can be aborted by; the first is the one that replies carry."""
    scheduler: Scheduler
    rng: random.Random

    @contextlib.contextmanager
    def submitted(self) -> Iterator[Generation]:
        """Run the request for as long as the block lasts: leaving it early, by an error or because the
        handler was cancelled on a lost connection, aborts it and frees its slot."""
        generation = Generation(self.names, self.ids, self.order.sampling, self.rng)
        try:
            self.scheduler.submit(generation)
        except QueueFull as full:
            raise Refusal(503, str(full), RETRY_AFTER) from full
        try:
            yield generation
        finally:
            self.scheduler.abort(generation, "the client went away")

    def judge(self, generation: Generation) -> None:
        """Record how a generation ended, unless a fault already took this visit."""
        finish = generation.finish
        assert finish is not None
        self.visit.label = finish["type"]
        if self.visit.outcome != "faulted":
            self.visit.outcome = "aborted" if finish["type"] == "abort" else "completed"

    async def whole_body(self) -> bytes:
        """Generate to the end; the reply's JSON."""
        with self.submitted() as generation:
            await generation.done.wait()
            self.judge(generation)
            return msgspec.json.encode(self.dialect.whole(self.names[0], self.order, generation))

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The stream's events, one a scheduler step in which text was added, the last with the finish."""
        sent = 0
        while True:
            text = generation.settled_text()
            ended = generation.finish is not None
            if ended or len(text) > sent:
                yield event(self.dialect.event(self.names[0], self.order, generation, sent))
                sent = len(text)
            if ended:
                return
            generation.changed.clear()
            await generation.changed.wait()

    async def open_stream(self) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(self.request)
        return response


async def serve(ticket: Ticket) -> web.StreamResponse:
    """Answer a request the ordinary way. An abort is a 200 with the partial text, like the real one."""
    if not ticket.order.stream:
        return web.Response(body=await ticket.whole_body(), content_type="application/json")
    with ticket.submitted() as generation:
        response = await ticket.open_stream()
        async for chunk in ticket.events(generation):
            await response.write(chunk)
        await response.write(DONE)
        ticket.judge(generation)
        return response
