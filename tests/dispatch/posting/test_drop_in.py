"""`as_post`: slime's calling convention, by decision."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import re
from typing import Any

import pytest

from dispatch.posting.drop_in import Post, as_post
from faults import Backoff
from protocol import CodedError
from tests.support.fixtures import MakePool
from tests.support.wait import until
from tests.support.witness import ROOT, Witness

pytestmark = pytest.mark.timeout(120)
QUICKLY = Backoff(0.01, 0.05)


async def failure(awaitable: Any) -> CodedError:
    with pytest.raises(CodedError) as caught:
        await awaitable
    return caught.value


def arrived(witness: Witness) -> int:
    return sum(witness.counts()["arrived"].values())


async def test_it_returns_the_decoded_json_and_sends_the_headers(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool() as pool:
        post = as_post(pool)
        data = await post(
            witness.url("echo"), {"input_ids": [1, 2], "stop": None}, headers={"X-Key": "session 7"}
        )
        assert json.loads(data["body"]) == {"input_ids": [1, 2], "stop": None}
        assert ["x-key", "session 7"] in data["headers"]
        assert (await post(witness.url("ok"), {}, 60, None))["ok"] is True  # by position, as some call it
        assert (await post(url=witness.url("ok"), payload={}, max_retries=1, headers={}))["ok"] is True


async def test_no_payload_is_an_empty_object(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        post = as_post(pool)
        assert json.loads((await post(witness.url("echo"), None))["body"]) == {}
        assert json.loads((await post(witness.url("echo"), []))["body"]) == []


async def test_a_request_that_is_wrong_is_sent_once(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        post = as_post(pool)
        for sent, (status, code) in enumerate(
            [(400, "REJECTED"), (401, "UNAUTHORIZED"), (404, "NOT_FOUND"), (413, "TOO_LARGE")], 1
        ):
            error = await failure(post(witness.url("status", f"status={status}"), {}))
            assert error.code == f"REQUEST.{code}"
            assert error.data["status"] == status
            assert arrived(witness) == sent


async def test_max_retries_is_the_most_times_it_is_sent(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool(backoff=QUICKLY) as pool:
        for retries in (1, 2, 5):
            before = arrived(witness)
            error = await failure(as_post(pool)(witness.url("status", "status=500"), {}, max_retries=retries))
            assert str(error.code).startswith("UPSTREAM.")
            assert arrived(witness) - before == retries


async def test_more_than_the_pools_own_attempts_may_be_asked_for(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool(max_attempts=2, backoff=QUICKLY) as pool:
        data = await as_post(pool)(witness.url("flaky", "fails=4"), {})
    assert data == {"ok": True}
    assert arrived(witness) == 5


async def test_its_deadline_holds_for_every_call(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        post = as_post(pool, deadline=0.5)
        began = asyncio.get_running_loop().time()
        error = await failure(post(witness.url("hang"), {}))
        assert error.code == "TIMEOUT.DEADLINE"
        assert asyncio.get_running_loop().time() - began < 5


async def test_what_may_have_run_is_not_sent_again_when_it_must_not(
    make_pool: MakePool, witness: Witness
) -> None:
    async with make_pool(backoff=QUICKLY) as pool:
        error = await failure(as_post(pool, idempotent=False)(witness.url("cut"), {}))
        assert error.code == "REQUEST.OUTCOME_UNKNOWN"
        assert arrived(witness) == 1
        # And what slime would hand back as text is a failure.
        error = await failure(as_post(pool)(witness.url("html"), {}, max_retries=1))
        assert error.code == "UPSTREAM.BAD_BODY"
        assert (await failure(as_post(pool)(witness.url("ok"), math.nan))).code == "REQUEST.INVALID"


@pytest.mark.parametrize("retries", [0, -1, True, 1.5, None, "3"])
async def test_max_retries_that_is_no_count(retries: Any) -> None:
    error = await failure(as_post(None)("http://h/", {}, retries))  # type: ignore[arg-type]  # not even asked
    assert error.code == "REQUEST.INVALID"
    assert "max_retries" in error.detail


async def test_a_cancelled_call_is_cancelled_at_the_server(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        task = asyncio.create_task(as_post(pool)(witness.url("hang"), {}))
        await until(lambda: witness.counts()["in_flight"] == 1)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await until(lambda: witness.counts()["in_flight"] == 0)
        assert pool.stats().cancelled == 1


def test_the_convention_is_slimes() -> None:
    """slime/utils/http_utils.py: ``async def post(url, payload, max_retries=60, headers=None)``."""
    for function in (as_post(None), Post.__call__):  # type: ignore[arg-type]
        names = {
            name: one.default
            for name, one in inspect.signature(function).parameters.items()
            if name != "self"
        }
        assert list(names) == ["url", "payload", "max_retries", "headers"]
        assert names["max_retries"] == 60
        assert names["headers"] is None
    assert inspect.iscoroutinefunction(as_post(None))  # type: ignore[arg-type]


def test_the_pages_code_is_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "drop-in.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        compile(block, "docs/drop-in.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def test_the_pages_lazy_start_makes_one_pool_for_all(make_pool: MakePool, witness: Witness) -> None:
    """The change for slime, as docs/drop-in.md has it."""
    page = (ROOT / "docs" / "drop-in.md").read_text()
    source = page.split("## slime")[1].split("```python\n")[1].split("```")[0]
    made: list[Any] = []

    class Pool:
        def __init__(self, **settings: Any) -> None:
            assert set(settings) == {"concurrency", "posters_per_node", "deadline"}
            self.real = make_pool(settings["concurrency"], 1, settings["deadline"])
            made.append(self.real)

        async def start(self) -> None:
            await self.real.start()

        def as_post(self) -> Post:
            return as_post(self.real)

    names: dict[str, Any] = {"_client_concurrency": 4}
    exec(source, names)
    names["PosterPool"] = Pool
    try:
        calls = [asyncio.create_task(names["post"](witness.url("ok"), {})) for _ in range(8)]
        calls[0].cancel()  # it waits for the start like the others, which must not end with it
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(reply, dict) and reply["ok"] for reply in replies] == [False, *[True] * 7]
        assert len(made) == 1
    finally:
        for pool in made:
            await pool.close()
