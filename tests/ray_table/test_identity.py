"""Failures keep their name through Ray: reports of people who lost one, each as a test on a real Ray."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from faults import Action, classify, decide
from protocol import CodedError, Trust, code_of, read
from protocol.safe import text_of
from tests.ray_table.actors import Coded, Plain
from tests.ray_table.test_ray_table import failure_of

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(90)]


async def test_i1_a_400_keeps_its_status_its_code_and_the_bodys_start() -> None:
    """ray#46408: httpx.HTTPStatusError has keyword-only arguments."""
    exc = await failure_of(Coded.remote().fail.remote("http_400"))
    found = read(exc)
    assert (found.code, found.trust) == ("REQUEST.REJECTED", Trust.STRUCTURED)
    assert found.data["status"] == 400
    assert "the prompt is too long" in found.data["body"]
    assert decide(classify(exc)).action is Action.GIVE_UP
    # Without @coded at the raising side the status is still read, from text.
    plain = classify(await failure_of(Plain.remote().fail.remote("http_400")))
    assert (plain.code, plain.status) == ("REQUEST.REJECTED", 400)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("two_required", "rank 3 failed at step 17"),  # I2, ray#28436
        ("none_taken", "written by itself"),  # I3, ray#31806
        ("fails_on_load", "the disk is gone"),  # I4, ray#55171, ray#55878
    ],
)
@pytest.mark.parametrize("hops", [1, 2, 3])
async def test_i2_i3_i4_i6_badly_written_exceptions_keep_type_and_text(
    name: str, text: str, hops: int
) -> None:
    """I6 (verl#2152): the operator reads the original type and text, not only that unpickling failed."""
    actor: Any = Coded.remote()
    method, args = "fail", (name,)
    for _ in range(hops - 1):
        actor, method, args = Coded.remote(), "through", (actor, method, *args)
    exc = await failure_of(getattr(actor, method).remote(*args))
    found = read(exc)
    assert (found.code, found.trust) == ("TASK.FAILED", Trust.STRUCTURED)
    assert text in found.detail
    assert isinstance(exc, CodedError)
    origin = exc.origin
    assert origin.type.rpartition(".")[2].lower() == name.replace("_", "")
    assert text in origin.text
    assert origin.actor, "it says which actor"
    assert text in text_of(exc)


async def test_i4_without_coded_the_text_is_still_there_one_hop_further() -> None:
    exc = await failure_of(Plain.remote().through.remote(Plain.remote(), "fail", "fails_on_load"))
    assert "the disk is gone" in text_of(exc)
    assert "FailsOnLoad" in text_of(exc)


@pytest.mark.parametrize("kind", ["aiohttp", "http"])
@pytest.mark.parametrize("actor", [Coded, Plain])
async def test_i5_after_the_hop_a_503_is_retried_and_a_400_is_not(kind: str, actor: Any) -> None:
    """NeMo Gym#1788, NeMo-RL#3470: aiohttp's exception holds headers, which do not pickle."""
    full = classify(await failure_of(actor.remote().fail.remote(f"{kind}_503")))
    assert full.code.family in ("BACKPRESSURE", "UPSTREAM")
    assert decide(full).action.sends_again
    wrong = classify(await failure_of(actor.remote().fail.remote(f"{kind}_400")))
    assert wrong.code.family == "REQUEST"
    assert not decide(wrong).action.sends_again


async def test_i5_with_a_real_reply() -> None:
    """The headers of a real reply, from a real server."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=int(request.match_info["status"]), text="x")

    app = web.Application()
    app.router.add_get("/{status}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for status, family in ((503, "BACKPRESSURE"), (500, "UPSTREAM"), (400, "REQUEST")):
            exc = await failure_of(Plain.remote().get_page.remote(f"{base}/{status}"))
            assert classify(exc).code.family == family
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("hops", [1, 2])
async def test_i7_a_name_given_in_a_child_process_reaches_the_trainer(hops: int) -> None:
    actor: Any = Coded.remote()
    exc = await failure_of(
        actor.fail_in_child.remote() if hops == 1 else Coded.remote().through.remote(actor, "fail_in_child")
    )
    assert code_of(exc) == "WEIGHTS.REFIT_ABORTED"
    # It came as text, so it is believed no further than text, whatever carried it afterwards.
    assert read(exc).trust is Trust.CHECKSUMMED


async def test_i8_the_code_raised_in_init_is_the_callers() -> None:
    exc = await failure_of(Coded.remote("coded").fail.remote("ordinary"))
    assert code_of(exc) == "WEIGHTS.REFIT_ABORTED"
    other = await failure_of(Coded.remote("http_400").fail.remote("ordinary"))
    assert code_of(other) == "REQUEST.REJECTED"
    assert classify(other).code == "REQUEST.REJECTED"
