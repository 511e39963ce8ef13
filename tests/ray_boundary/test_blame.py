"""Who is at fault, through hops: whether it is our callee, which would be replaced, or what it called."""

from __future__ import annotations

from typing import Any

import pytest

from faults import Action, Blame, classify, decide, name_of
from protocol import CodedError, coded
from tests.ray_boundary.far_side import FarSide
from tests.ray_boundary.near_side import failure_of
from tests.ray_boundary.shapes import KILLED

KINDS = ("plain", "coded")


def fails(far: FarSide, hops: int, what: str) -> Any:
    """The call of an actor that fails so many hops away."""
    if hops == 1:
        return far.asynchronous.run.remote(what)
    below = [far.asynchronous] if hops == 2 else [far.sync, far.asynchronous]
    return far.middle.through.remote(below, what)


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["ACTOR.DIED", "ACTOR.UNAVAILABLE", "ACTOR.WEDGED", "NODE.DIED"])
async def test_what_an_answer_says_of_an_actor_is_not_about_who_answered(
    far_sides: dict[str, FarSide], kind: str, hops: int, code: str
) -> None:
    fault = classify(await failure_of(fails(far_sides[kind], hops, code)))
    assert fault.code == code
    assert fault.blame is (Blame.NODE if code == "NODE.DIED" else Blame.NESTED)
    assert decide(fault).action is not Action.RECREATE


@pytest.mark.parametrize("hops", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "blame"), [("TASK.FAILED", Blame.CALLEE), ("REQUEST.REJECTED", Blame.REQUEST)]
)
async def test_other_blame_is_the_same_through_hops(
    far_sides: dict[str, FarSide], kind: str, hops: int, code: str, blame: Blame
) -> None:
    exc = await failure_of(fails(far_sides[kind], hops, code))
    assert classify(exc).blame is classify(CodedError(code)).blame is blame


@pytest.mark.parametrize("kind", KINDS)
async def test_an_actor_killed_two_hops_away(far_sides: dict[str, FarSide], kind: str) -> None:
    far = far_sides[kind]
    doomed = far.Async.remote()
    exc = await failure_of(far.middle.through.remote([far.asynchronous, doomed], KILLED))
    fault = classify(exc)
    # With `coded` it was named by who called the dead one, whose callee it was; the hop says the rest.
    assert fault.code == ("ACTOR.DIED" if kind == "coded" else "ACTOR.NESTED_DIED")
    assert (fault.blame, fault.outcome) == (Blame.NESTED, "unknown")
    assert decide(fault).action is not Action.RECREATE
    alive = classify(await failure_of(far.middle.through.remote([far.asynchronous], "TASK.FAILED")))
    assert alive.code == "TASK.FAILED", "those in between answer as before"
    # Who calls the dead one itself is told that it is its callee.
    nearest = classify(await failure_of(doomed.run.remote("ordinary")))
    assert (nearest.code, nearest.blame) == ("ACTOR.DIED", Blame.CALLEE)
    assert decide(nearest).action is Action.RECREATE


@pytest.mark.parametrize("wrap", ["itself", "from it", "coded here", "coded here, from it"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_caller_does_with_it_does_not_shift_the_blame(
    far_sides: dict[str, FarSide], kind: str, wrap: str
) -> None:
    """Our callee answered; raised again under another in this process, it still did."""

    async def here() -> None:
        try:
            await fails(far_sides[kind], 1, "ACTOR.DIED")
        except CodedError as exc:
            if "from it" in wrap:
                raise RuntimeError("the step failed") from exc
            raise

    exc = await failure_of(coded(name=name_of)(here)() if "coded here" in wrap else here())
    fault = classify(exc)
    assert fault.code == "ACTOR.DIED"
    assert fault.blame is Blame.NESTED
    assert decide(fault).action is not Action.RECREATE
