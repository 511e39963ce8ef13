"""Routers: what holds for each, and what a real sglang-router does around it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest

from dispatch.engines.routers import Router, SglangRouter, StaticRouter
from protocol import CodedError
from tests.dispatch.engines.processes import Tag
from tests.real_engines.places import free_port
from tests.real_engines.running import Running, llama_worker, sglang_router

KEY = "sesame-open-for-nobody"


@pytest.fixture(scope="module")
def module_tag() -> Iterator[Tag]:
    one = Tag()
    yield one
    assert one.alive() == []


@pytest.fixture(scope="module")
def workers(
    tmp_path_factory: pytest.TempPathFactory, module_tag: Tag, quick_model: Path
) -> Iterator[list[Running]]:
    folder = tmp_path_factory.mktemp("workers")
    both = [llama_worker(folder, module_tag.env, quick_model) for _ in range(2)]
    try:
        yield [worker.start() for worker in both]
    finally:
        for worker in both:
            worker.kill()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, module_tag: Tag) -> Iterator[Running]:
    one = sglang_router(tmp_path_factory.mktemp("router"), module_tag.env, KEY)
    try:
        yield one.start()
    finally:
        one.kill()


@pytest.fixture
async def sglang(running: Running) -> AsyncIterator[SglangRouter]:
    router = SglangRouter(running.url, KEY)
    yield router
    await router.close()
    cleaner = SglangRouter(running.url, KEY)
    for url in await cleaner.urls():
        await cleaner.remove(url)
    await cleaner.close()


@pytest.fixture(params=["static", "static file", "sglang-router"])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Router:
    if request.param == "sglang-router":
        return cast(SglangRouter, request.getfixturevalue("sglang"))
    return StaticRouter(tmp_path / "urls.json" if "file" in request.param else None)


async def test_contract(router: Router, workers: list[Running]) -> None:
    one, two = (worker.url for worker in workers)
    assert await router.urls() == ()
    await router.remove(one)
    await router.add(one)
    assert await router.urls() == (one,)
    await router.add(one)
    await router.add(f"{one}/")
    await router.add(two)
    assert set(await router.urls()) == {one, two}
    await router.remove(f"{one}/")
    assert await router.urls() == (two,)
    await router.remove(one)
    await router.reconcile([one, f"{one}/"])
    assert await router.urls() == (one,), "what is missing was added, what nobody wants any more is gone"
    await router.reconcile([])
    assert await router.urls() == ()
    with pytest.raises(CodedError, match="is no URL") as caught:
        await router.add("127.0.0.1:30000")
    assert caught.value.code == "CONFIG.INVALID"
    await router.close()
    await router.close()


async def generate(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        body = {"model": "any", "prompt": "One, two", "max_tokens": 2}
        headers = {"Authorization": f"Bearer {KEY}"}
        return (await client.post(f"{url}/v1/completions", json=body, headers=headers)).status_code


async def test_others_engines_stay(running: Running, sglang: SglangRouter, workers: list[Running]) -> None:
    mine = SglangRouter(running.url, KEY)
    await sglang.add(workers[0].url)
    await mine.add(workers[1].url)
    await mine.reconcile([])
    assert await mine.urls() == (workers[0].url,)
    await mine.close()


async def test_a_dead_engine(
    sglang: SglangRouter,
    running: Running,
    workers: list[Running],
    tmp_path: Path,
    tag: Tag,
    quick_model: Path,
) -> None:
    """The router goes on listing it, and says nothing of running its requests elsewhere."""
    mortal = llama_worker(tmp_path, tag.env, quick_model).start()
    await sglang.reconcile([mortal.url, workers[0].url])
    assert [await generate(running.url) for _ in range(2)] == [200, 200]
    mortal.kill()
    assert [await generate(running.url) for _ in range(4)] == [200] * 4
    assert mortal.url in await sglang.urls()
    await sglang.remove(mortal.url)
    assert await sglang.urls() == (workers[0].url,)
    assert await generate(running.url) == 200


async def test_a_router_that_was_restarted(tmp_path: Path, tag: Tag, workers: list[Running]) -> None:
    real = sglang_router(tmp_path, tag.env, KEY)
    router = SglangRouter(real.url, KEY, timeout=5)
    urls = sorted(worker.url for worker in workers)
    try:
        with pytest.raises(CodedError) as caught:
            await router.add(urls[0])
        assert caught.value.code == "TRANSPORT.CONNECT"
        real.start()
        await router.reconcile(urls)
        real.kill()
        with pytest.raises(CodedError):
            await router.urls()
        real.start()
        assert await router.urls() == ()
        await router.reconcile(urls)
        assert sorted(await router.urls()) == urls
    finally:
        real.kill()
        await router.close()


async def test_an_engine_out_of_reach(
    running: Running, sglang: SglangRouter, tmp_path: Path, tag: Tag, quick_model: Path
) -> None:
    """It is not taken in. The router goes on trying, also after a removal; when it succeeds late, the list is
    put right."""
    late = llama_worker(tmp_path, tag.env, quick_model, free_port())
    # A removal waits for a second first: what is left has to be enough for a busy machine.
    router = SglangRouter(running.url, KEY, timeout=3)
    with pytest.raises(CodedError, match=r"did not take .* in within 3 s") as caught:
        await router.add(late.url)
    assert caught.value.code == "TIMEOUT.DEADLINE"
    await router.remove(late.url)
    try:
        late.start()

        async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {KEY}"}) as client:

            async def listed() -> bool:
                return late.url in (await client.get(f"{running.url}/workers")).text

            while not await listed():  # the test's time limit ends it
                pass
        await router.reconcile([])
        assert await router.urls() == ()
    finally:
        late.kill()
        await router.close()


async def test_a_wrong_key(running: Running) -> None:
    for key in (None, "guessed"):
        router = SglangRouter(running.url, key)
        with pytest.raises(CodedError, match="answered 401") as caught:
            await router.urls()
        assert caught.value.code == "REQUEST.UNAUTHORIZED"
        assert "guessed" not in repr(caught.value) + repr(caught.value.data)
        await router.close()
        with pytest.raises(CodedError, match="was closed") as caught:
            await router.urls()
        assert caught.value.code == "POOL.CLOSED"


async def test_a_list_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "urls.json"
    path.write_text("of an earlier run")
    router = StaticRouter(path)
    assert json.loads(path.read_text()) == {"urls": []}
    await router.reconcile(["http://b:1", "http://a:1"])
    assert json.loads(path.read_text()) == {"urls": ["http://b:1", "http://a:1"]}
    await router.remove("http://b:1")
    assert json.loads(path.read_text()) == {"urls": ["http://a:1"]}
    assert os.listdir(tmp_path) == ["urls.json"]
    with pytest.raises(CodedError, match="make its folder first") as caught:
        StaticRouter(tmp_path / "no" / "urls.json")
    assert caught.value.code == "CONFIG.INVALID"


async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    router = StaticRouter(tmp_path / "urls.json")
    (tmp_path / "urls.json").unlink()
    (tmp_path / "urls.json").mkdir()
    with pytest.raises(CodedError) as caught:
        await router.add("http://a:1")
    assert caught.value.code == "NODE.IO"
    assert await router.urls() == (), "the list and the file say the same"
    assert os.listdir(tmp_path) == ["urls.json"]
