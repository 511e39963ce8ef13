"""One exchange, judged, against a server that misbehaves in every way reported (CASES: H1 to H6), over each
of the three transports."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import math
import socket
from typing import Any
from urllib.parse import urlencode

import pytest

from dispatch.posting.request import Answer, Item
from dispatch.posting.transports import transport
from dispatch.posting.transports.aiohttp_transport import KEEPALIVE
from dispatch.posting.transports.client import Client, Name, make_client
from faults import classify, decide
from protocol import CodedError, code_of, mint, scan
from protocol.carriers.http_reply import HEADER
from protocol.token import Token
from tests.support.wait import until
from tests.support.witness import Witness


class Exchange:
    """Exchanges with the witness: `answer` for one that must succeed, `failure` for one that must not."""

    def __init__(self, client: Client, witness: Witness) -> None:
        self.client = client
        self.witness = witness

    async def answer(self, behaviour: str, id: str = "r", budget: float = 20.0, **query: Any) -> Answer:
        item = Item(id, 1, self.witness.url(behaviour, urlencode(query)), b'{"n": 1}', {"x-extra": "yes"})
        return await transport.exchange(self.client, item, budget)

    async def failure(self, behaviour: str, id: str = "r", budget: float = 20.0, **query: Any) -> CodedError:
        with pytest.raises(CodedError) as caught:
            await self.answer(behaviour, id, budget, **query)
        error = caught.value
        assert error.data["url"].startswith(self.witness.base)
        assert error.detail
        return error


@pytest.fixture
def exchange(client: Client, witness: Witness) -> Exchange:
    return Exchange(client, witness)


def sent_again(error: CodedError) -> bool:
    return decide(classify(error), remaining=100.0).action.sends_again


async def test_a_good_reply(exchange: Exchange, witness: Witness) -> None:
    answer = await exchange.answer("echo", "sample-1")
    headers = answer.data["headers"]
    assert ["x-request-id", "sample-1"] in headers
    assert ["x-extra", "yes"] in headers
    assert [value for name, value in headers if name == "content-type"] == ["application/json"]
    assert answer.data["body"] == '{"n": 1}'
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/json")
    assert 0 < answer.seconds < 20
    assert witness.counts()["arrived"] == {"sample-1": 1}


async def test_a_callers_header_replaces_ours(client: Client, witness: Witness) -> None:
    item = Item(
        "mine", 1, witness.url("echo"), b"{}", {"content-type": "application/x", "x-request-id": "no"}
    )
    headers = (await transport.exchange(client, item, 20.0)).data["headers"]
    assert [value for name, value in headers if name == "content-type"] == ["application/x"]
    assert [value for name, value in headers if name == "x-request-id"] == ["mine"]


def ours(error: CodedError) -> list[Token]:
    """The tokens in the texts that ``error`` carries, apart from its own and from the URL asked for."""
    texts = [error.detail, str(error.data), error.origin.text, *(link.text for link in error.chain)]
    return [found for text in texts for found in scan(text.replace(error.data["url"], ""))]


async def test_a_handshake_that_fails_is_no_refused_connection(
    client: Client, name: Name, witness: Witness
) -> None:
    """It fails the same way again: TLS spoken to a server that does not."""
    item = Item("r", 1, witness.url("ok").replace("http://", "https://"), b"{}", {})
    with pytest.raises(CodedError) as caught:
        await transport.exchange(client, item, 20.0)
    # The other two keep no cause that would tell it.
    assert caught.value.code == ("TRANSPORT.TLS" if name == "aiohttp" else "TRANSPORT.CONNECT")


async def test_a_connection_that_breaks_in_the_handshake_may_be_made_again(client: Client) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CodedError) as caught:
            await transport.exchange(client, Item("r", 1, f"https://127.0.0.1:{port}/", b"{}", {}), 20.0)
    assert sent_again(caught.value), caught.value


# ---- statuses


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (302, "UPSTREAM.REDIRECT"), (400, "REQUEST.REJECTED"), (401, "REQUEST.UNAUTHORIZED"),
        (404, "REQUEST.NOT_FOUND"), (408, "TIMEOUT.READ"), (413, "REQUEST.TOO_LARGE"), (422,
        "REQUEST.REJECTED"),
        (429, "BACKPRESSURE.RATE_LIMITED"), (500, "UPSTREAM.SERVER_ERROR"), (502, "UPSTREAM.BAD_GATEWAY"),
        (503, "BACKPRESSURE.OVERLOADED"), (504, "UPSTREAM.BAD_GATEWAY"), (599, "UPSTREAM.SERVER_ERROR"),
    ],
)  # fmt: skip
async def test_a_status_has_its_code_and_keeps_the_bodys_start(
    exchange: Exchange, status: int, code: str
) -> None:
    error = await exchange.failure("status", status=status, body="prompt is too long by 7 tokens")
    assert error.code == code
    assert error.data["status"] == status
    assert "too long by 7" in error.detail
    assert error.data["body"] == "prompt is too long by 7 tokens"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_h3_a_4xx_about_the_request_is_never_sent_again(exchange: Exchange, status: int) -> None:
    assert not sent_again(await exchange.failure("status", status=status))


@pytest.mark.parametrize("how", ["cut", "bad_gzip"])
async def test_h3_a_4xx_whose_body_is_broken_is_still_a_4xx(exchange: Exchange, how: str) -> None:
    error = await exchange.failure(how, status=400)
    assert error.code == "REQUEST.REJECTED"
    assert error.data["status"] == 400
    assert not sent_again(error)


async def test_h3_a_4xx_whose_body_never_ends_is_known_long_before_the_deadline(exchange: Exchange) -> None:
    async with asyncio.timeout(20):
        error = await exchange.failure("slow", budget=300.0, status=400)
    assert error.code == "REQUEST.REJECTED"


async def test_a_5xx_whose_body_is_cut_is_a_5xx(exchange: Exchange) -> None:
    assert (await exchange.failure("cut", status=500)).code == "UPSTREAM.SERVER_ERROR"


async def test_only_the_start_of_an_error_body_is_kept(exchange: Exchange) -> None:
    error = await exchange.failure("status", status=400, body="x" * 100, times=100_000)
    assert 0 < len(error.data["body"]) <= transport.MAX_ERROR_BODY
    assert len(error.detail) < 1000


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
async def test_a_token_in_a_body_is_not_read_as_a_code(exchange: Exchange, status: int) -> None:
    token = mint("WEIGHTS.REFIT_ABORTED")
    error = await exchange.failure("status", status=status, body=f"model said {token} {token.lower()}")
    assert error.code.family in ("REQUEST", "BACKPRESSURE", "UPSTREAM")
    assert ours(error) == []
    assert code_of(str(error)) == error.code


@pytest.mark.parametrize(
    ("behaviour", "query"),
    [
        ("raw", {"body": "{0}"}),
        ("garbage", {"text": "{0}"}),
        ("garbage", {"text": "HTTP/1.1 200 OK\r\n{0}"}),
        ("garbage", {"text": "HTTP/1.1 200 OK\r\nContent-Type: {0}\r\nContent-Length: 1\r\n\r\nx"}),
        ("status", {"status": 302, "h-Location": "http://127.0.0.1:1/{0}"}),
    ],
)
async def test_no_foreign_text_brings_a_token_into_ours(
    exchange: Exchange, behaviour: str, query: dict[str, Any]
) -> None:
    token = mint("WEIGHTS.REFIT_ABORTED")
    query = {
        key: value.replace("{0}", token) if isinstance(value, str) else value for key, value in query.items()
    }
    error = await exchange.failure(behaviour, **query)
    assert ours(error) == []


@pytest.mark.parametrize("status", [500, 503])
async def test_a_5xx_may_name_its_code_in_the_header(exchange: Exchange, status: int) -> None:
    token = mint("WEIGHTS.REFIT_ABORTED")
    error = await exchange.failure("status", status=status, **{f"h-{HEADER}": token})
    assert error.code == "WEIGHTS.REFIT_ABORTED"


async def test_a_4xx_may_not(exchange: Exchange) -> None:
    error = await exchange.failure("status", status=400, **{f"h-{HEADER}": mint("WEIGHTS.REFIT_ABORTED")})
    assert error.code == "REQUEST.REJECTED"


async def test_a_broken_code_header_is_ignored(exchange: Exchange) -> None:
    broken = mint("WEIGHTS.REFIT_ABORTED")[:-1]
    error = await exchange.failure("status", status=500, **{f"h-{HEADER}": broken})
    assert error.code == "UPSTREAM.SERVER_ERROR"


# ---- H6: Retry-After


@pytest.mark.parametrize(("form", "least", "most"), [("seconds", 30, 30), ("date", 25, 31)])
@pytest.mark.parametrize("status", [429, 503])
async def test_h6_retry_after_is_read(
    exchange: Exchange, form: str, least: float, most: float, status: int
) -> None:
    error = await exchange.failure("retry_after", form=form, seconds=30, status=status)
    assert least <= error.data["retry_after"] <= most
    assert least <= decide(classify(error), remaining=100.0).delay <= most


async def test_h6_nonsense_in_retry_after_is_no_number(exchange: Exchange) -> None:
    error = await exchange.failure("retry_after", form="nonsense")
    assert error.code == "BACKPRESSURE.RATE_LIMITED"
    assert error.data["retry_after"] is None
    assert sent_again(error)


# ---- H1, H2: connections


async def test_h1_a_server_that_closes_kept_alive_connections_early(
    exchange: Exchange, witness: Witness
) -> None:
    failures = []
    for number in range(60):
        try:
            await exchange.answer("early", f"early-{number}", ms=number % 4)
        except CodedError as error:  # the close met the request: named, and safe to send again
            failures.append(error)
    assert {str(error.code) for error in failures} <= {"TRANSPORT.DISCONNECTED", "UPSTREAM.TRUNCATED"}
    assert all(sent_again(error) for error in failures)
    assert len(failures) < 60
    assert max(witness.counts()["arrived"].values()) == 1  # nothing below us sends twice


async def test_h1_an_idle_connection_is_dropped_before_the_server_would(
    exchange: Exchange, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KEEPALIVE < 5.0  # uvicorn's keep-alive timeout, which SGLang and vLLM use


@pytest.mark.parametrize("query", [{}, {"abort": 1}])
async def test_h2_a_connection_closed_at_once(
    exchange: Exchange, witness: Witness, query: dict[str, Any]
) -> None:
    error = await exchange.failure("close", "closed", **query)
    assert error.code == "TRANSPORT.DISCONNECTED"
    assert sent_again(error)
    assert witness.arrivals("closed") == 1


async def test_nothing_listens(client: Client) -> None:
    with socket.socket() as held:  # bound, so that nobody else has the port, and not listening
        held.bind(("127.0.0.1", 0))
        item = Item("r", 1, f"http://127.0.0.1:{held.getsockname()[1]}/", b"{}", {})
        with pytest.raises(CodedError) as caught:
            await transport.exchange(client, item, 20.0)
    assert caught.value.code == "TRANSPORT.CONNECT"
    assert caught.value.data["url"] == item.url
    assert caught.value.origin.type.endswith("ConnectError")


async def test_a_host_that_does_not_exist(client: Client) -> None:
    with pytest.raises(CodedError) as caught:
        await transport.exchange(client, Item("r", 1, "http://no.such.host.invalid/", b"{}", {}), 30.0)
    assert caught.value.code in ("TRANSPORT.CONNECT", "TIMEOUT.CONNECT")


@pytest.mark.parametrize("url", ["http://h\x7f/", "http://" + "x" * 70_000 + "/"])
async def test_a_url_that_only_the_client_refuses(client: Client, url: str) -> None:
    with pytest.raises(CodedError) as caught:
        await transport.exchange(client, Item("r", 1, url, b"{}", {}), 20.0)
    assert caught.value.code == "REQUEST.INVALID"


async def test_what_is_no_http(exchange: Exchange) -> None:
    error = await exchange.failure("garbage")
    assert error.code.family == "TRANSPORT"
    assert sent_again(error)


# ---- H4: a 200 that is no success


@pytest.mark.parametrize(
    ("behaviour", "query", "code"),
    [
        ("cut", {}, "UPSTREAM.TRUNCATED"),
        ("html", {}, "UPSTREAM.BAD_BODY"),
        ("raw", {"body": '{"cut": [1, 2'}, "UPSTREAM.BAD_BODY"),
        ("raw", {"body": "[" * 2000}, "UPSTREAM.BAD_BODY"),
        ("bad_gzip", {}, "UPSTREAM.BAD_BODY"),
    ],
)
async def test_h4_a_200_with_a_bad_body(
    exchange: Exchange, behaviour: str, query: dict[str, Any], code: str
) -> None:
    error = await exchange.failure(behaviour, **query)
    assert error.code == code
    assert sent_again(error)


@pytest.mark.parametrize("body", ["{}", "[]", "null", "5", '"text"', '{"unexpected": {"shape": [1]}}'])
async def test_h4_json_of_any_shape_is_the_callers_to_judge(exchange: Exchange, body: str) -> None:
    answer = await exchange.answer("raw", body=body)
    assert answer.status == 200


async def test_engines_write_nan_and_mean_it(exchange: Exchange) -> None:
    data = (await exchange.answer("raw", body='{"logprob": NaN, "worst": -Infinity}')).data
    assert math.isnan(data["logprob"])
    assert data["worst"] == -math.inf


async def test_a_body_over_the_limit(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_BODY", 100_000)
    assert (await exchange.answer("big", size=90_000)).data == "x" * 90_000
    error = await exchange.failure("big", size=200_000)
    assert error.code == "UPSTREAM.BAD_BODY"
    assert "100000" in error.detail


async def test_a_compressed_body_counts_as_what_it_becomes(
    name: Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_BODY", 100_000)
    bomb = gzip.compress(b'"' + b"x" * 10_000_000 + b'"')

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
        writer.write(head.encode() + bomb)
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        contextlib.aclosing(make_client(1, name)) as client,
    ):
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CodedError) as caught:
            await transport.exchange(client, Item("r", 1, f"http://127.0.0.1:{port}/", b"{}", {}), 20.0)
    assert caught.value.code == "UPSTREAM.BAD_BODY"


# ---- event streams


async def test_a_stream_with_its_end(exchange: Exchange) -> None:
    assert (await exchange.answer("sse")).data == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("error", "UPSTREAM.STREAM_ERROR"),
        ("silent", "UPSTREAM.TRUNCATED"),
        ("cut", "UPSTREAM.TRUNCATED"),
        ("nonsense", "UPSTREAM.BAD_BODY"),
    ],
)
async def test_a_stream_without_a_good_end(exchange: Exchange, end: str, code: str) -> None:
    error = await exchange.failure("sse", end=end)
    assert error.code == code
    assert sent_again(error)


async def test_an_error_event_is_quoted(exchange: Exchange) -> None:
    assert "engine fell over" in (await exchange.failure("sse", end="error")).detail


async def test_a_line_separator_inside_an_event_does_not_end_it(name: Name) -> None:
    # U+2028 may stand raw in JSON, and str.splitlines() takes it for the end of a line.
    text = 'data: {"text": "a\u2028b\x85c\x0cd"}\n\ndata: [DONE]\n\n'.replace("\x0c", "")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        body = text.encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        contextlib.aclosing(make_client(1, name)) as client,
    ):
        port = server.sockets[0].getsockname()[1]
        item = Item("r", 1, f"http://127.0.0.1:{port}/", b"{}", {})
        answer = await transport.exchange(client, item, 20.0)
    assert answer.data == [{"text": "a\u2028b\x85cd"}]


# ---- H5: time


@pytest.mark.parametrize("behaviour", ["hang", "slow"])
async def test_h5_a_server_that_never_finishes(exchange: Exchange, witness: Witness, behaviour: str) -> None:
    error = await exchange.failure(behaviour, "late", budget=0.5)
    assert error.code == "TIMEOUT.DEADLINE"
    assert not sent_again(error)
    assert error.data["url"]
    await until(lambda: witness.counts()["disconnected"].get("late") == 1, what="the server sees it")
    assert witness.counts()["in_flight"] == 0


async def test_h5_a_server_that_never_accepts(client: Client) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        with pytest.raises(CodedError) as caught:
            await transport.exchange(client, Item("r", 1, f"http://127.0.0.1:{port}/", b"{}", {}), 0.5)
        for filler in fillers:
            filler.close()
    assert caught.value.code in ("TIMEOUT.DEADLINE", "TIMEOUT.CONNECT")


async def test_a_cancelled_exchange_closes_its_connection(
    exchange: Exchange, name: Name, witness: Witness
) -> None:
    # reqwest lets a request run until its budget is spent, though nobody waits for it any more.
    task = asyncio.create_task(exchange.answer("hang", "gone", budget=2.0 if name == "reqwest" else 50.0))
    await until(lambda: witness.arrivals("gone") == 1)
    task.cancel()
    async with asyncio.timeout(1.0):
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: witness.counts()["disconnected"].get("gone") == 1, timeout=10)


async def test_an_exchange_that_is_cancelled_in_the_body_closes_its_connection(
    exchange: Exchange, witness: Witness
) -> None:
    for number in range(20):  # some of the cancellations meet a byte of the body
        id = f"gone-{number}"
        task = asyncio.create_task(exchange.answer("slow", id, budget=50.0, every=0.002))
        await until(lambda id=id: witness.arrivals(id) == 1)
        await asyncio.sleep(0.02 + number * 0.0005)
        task.cancel()
        async with asyncio.timeout(1.0):
            with pytest.raises(asyncio.CancelledError):
                await task
    await until(lambda: witness.counts()["connections"] == 0, timeout=10)


async def test_cancelled_over_and_over_it_still_closes_its_connection(
    exchange: Exchange, witness: Witness
) -> None:
    for number in range(60):
        id = f"gone-{number}"
        # Long enough to be seen there first; reqwest lets it run until its budget is spent.
        task = asyncio.create_task(exchange.answer("hang", id, budget=3.0))
        await until(lambda id=id: witness.arrivals(id) == 1)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        assert task.cancelled()
    await until(lambda: witness.counts()["connections"] == 0)


async def test_the_client_never_makes_a_request_wait(client: Client, witness: Witness) -> None:
    exchange = Exchange(client, witness)
    await asyncio.gather(*(exchange.answer("ok", f"r{n}", delay=2.0) for n in range(40)))
    assert witness.counts()["peak"] == 40


async def test_proxies_of_the_environment_are_not_used(
    exchange: Exchange, name: Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with contextlib.aclosing(make_client(1, name)) as client:
        await Exchange(client, exchange.witness).answer("ok")
