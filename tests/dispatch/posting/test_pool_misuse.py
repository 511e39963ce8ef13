"""The pool used as it must not be: each use is refused with a code and a remedy, and nothing hangs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dispatch.posting import PosterPool
from dispatch.processes import same_process
from protocol import CodedError, catalogue
from tests.support.fixtures import QUICK, MakePool
from tests.support.wait import until
from tests.support.witness import ROOT, Witness

pytestmark = pytest.mark.timeout(240)


def drive(scenario: str, *arguments: str, timeout: float = 220, **environment: str) -> dict[str, Any]:
    """What the driver of that scenario has seen; see `fault_drive`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.dispatch.posting.posters.fault_drive", scenario, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


async def refused(awaitable: Any) -> CodedError:
    """The error that it raises, at once, with a code of the catalogue."""
    async with asyncio.timeout(5):
        with pytest.raises(CodedError) as caught:
            await awaitable
    assert catalogue.entry(caught.value.code)
    assert caught.value.detail
    return caught.value


# ---- settings

SETTINGS: dict[str, Any] = {
    "no places": {"concurrency": 0},
    "negative": {"concurrency": -1},
    "a truth value": {"concurrency": True},
    "a fraction": {"concurrency": 8.0},
    "text": {"concurrency": "8"},
    "not a number": {"concurrency": float("nan")},
    "no posters": {"posters_per_node": 0},
    "no attempts": {"max_attempts": 0},
    "true attempts": {"max_attempts": True},
    "no such transport": {"transport": "telepathy"},
    "no transport": {"transport": None},
}
DEADLINES = [-1, 0, float("nan"), float("-inf"), "soon", None, True]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_a_setting_that_cannot_work_is_refused_when_it_is_made(settings: dict[str, Any]) -> None:
    with pytest.raises(CodedError) as caught:
        PosterPool(**settings)
    assert caught.value.code == "CONFIG.INVALID"
    assert any(name in caught.value.detail for name in settings)


@pytest.mark.parametrize("deadline", DEADLINES, ids=repr)
def test_no_such_deadline_of_a_pool(deadline: Any) -> None:
    with pytest.raises(CodedError) as caught:
        PosterPool(8, deadline=deadline)
    assert caught.value.code in ("CONFIG.INVALID", "REQUEST.INVALID")
    assert "deadline" in caught.value.detail


async def test_no_such_deadline_of_a_post(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        for deadline in DEADLINES:
            if deadline is not None:  # which stands for the pool's own
                error = await refused(pool.post(witness.url("ok"), {}, deadline=deadline))
                assert (error.code, "deadline" in error.detail) == ("REQUEST.INVALID", True)
        assert pool.stats().submitted == 0
    assert witness.counts()["arrived"] == {}


async def test_fewer_places_than_posters_names_both_remedies(make_pool: MakePool) -> None:
    error = await refused(make_pool(3, posters_per_node=4).start())
    assert error.code == "CONFIG.INVALID"
    assert "at least 4" in error.detail
    assert "posters_per_node" in error.detail


def test_too_few_descriptors_say_the_number_needed(witness: Witness) -> None:
    told = drive("few_descriptors", witness.url("ok"))
    for where, tried in (("local", []), ("posters", [1, 1])):
        code, detail, seconds = told[where]
        assert code == "CONFIG.INVALID", told
        needed = next(int(word) for word in detail.split() if word.isdigit())
        assert needed > 5000
        assert f"ulimit -n {needed}" in detail
        assert seconds < QUICK.start_timeout
        assert told[f"{where}_tried"] == tried  # once: a limit does not rise by trying again
    assert told["local"][1].startswith("the pool's local client needs ")
    assert told["posters"][1].startswith("a poster needs ")


# ---- the wrong time and place


async def test_after_close_nothing_is_sent_and_nothing_hangs(make_pool: MakePool, witness: Witness) -> None:
    pool = make_pool()
    async with pool:
        await pool.post(witness.url("ok"), {})
    witness.reset()
    drawn = 0

    def source() -> Any:
        nonlocal drawn
        drawn += 1
        yield None

    assert (await refused(pool.post(witness.url("ok"), {}))).code == "POOL.CLOSED"
    assert (await refused(anext(pool.post_many(source())))).code == "POOL.CLOSED"
    assert (await refused(pool.start())).code == "POOL.MISUSE"
    assert (await refused(pool.__aenter__())).code == "POOL.MISUSE"
    await pool.close()
    stats = pool.stats()
    assert (stats.submitted, stats.in_flight, stats.occupied, drawn) == (1, 0, 0, 0)
    assert witness.counts()["arrived"] == {}


async def test_a_second_entry_is_refused_and_does_no_harm(make_pool: MakePool, witness: Witness) -> None:
    async with make_pool() as pool:
        with pytest.raises(CodedError, match=r"POOL\.MISUSE"):
            async with pool:
                raise AssertionError("entered twice")
        assert (await pool.post(witness.url("ok"), {})).via == "poster"


async def test_from_another_loop_and_another_thread(make_pool: MakePool, witness: Witness) -> None:
    url = witness.url("ok")
    async with make_pool() as pool:

        def elsewhere(use: Callable[[], Any]) -> CodedError:
            return asyncio.run(refused(use()))

        uses: list[Callable[[], Any]] = [
            lambda: pool.post(url, {}),
            lambda: anext(pool.post_many([])),
            pool.start,
            lambda: pool.as_post()(url, {}),
        ]
        for use in uses:
            async with asyncio.timeout(10):
                assert (await asyncio.to_thread(elsewhere, use)).code == "POOL.MISUSE"

        def without_a_loop() -> CodedError:
            coroutine = pool.post(url, {})
            with pytest.raises(CodedError) as caught:
                coroutine.send(None)
            return caught.value

        assert (await asyncio.to_thread(without_a_loop)).code == "POOL.MISUSE"
        assert pool.stats().submitted == 0
        assert (await pool.post(url, {})).via == "poster"


async def test_what_on_sent_raises_keeps_no_place(make_pool: MakePool, witness: Witness) -> None:
    def broken() -> None:
        raise ValueError("the caller's own")

    async with make_pool(2, posters_per_node=1) as pool:
        for _ in range(3):  # one more than there are places
            error = await refused(pool.post(witness.url("ok"), {}, on_sent=broken))
            assert error.code == "INTERNAL.BUG"
        assert (pool.stats().occupied, pool.stats().sent) == (0, 0)
        assert (await pool.post(witness.url("ok"), {})).status == 200


async def test_two_closes_at_once_end_the_pool_once(make_pool: MakePool, witness: Witness) -> None:
    pool = make_pool()
    await pool.start()
    task = asyncio.create_task(pool.post(witness.url("hang"), {}))
    await until(lambda: witness.counts()["in_flight"] == 1)
    async with asyncio.timeout(30):
        await asyncio.gather(pool.close(), pool.close())
    assert (await refused(task)).code == "POOL.CLOSED"


async def test_a_close_that_is_cancelled_leaves_nothing_behind_either(make_pool: MakePool) -> None:
    pool = make_pool(4, posters_per_node=2)
    await pool.start()
    posters = pool.stats().posters
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(30):
        await pool.close()
    assert [same_process(one.pid, one.create_time) for one in posters] == [None, None]


# ---- Ray is shut down under the pool


@pytest.fixture(scope="module")
def shutdown(shared_witness: Witness) -> dict[str, Any]:
    return drive("shutdown", shared_witness.url("ok"))


def test_ray_shut_down_what_is_in_flight_and_what_comes_fails_at_once(shutdown: dict[str, Any]) -> None:
    """In flight it may have run, which POOL.MISUSE would deny."""
    assert set(shutdown["flying"]) == {"POOL.CLOSED"}
    assert set(shutdown["waiting"]) == {"POOL.MISUSE"}
    assert shutdown["at_once"][0] == "POOL.MISUSE"
    assert "ray.shutdown()" in shutdown["at_once"][1]
    assert shutdown["ended_in_s"] < 15  # their replies would have come after 20


def test_ray_shut_down_no_probe_and_no_post_starts_another(shutdown: dict[str, Any]) -> None:
    assert shutdown["another_ray"] is False


def test_ray_shut_down_the_next_ray_is_not_taken_for_the_old_one(shutdown: dict[str, Any]) -> None:
    assert shutdown["on_another_ray"][0] == "POOL.MISUSE"
    assert shutdown["a_new_pool"] == "poster"


def test_ray_shut_down_close_ends_and_nothing_is_left(shutdown: dict[str, Any]) -> None:
    assert shutdown["close_s"] < 5
    assert shutdown["left"] == [False, False]
    assert shutdown["balanced"] is True
