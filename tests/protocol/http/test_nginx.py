"""A failure's name through a real nginx: pages replaced, compressed, cut, and answered by nginx itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import classify_status
from protocol import CodedError, Reading, Trust
from protocol.carriers.http_problem import problem
from protocol.carriers.http_reply import HEADER, PROBLEM
from tests.protocol.http.clients import BROKEN, CLIENTS, ask, stream
from tests.protocol.http.proxies import Nginx, free_port
from tests.protocol.http.servers import Wire, chunked, plain

ERROR = CodedError("ENGINE.UNHEALTHY", "the watchdog fired", {"step": 7})
MADE = problem(ERROR)
MISSING = CodedError("REQUEST.NOT_FOUND", "no such adapter")
PAGE = "<html><h1>Something went wrong</h1></html>"
DOCS = Path(__file__).parents[3] / "docs" / "http.md"


def replies(path: str, head: bytes) -> Iterator[bytes]:
    made = problem(MISSING) if path == "/missing" else MADE
    headers = {name.replace("-", "_"): value for name, value in made.headers.items()}
    if path == "/cut":
        yield chunked(made.body, status=made.status, **headers)[:-60]
    elif path == "/cut-stream":
        yield chunked(b'data: {"text": "a"}\n\n' * 5, status=200, content_type="text/event-stream")[:-20]
    elif path == "/unframed":  # as a server answers HTTP/1.0, which has no chunks: the end is the close
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"
    elif path == "/bare":
        yield plain(b"Internal Server Error", status=500, content_type="text/plain")
    else:
        yield plain(made.body, status=made.status, **headers)


@pytest.fixture(scope="module")
def engine() -> Iterator[Wire]:
    with Wire(replies) as wire:
        yield wire


def documented() -> str:
    """The configuration that docs/http.md tells operators to use."""
    block = re.search(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None, f"{DOCS} has no nginx block"
    return block.group(1)


INTERCEPT = """
    location / {{
        proxy_pass {engine};
        proxy_intercept_errors on;
        error_page 500 502 503 504 /50x.html;
    }}
"""


async def test_nginx_that_passes_errors_on_changes_nothing(tmp_path: Path, engine: Wire) -> None:
    with Nginx(tmp_path, f"location / {{ proxy_pass {engine.url}; }}") as proxy:
        for client in CLIENTS:
            seen = await ask(client, f"{proxy.url}/")
            assert (seen.status, seen.reading.code, seen.reading.id) == (503, ERROR.code, ERROR.id)
            assert (seen.reading.detail, seen.reading.trust) == (ERROR.detail, Trust.STRUCTURED)


async def test_error_pages_lose_the_name_unless_told_to_keep_it(tmp_path: Path, engine: Wire) -> None:
    """What nginx does by default: the header goes with the body. So the line in docs/http.md is needed."""
    bare = INTERCEPT.format(engine=engine.url)
    with Nginx(tmp_path, f"{bare} location = /50x.html {{ internal; }}", {"50x.html": PAGE}) as proxy:
        seen = await ask("httpx", f"{proxy.url}/")
        assert (seen.status, seen.reading) == (503, Reading())
        assert HEADER not in seen.headers


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_documented_lines_keep_it(tmp_path: Path, engine: Wire, client: str) -> None:
    server = documented().replace("http://engines", engine.url)
    with Nginx(tmp_path, server, {"50x.html": PAGE}) as proxy:
        for asked in (ask, stream):
            seen = await asked(client, f"{proxy.url}/generate")
            assert (seen.status, seen.headers["content-type"]) == (503, "text/html")
            assert (seen.reading.code, seen.reading.id) == (ERROR.code, ERROR.id)
            assert seen.reading.trust is Trust.CHECKSUMMED
        # A failure without a name stays without one, and what is not replaced is not doubled.
        assert (await ask(client, f"{proxy.url}/bare")).reading == Reading()
        whole = await ask(client, f"{proxy.url}/missing")
        assert (whole.status, whole.reading.code) == (404, MISSING.code)
        assert whole.headers[HEADER] == MISSING.token


async def test_a_page_of_nginx_itself_has_no_name_and_a_status(tmp_path: Path) -> None:
    """Nothing listens behind it: nginx says 502, in HTML, and the status alone names the failure."""
    dead = f"http://127.0.0.1:{free_port()}"
    server = documented().replace("http://engines", dead)
    with Nginx(tmp_path, server, {"50x.html": PAGE}) as proxy:
        for client in CLIENTS:
            seen = await ask(client, f"{proxy.url}/generate")
            assert (seen.status, seen.reading) == (502, Reading())
            fault = classify_status(seen.status, seen.headers, PAGE)
            assert fault is not None
            assert (fault.code, fault.status) == ("UPSTREAM.BAD_GATEWAY", 502)


@pytest.mark.parametrize("client", CLIENTS)
async def test_nginx_compresses(tmp_path: Path, engine: Wire, client: str) -> None:
    """nginx compresses 200, 403 and 404 alone."""
    server = f"""
        gzip on; gzip_proxied any; gzip_min_length 1; gzip_types {PROBLEM};
        location / {{ proxy_pass {engine.url}; }}
    """
    with Nginx(tmp_path, server) as proxy:
        for asked in (ask, stream):
            seen = await asked(client, f"{proxy.url}/missing", {"Accept-Encoding": "gzip"})
            assert seen.headers["content-encoding"] == "gzip"
            assert (seen.status, seen.reading.code, seen.reading.id) == (404, MISSING.code, MISSING.id)
            assert seen.reading.detail == MISSING.detail
        assert "content-encoding" not in (await ask(client, f"{proxy.url}/")).headers


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("buffering", ["off", "on"])
async def test_a_reply_cut_behind_nginx(
    tmp_path: Path, engine: Wire, buffering: str, version: str, client: str
) -> None:
    server = f"""
        location / {{
            proxy_pass {engine.url};
            proxy_http_version {version};
            proxy_buffering {buffering};
        }}
    """
    with Nginx(tmp_path, server) as proxy:
        seen = await stream(client, f"{proxy.url}/cut")
        assert (seen.status, seen.reading.code, seen.reading.id) == (503, ERROR.code, ERROR.id)
        # A stream that began well: no name, and the client notices that it is cut.
        assert (await stream(client, f"{proxy.url}/cut-stream")).reading == Reading()
        with pytest.raises(BROKEN):
            await ask(client, f"{proxy.url}/cut-stream")


async def test_a_cut_that_no_framing_shows(tmp_path: Path, engine: Wire) -> None:
    """Why docs/http.md asks for proxy_http_version 1.1: nobody can tell this from a whole reply."""
    with Nginx(tmp_path, f"location / {{ proxy_pass {engine.url}; }}") as proxy:
        seen = await ask("httpx", f"{proxy.url}/unframed")
        assert (seen.status, seen.reading) == (200, Reading())
