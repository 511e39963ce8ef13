"""SglangRouter against routers that misbehave and against one of the older kind, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web

from dispatch.engines.routers import SglangRouter
from protocol import CodedError

ENGINE = "http://127.0.0.1:30001"
KEY = "sesame-open-for-nobody"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def router_of(handler: Handler, **options: Any) -> AsyncIterator[SglangRouter]:
    """A client of a router whose every reply ``handler`` gives."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        one = SglangRouter(f"http://127.0.0.1:{port}", **options)
        yield one
        await one.close()
    finally:
        await runner.cleanup()
        for _ in range(3):
            await asyncio.sleep(0)  # a closed transport lets go of its socket a round later


class OldRouter:
    """The interface of sglang-router 0.1, as 0.1.9 shows it."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.asked: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        path, url = request.path, request.query.get("url", "")
        self.asked.append(f"{request.method} {path}")
        if request.method == "GET" and path == "/list_workers":
            return web.json_response({"urls": self.urls})
        if request.method == "POST" and path == "/add_worker":
            if url in self.urls:
                return web.Response(status=400, text=f"Worker {url} already exists")
            self.urls.append(url)
            return web.Response(text=f"Successfully added worker: {url}")
        if request.method == "POST" and path == "/remove_worker":
            self.urls.remove(url)
            return web.Response(text=f"Successfully removed worker: {url}")
        return web.Response(status=404)


async def test_an_older_router() -> None:
    old = OldRouter()
    async with router_of(old.handle) as router:
        await router.add(ENGINE)
        await router.add(ENGINE)
        old.urls.append("http://of.another:1")
        assert await router.urls() == (ENGINE, "http://of.another:1")
        await router.reconcile(["http://b:1"])
        assert await router.urls() == ("http://b:1", "http://of.another:1")
        await router.remove("http://b:1")
        await router.remove("http://b:1")
        assert old.urls == ["http://of.another:1"]
        assert old.asked.count("GET /workers") == 1, "asked for the newer paths once"


async def failure(handler: Handler, **options: Any) -> CodedError:
    async with router_of(handler, **options) as router:
        with pytest.raises(CodedError) as caught:
            await router.add(ENGINE)
    error = caught.value
    assert KEY not in f"{error!r} {error} {error.data}"
    return error


async def test_no_router_at_all() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=404)

    assert (await failure(handler)).code == "REQUEST.NOT_FOUND"


@pytest.mark.parametrize(
    "body", ["<html>hello</html>", "[]", '{"workers": [{"url": 1}]}', '{"workers": null}']
)
async def test_a_list_of_the_wrong_shape(body: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    error = await failure(handler)
    assert error.code == "UPSTREAM.BAD_BODY"
    assert "is it an sglang-router?" in error.detail
    assert error.data["body"] == body


async def test_a_router_that_echoes_the_key() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=500, text=f"who is {request.headers['Authorization'][7:]}?")

    error = await failure(handler, api_key=KEY)
    assert error.code == "UPSTREAM.SERVER_ERROR"
    assert error.data["body"] == "who is [api_key]?"


async def test_a_router_that_hangs() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    error = await failure(handler, timeout=0.2)
    assert error.code == "TIMEOUT.DEADLINE"
    assert "within 0.2 s" in error.detail


async def test_a_router_whose_reply_has_no_end() -> None:
    async def handler(request: web.Request) -> web.Response:
        reply = web.StreamResponse()
        await reply.prepare(request)
        with suppress(ConnectionError):  # nobody reads on
            for _ in range(64):
                await reply.write(bytes(1 << 20))
        return reply

    error = await failure(handler, timeout=20.0)
    assert error.code == "TRANSPORT.DISCONNECTED"


async def test_accepted_and_never_done() -> None:
    listed: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"workers": listed})
        return web.json_response({"status": "accepted"}, status=202)

    error = await failure(handler, timeout=0.3)
    assert error.code == "TIMEOUT.DEADLINE"
    assert f"did not take {ENGINE} in" in error.detail
    listed.append({"url": ENGINE, "id": "7"})
    async with router_of(handler, timeout=0.3) as router:
        with pytest.raises(CodedError, match=f"did not let go of {ENGINE} within") as caught:
            await router.remove(ENGINE)
    assert caught.value.code == "TIMEOUT.DEADLINE"


async def test_one_that_fails_keeps_no_other_out() -> None:
    listed: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            url = (await request.json())["url"]
            if "bad" in url:
                return web.Response(status=503)
            listed.append({"url": url, "id": url[-1]})
        return web.json_response({"workers": listed})

    async with router_of(handler) as router:
        with pytest.raises(CodedError) as caught:
            await router.reconcile(["http://bad:1", "http://bad:2", "http://good:3"])
        assert caught.value.code == "BACKPRESSURE.OVERLOADED"
        assert caught.value.data["further_failures"] == 1
        assert await router.urls() == ("http://good:3",)


async def test_removed_while_it_is_being_added() -> None:
    """A registration that was cancelled goes on in the router; a removal sees it through."""
    listed: list[dict[str, str]] = []
    accepted = asyncio.Event()

    async def register() -> None:
        await asyncio.sleep(0.3)
        listed.append({"url": ENGINE, "id": "7"})

    tasks = []

    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            tasks.append(asyncio.create_task(register()))
            accepted.set()
        if request.method == "DELETE":
            listed.clear()
        return web.json_response({"workers": listed}, status=200 if request.method == "GET" else 202)

    async with router_of(handler) as router:
        adding = asyncio.create_task(router.add(ENGINE))
        await accepted.wait()
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        await router.remove(ENGINE)
        assert tasks[0].done()
        assert listed == []


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:80", "ftp://a", "http://", "http://a:1/?x=1", "http://[::1", "http://me:secret@a:1"],
)
def test_no_url(url: str) -> None:
    with pytest.raises(CodedError, match="is no URL") as caught:
        SglangRouter(url)
    assert caught.value.code == "CONFIG.INVALID"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["", f"{KEY}\n", "schlüssel"])
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(CodedError, match="api_key is no printable text") as caught:
        SglangRouter("http://127.0.0.1:1", key)
    assert caught.value.code == "CONFIG.INVALID"
    assert KEY not in str(caught.value)
