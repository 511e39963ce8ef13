"""The transport over pyreqwest: what its exceptions become, and what becomes of a distrusted origin."""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import pytest
from pyreqwest import exceptions

from dispatch.posting.transports import reqwest_transport
from dispatch.posting.transports.client import make_client
from dispatch.posting.transports.reqwest_transport import ReqwestTransport
from dispatch.posting.transports.transport import exchange
from faults import classify
from faults.fault import Outcome
from tests.dispatch.posting.transports.server import Server, failure, item, ok


def test_reqwests_connect_phase_alone_says_never_sent() -> None:
    one = ReqwestTransport(1)
    connect = {"causes": [{"message": "error sending request"}, {"message": "client error (Connect)"}]}
    sent = {"causes": [{"message": "error sending request"}, {"message": "client error (SendRequest)"}]}
    for kind in vars(exceptions).values():
        if not inspect.isclass(kind) or not issubclass(kind, exceptions.DetailedPyreqwestError):
            continue
        if issubclass(kind, exceptions.JSONDecodeError):  # ours is not the method that raises it
            continue
        never = issubclass(kind, exceptions.BuilderError)
        outcome = Outcome.NOT_RUN if never else Outcome.UNKNOWN
        assert classify(one.named(kind("text", sent))).outcome is outcome, kind  # type: ignore[arg-type]
        assert classify(one.named(kind("text", connect))).outcome is Outcome.NOT_RUN, kind  # type: ignore[arg-type]


async def test_an_origin_that_brought_a_5xx_is_distrusted_for_as_long_as_its_connection_may_be_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reqwest_transport, "KEEPALIVE", 2.0)
    monkeypatch.setattr(reqwest_transport, "LATER", 0.2)
    server.done_after_5xx = True
    server.reply = lambda number: ok(b"{}", "500 Internal Server Error") if number == 2 else ok(b"{}")
    other = Server()
    async with (
        await asyncio.start_server(other.serve, "127.0.0.1", 0) as running,
        contextlib.aclosing(make_client(8, "reqwest")) as client,
    ):
        other.url = f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}/"
        await exchange(client, item(server.url), 20.0)
        await failure(client, server.url)
        for _ in range(3):
            await exchange(client, item(server.url), 20.0)
            await exchange(client, item(other.url), 20.0)
        assert server.requests == [1, 1, 2, 3, 4]
        assert other.requests == [1, 1, 1]
        await asyncio.sleep(2.3)
        for _ in range(3):
            await exchange(client, item(server.url), 20.0)
        assert server.requests[5:] == [5, 5, 5]
