"""What an actor's ``__init__`` raises: only text comes back, and the caller learns it from any call."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, UnserializableException

from faults import Action, classify, decide
from protocol import Trust, read
from protocol.safe import MAX_TEXT
from tests.ray_boundary.far_side import LONG, FarSide
from tests.ray_boundary.near_side import failure_of, meaning_of, name_read
from tests.ray_boundary.shapes import ABORTED, ONE, Means

_TEXT: Final = Trust.CHECKSUMMED
_ABORTED: Final = Means(ABORTED, "callee", "not_run", _TEXT)
_INIT_FAILED: Final = Means("ACTOR.INIT_FAILED", "callee", "not_run")


HEAVY: Final = "text of 20 MB"


class Row(NamedTuple):
    shape: str
    kind: str
    actor: str
    raised: type[Exception]
    means: Means


# Each costs the start of a process, so not every shape in every kind of actor.
ROWS: Final = (
    Row("coded error", "plain", "Sync", ActorDiedError, _ABORTED),
    Row("coded error", "plain", "Async", ActorDiedError, _ABORTED),
    Row("coded subclass the caller lacks", "plain", "Async", ActorDiedError, _ABORTED),
    # Of a group, the text that is left names the first leaf first.
    Row("group of coded errors", "plain", "Sync", ActorDiedError, _ABORTED),
    Row("foreign while a coded error is handled", "plain", "Sync", ActorDiedError, _INIT_FAILED),
    Row("ordinary", "plain", "Async", ActorDiedError, _INIT_FAILED),
    # Ray hands out a text instead of an ActorDiedError where it could not load the cause.
    Row(
        "keyword-only arguments",
        "plain",
        "Sync",
        UnserializableException,
        _INIT_FAILED._replace(trust=Trust.HEURISTIC),
    ),
    # In that text, a token says what failed; that it failed at the start is not read any more.
    Row(
        "group with a bad leaf",
        "plain",
        "Async",
        UnserializableException,
        Means(ABORTED, "upstream", "unknown", _TEXT),
    ),
    Row("foreign from a coded error", "coded", "Async", ActorDiedError, _ABORTED),
    Row(
        "keyword-only arguments",
        "coded",
        "Async",
        ActorDiedError,
        Means("BACKPRESSURE.OVERLOADED", "callee", "not_run", _TEXT),
    ),
    *(
        Row(shape, "coded", actor, ActorDiedError, Means("TASK.FAILED", "callee", "not_run", _TEXT))
        for shape, actor in (
            ("fails on load", "Sync"),
            ("holds a lock", "Async"),
            (HEAVY, "Async"),
        )
    ),
)


@pytest.fixture(scope="module")
def started(far_sides: dict[str, FarSide]) -> dict[Row | str, Any]:
    """All at once, so that their processes start beside each other."""
    made: dict[Row | str, Any] = {HEAVY: far_sides["plain"].Sync.remote(HEAVY)}
    made.update({row: getattr(far_sides[row.kind], row.actor).remote(row.shape) for row in ROWS})
    return made


async def ended(actor: Any) -> BaseException:
    """What its end is, once that is known: a call that was on its way meanwhile may be told that the actor
    cannot be reached."""
    async with asyncio.timeout(LONG):
        while True:
            exc = await failure_of(actor.run.remote("ordinary"))
            if not isinstance(exc, ActorUnavailableError):
                return exc


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.shape} - {row.kind} {row.actor.lower()}")
async def test_init_keeps_the_name(started: dict[Row | str, Any], row: Row) -> None:
    exc = await ended(started[row])
    assert type(exc) is row.raised
    assert meaning_of(exc) == row.means
    named = row.means.trust is _TEXT
    assert name_read(exc) == ((row.means.code, _TEXT) if named else None)
    if row.means.code == ABORTED:
        assert read(exc).id == classify(exc).id == ONE
    again = await failure_of(started[row].run.remote("ordinary"))
    assert read(again) == read(exc), "every later call says the same"


async def test_a_text_of_20_mb_has_no_name_without_coded_and_arrives_late(
    started: dict[Row | str, Any],
) -> None:
    """While that much text is on its way, the actor seems unavailable; to wait is what is decided then, and
    whoever waited is told that it never started."""
    first = classify(await failure_of(started[HEAVY].run.remote("ordinary")))
    assert first.code in ("ACTOR.UNAVAILABLE", "ACTOR.INIT_FAILED")
    assert decide(first).action in (Action.WAIT, Action.GIVE_UP)
    exc = await ended(started[HEAVY])
    assert name_read(exc) is None
    assert meaning_of(exc) == _INIT_FAILED
    assert len(classify(exc).evidence) <= MAX_TEXT


@pytest.mark.parametrize("kind", ["plain", "coded"])
async def test_an_actor_whose_argument_failed_says_what_failed(
    far_sides: dict[str, FarSide], kind: str
) -> None:
    far = far_sides[kind]
    actor = far.Sync.remote(far.run.remote("coded error"))
    exc = await failure_of(actor.run.remote("ordinary"))
    assert read(exc).id == ONE
    assert meaning_of(exc)[:3] == (ABORTED, "callee", "not_run")


@pytest.mark.parametrize("kind", ["plain", "coded"])
async def test_a_failed_init_one_hop_further_is_nested(far_sides: dict[str, FarSide], kind: str) -> None:
    """Our callee is alive; what it called never started."""
    far = far_sides[kind]
    inner = far.Async.remote("coded error")
    exc = await failure_of(far.middle.through.remote([inner], "ordinary"))
    assert read(exc).id == ONE
    assert (read(exc).code, classify(exc).code) == (ABORTED, ABORTED)
