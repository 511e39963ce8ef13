"""A failure's name over real sockets, from two kinds of server to four clients."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest
from aiohttp import web

from faults import name_of
from protocol import Code, CodedError, Trust, mint
from protocol.carriers.http_middleware import ProblemMiddleware, problem_middleware
from protocol.carriers.http_problem import problem
from protocol.carriers.http_reply import HEADER, PROBLEM
from tests.protocol.http.clients import BROKEN, CLIENTS, ask, stream
from tests.protocol.http.servers import Application, Wire, asgi, chunked, plain

ERROR = CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog – naïve, 'quoted' \x00", {"step": 7})


async def aiohttp_handler(request: web.Request) -> web.StreamResponse:
    kind = request.match_info["kind"]
    if kind == "begun":
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * 70_000)
        raise copy(ERROR)
    if kind == "prepared":
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        raise copy(ERROR)
    if kind == "http":
        raise web.HTTPNotFound(text="no such thing")
    if kind == "foreign":
        raise TimeoutError("no answer")
    if kind == "ok":
        return web.Response(text="ok")
    raise copy(ERROR)


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    kind = scope["path"].rpartition("/")[2]
    if kind == "foreign":
        raise TimeoutError("no answer")
    if kind in ("ok", "begun"):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": kind == "begun"})
    if kind != "ok":
        raise copy(ERROR)


@pytest.fixture(scope="module")
def served() -> Iterator[Application]:
    app = web.Application(middlewares=[problem_middleware(name=name_of)])
    app.router.add_get("/aiohttp/{kind}", aiohttp_handler)
    app.router.add_get("/asgi/{kind}", asgi(ProblemMiddleware(asgi_app, name=name_of)))
    with Application(app) as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("server", ["aiohttp", "asgi"])
async def test_what_escapes_a_handler_arrives_by_its_name(
    served: Application, server: str, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "failsoft"):
        for asked in (ask, stream):
            seen = await asked(client, f"{served.url}/{server}/coded")
            assert (seen.status, seen.headers["content-type"]) == (500, PROBLEM)
            found = seen.reading
            assert (found.code, found.id, found.raw) == (ERROR.code, ERROR.id, ERROR.token)
            assert (found.detail, found.data) == (ERROR.detail, ERROR.data)
            assert found.trust is Trust.STRUCTURED
    logged = [record for record in caplog.records if ERROR.token in record.getMessage()]
    assert [record.exc_info[1] for record in logged if record.exc_info] == [ERROR, ERROR]


@pytest.mark.parametrize("server", ["aiohttp", "asgi"])
async def test_a_foreign_exception_is_named_first(served: Application, server: str) -> None:
    seen = await ask("httpx", f"{served.url}/{server}/foreign")
    assert (seen.status, seen.reading.code) == (504, "TIMEOUT.DEADLINE")
    assert seen.reading.detail == "TimeoutError: no answer"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("path", ["aiohttp/begun", "aiohttp/prepared", "asgi/begun"])
async def test_a_reply_that_has_begun_is_broken_off(served: Application, path: str, client: str) -> None:
    """It can't be taken back: the client sees a body that is cut, and never a whole 200."""
    with pytest.raises(BROKEN):
        await ask(client, f"{served.url}/{path}")


async def test_what_is_no_failure_passes(served: Application) -> None:
    assert (await ask("httpx", f"{served.url}/aiohttp/http")).status == 404
    for server in ("aiohttp", "asgi"):
        seen = await ask("httpx", f"{served.url}/{server}/ok")
        assert (seen.status, seen.reading.code) == (200, None)
        assert HEADER not in seen.headers


async def test_other_protocols_of_asgi_pass() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])
        raise copy(ERROR)

    with pytest.raises(CodedError):
        await ProblemMiddleware(app)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]  # unused here
    assert seen == ["lifespan"]


MADE = problem(ERROR)
ENCODED = {
    "identity": MADE.body,
    "gzip": gzip.compress(MADE.body),
    "deflate": zlib.compress(MADE.body),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("frame", [plain, chunked])
async def test_encodings(frame: Any, encoding: str, client: str) -> None:
    body = ENCODED[encoding]
    with Wire(lambda path, head: [frame(body, content_type=PROBLEM, content_encoding=encoding)]) as wire:
        for asked in (ask, stream):
            found = (await asked(client, wire.url)).reading
            assert (found.code, found.id, found.detail) == (ERROR.code, ERROR.id, ERROR.detail)


async def test_deflate_without_its_wrapper_and_encodings_that_are_not_read() -> None:
    raw = zlib.compressobj(wbits=-15)
    body = raw.compress(MADE.body) + raw.flush()
    for encoding, expected in (("deflate", ERROR.code), ("zstd", None), ("gzip, gzip", None), ("gzip", None)):
        with Wire(lambda path, head: [plain(body, content_type=PROBLEM, content_encoding=encoding)]) as wire:  # noqa: B023 - served before the next round
            assert (await stream("httpx", wire.url)).reading.code == expected


TOKEN = mint("NODE.IO", "ABCDEFGH")
OTHER = mint("TASK.FAILED", "HGFEDCBA")
PAGE = b"<html>502 Bad Gateway</html>"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (plain(MADE.body, content_type=f"{PROBLEM}; charset=utf-8"), ERROR.code),
        (plain(MADE.body, content_type="Application/Problem+JSON ;charset=UTF-8"), ERROR.code),
        (plain(MADE.body, content_type=f"{PROBLEM}; charset=utf-16"), ERROR.code),
        (plain(MADE.body, content_type=f"{PROBLEM}; charset=no-such-charset"), ERROR.code),
        (plain(MADE.body.decode().encode("latin-1", "replace"), content_type=PROBLEM), ERROR.code),
        (plain(b"\xef\xbb\xbf" + MADE.body, content_type=PROBLEM), ERROR.code),
        (plain(MADE.body, content_type="text/html"), ERROR.code),  # by the token in its text
        (plain(PAGE, X_FAILSOFT_CODE=TOKEN), "NODE.IO"),
        (plain(PAGE, x_failsoft_code=TOKEN.lower()), "NODE.IO"),
        (plain(PAGE, x_failsoft_code=f"  {TOKEN}\t"), "NODE.IO"),
        (plain(PAGE, x_failsoft_code=f"{TOKEN}\r\nX-Failsoft-Code: {TOKEN}"), "NODE.IO"),
        (plain(PAGE, x_failsoft_code=f"{TOKEN}\r\nX-Failsoft-Code: {OTHER}"), "NODE.IO"),
        (plain(PAGE, x_failsoft_code=f"nonsense\r\nX-Failsoft-Code: {TOKEN}"), "NODE.IO"),
        (plain(PAGE, x_failsoft_code=f"model said {TOKEN}"), None),
        (plain(PAGE, x_failsoft_code=TOKEN[:-1]), None),
        (plain(PAGE, x_failsoft_code="é" * 4000), None),
        (plain(PAGE, x_other=TOKEN, server=TOKEN), None),
        (plain(MADE.body, content_type=PROBLEM, x_failsoft_code=TOKEN), "NODE.IO"),
        (plain(b"ok", status=200, x_failsoft_code=TOKEN), "NODE.IO"),
    ],
)
async def test_headers(client: str, reply: bytes, code: str | None) -> None:
    with Wire(lambda path, head: [reply]) as wire:
        assert (await ask(client, wire.url)).reading.code == code
        assert (await stream(client, wire.url)).reading.code == code


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_header_inside_a_body_is_none(client: str) -> None:
    """A reply within a reply, as a server that quotes its upstream sends it: text, and believed as such."""
    quoted = f"HTTP/1.1 500 x\r\n{HEADER}: {TOKEN}\r\ncontent-type: {PROBLEM}\r\n\r\n".encode() + MADE.body
    for status, expected in ((500, Code("NODE.IO")), (200, None)):
        with Wire(lambda path, head: [plain(quoted, status=status)]) as wire:  # noqa: B023 - served before the next round
            found = (await ask(client, wire.url)).reading
            assert (found.code, found.trust) == (expected, Trust.CHECKSUMMED if expected else Trust.NONE)
