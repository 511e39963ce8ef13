"""What stands at a URL is found out before a run, and said in one line that names the remedy."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from dispatch.rollout.reach import Reached, reach
from protocol import CodedError
from tests.dispatch.embedded.engine_under_test import EngineUnderTest
from tests.dispatch.rollout.servers import (
    OPENAI_ONLY,
    PAGE,
    UNAUTHORIZED,
    as_json,
    completion,
    serving,
)


async def refused(url: str, **more: Any) -> str:
    """The one line."""
    with pytest.raises(CodedError) as caught:
        await reach(url, **{"timeout": 20.0, **more})
    assert caught.value.code == "CONFIG.INVALID"
    assert len(caught.value.detail.splitlines()) == 1
    return caught.value.detail


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---- what is an engine


async def test_sglang_is_detected(shared: EngineUnderTest) -> None:
    found = await reach(shared.url)
    assert found == Reached(shared.url, "sglang", "", "default")
    shared.wait_counts(in_flight=0)


async def test_openai_is_taken_when_asked_for(shared: EngineUnderTest) -> None:
    found = await reach(shared.url, api="openai")
    assert found.api == "openai"
    assert found.model == shared.get("/v1/models").json()["data"][0]["id"]


@pytest.mark.parametrize("end", ["", "/", "/generate", "/generate/", "/v1", "/v1/", "/v1/completions"])
async def test_the_base_url_is_found_in_what_people_paste(end: str, shared: EngineUnderTest) -> None:
    assert (await reach(f" {shared.url}{end} ")).url == shared.url


async def test_an_openai_only_server_is_detected() -> None:
    with serving(OPENAI_ONLY) as server:
        found = await reach(server.url + "/v1")
        assert found == Reached(server.url, "openai", "tiny", None)
        assert server.asked == ["/generate", "/v1/models", "/v1/completions"]


async def test_a_model_that_is_named_is_not_looked_up() -> None:
    with serving(OPENAI_ONLY) as server:
        assert (await reach(server.url, api="openai", model="tiny")).model == "tiny"
        assert server.asked == ["/v1/completions"]


async def test_a_server_below_a_path() -> None:
    with serving({"/gpu7/v1/completions": completion}) as server:
        found = await reach(f"{server.url}/gpu7/v1/", model="tiny")
        assert found.url == f"{server.url}/gpu7"


async def test_headers_are_sent_and_found_missing() -> None:
    with serving(OPENAI_ONLY, authorization="Bearer s3cret") as server:
        line = await refused(server.url)
        assert "401" in line
        assert "--header" in line
        found = await reach(server.url, headers={"Authorization": "Bearer s3cret"})
        assert found.api == "openai"
        assert all(h["authorization"] == "Bearer s3cret" for h in server.headers[1:])


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_401_of_one_path_names_the_header_too(path: str) -> None:
    with serving({path: lambda _: UNAUTHORIZED}) as server:
        assert "--header" in await refused(server.url)


async def test_a_wrong_key_is_not_repeated() -> None:
    with serving(OPENAI_ONLY, authorization="Bearer right") as server:
        line = await refused(server.url, headers={"Authorization": "Bearer wr0ng-key"})
        assert "wr0ng-key" not in line


# ---- what is none


async def test_nothing_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    line = await refused(url)
    assert url in line
    assert "nothing listens" in line


async def test_a_name_that_does_not_resolve() -> None:
    assert "nothing listens" in await refused("http://engine.invalid:30000")


async def test_404_everywhere() -> None:
    with serving({}) as server:
        line = await refused(server.url)
        assert server.url in line
        assert "404" in line
        assert "/generate" in line
        assert "/v1/completions" in line


@pytest.mark.parametrize("api", ["sglang", "openai"])
async def test_the_other_dialect_is_not_tried_when_one_is_named(api: Any) -> None:
    with serving({}) as server:
        line = await refused(server.url, api=api)
        other = "/v1/completions" if api == "sglang" else "/generate"
        assert other not in server.asked
        assert other not in line  # it was never asked for, so nothing is known of it


async def test_a_web_page() -> None:
    with serving({}, otherwise=PAGE) as server:
        line = await refused(server.url)
        assert server.url in line
        assert "not as an inference engine" in line
        assert "text/html" in line


async def test_json_that_is_no_generation() -> None:
    with serving({}, otherwise=as_json({"status": "ok"})) as server:
        assert "not as an inference engine" in await refused(server.url)


async def test_an_unknown_model_is_named() -> None:
    with serving(OPENAI_ONLY) as server:
        line = await refused(server.url, api="openai", model="huge")
        assert "no model 'huge'" in line


async def test_an_engine_that_refuses() -> None:
    body = as_json({"error": {"message": "text must be a list"}}, 400)
    with serving({"/generate": lambda _: body}) as server:
        line = await refused(server.url)
        assert "text must be a list" in line
        assert "REQUEST.REJECTED" in line


async def test_an_engine_that_fails() -> None:
    with serving({}, otherwise=as_json({"error": "CUDA is gone"}, 500)) as server:
        assert "CUDA is gone" in await refused(server.url)


async def test_an_abort_is_no_generation(shared: EngineUnderTest) -> None:
    shared.faults("abort", times=1)
    assert "UPSTREAM.ABORTED" in await refused(shared.url)


async def test_no_answer_in_time(shared: EngineUnderTest) -> None:
    shared.faults("hang", times=2)
    line = await refused(shared.url, timeout=0.3)
    assert "no whole answer" in line


async def test_a_server_that_closes() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert "no whole answer" in await refused(f"http://127.0.0.1:{port}")


async def test_something_else_than_http() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert "no whole answer" in await refused(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:30000",
        "127.0.0.1:30000",
        "ftp://host/",
        "http://",
        "http://:80",
        "http://host:99999",
        "http://host:port",
        "http://[::1",
        "http://host/?model=a",
        "http://host/#a",
        "http://\ud800",
        "http://ho st:1",
        "http://host\n:1",
    ],
    ids=ascii,
)
async def test_a_malformed_url(url: str) -> None:
    line = await refused(url, timeout=5.0)
    assert "URL" in line or "engine" in line
    assert "http" in line


async def test_a_header_that_cannot_be_sent() -> None:
    with pytest.raises(CodedError) as caught:
        await reach("http://127.0.0.1:1", headers={"X": "a\nb"})
    assert caught.value.code == "REQUEST.INVALID"
