"""Lifecycle: what becomes of an engine, as a pure function over a table.

    dead ─Begun→ starting ─Proving→ canary ─Proven→ ready ⇄ suspect
      ↑             │                  │              │        │        quarantined
      │             └─StartFailed──────┤              ├─Drain──┴──────────→ │
      └──Stopped── stopping ←──────────┴──Lost, sick──┴── draining ←────────┘

`step` takes a `Life` and what happened, and answers the next `Life` and what is to be done, in this order.
Nothing here waits, asks or knows the time: whoever acts (`dispatch.engines.keeping.keeper`) passes it in, so
that a day of crashes is tried in a millisecond.

Three rules hold in every history (tests/dispatch/engines/test_lifecycle.py tries them at random):

- an engine is shown only on its way into ``ready``, and hidden before anything else when it leaves it;
- nothing is started before what was started last is known to have been stopped, without a rest;
- what failed to stop is never started again by itself: on top of what is left nothing can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from dispatch.engines.spec import State
from protocol import Code, CodedError, catalogue

Action = Literal["start", "show", "hide", "drain", "stop", "rest", "release"]
"""``show`` and ``hide``: publish, or no longer. ``drain``: let what runs end, then say `Drained`. ``rest``:
wait `Life.rest` seconds, then say `Begun`. ``release``: give back what it held, for no start is due."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How often and how fast an engine is started again. ``backoff`` is the shortest and the longest rest
    in seconds, doubled with each short life in a row; ``budget`` of these in a row are a crash loop. A life
    is short that never was ready, or for less than ``healthy_run`` seconds. ``patience`` is how many checks
    in a row may fail."""

    backoff: tuple[float, float] = (0.2, 5.0)
    budget: int = 5
    healthy_run: float = 60.0
    patience: int = 3


@dataclass(frozen=True, slots=True)
class Begun:
    """A start is due."""


@dataclass(frozen=True, slots=True)
class Proving:
    """It answers; now it has to generate."""


@dataclass(frozen=True, slots=True)
class Proven:
    """It generates, and may serve."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A start came to nothing."""

    error: CodedError


@dataclass(frozen=True, slots=True)
class Checked:
    """How many checks in a row have failed by now, the last of them with ``error``; 0: it passed."""

    failed: int
    error: CodedError | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Its process ended, or its supervisor is gone."""

    error: CodedError


@dataclass(frozen=True, slots=True)
class Drain:
    """It is to end once its work is done; ``again``: and to be started again."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """Its work is done, or nobody waits for that any longer."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """It is alive and must not serve: it missed a weight update, say."""

    error: CodedError


@dataclass(frozen=True, slots=True)
class Restart:
    """Somebody asks for a new life, also of an engine that was given up or drained."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing of it is left."""


@dataclass(frozen=True, slots=True)
class StopFailed:
    """Something of it is left."""

    error: CodedError


@dataclass(frozen=True, slots=True)
class Close:
    """The fleet ends."""


Event = (
    Begun | Proving | Proven | StartFailed | Checked | Lost | Drain | Drained | Quarantine | Restart | Stopped
    | StopFailed | Close
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Life:
    """Where an engine stands. ``since``: when it came into this state, seconds on the caller's clock.
    ``ready_at``: when it was ready for the first time in this life. ``short``: why the short lives in a row
    ended, oldest first. ``wanted``: whether another life follows this one. ``cause``: why this life is at
    its end; ``verdict``: why no other follows by itself. ``rest``: seconds until the next start."""

    state: State = "dead"
    since: float = 0.0
    ready_at: float | None = None
    short: tuple[CodedError, ...] = field(default=())
    starts: int = 0
    wanted: bool = True
    cause: CodedError | None = None
    verdict: CodedError | None = None
    rest: float = 0.0


Step = tuple[Life, tuple[Action, ...]]
_NOTHING: Final[tuple[Action, ...]] = ()


def step(life: Life, event: Event, now: float, policy: Policy) -> Step:
    """The next life, and what is to be done in this order. What cannot matter any more in this state (a
    check's result after the engine was lost) changes nothing."""
    rule = _RULES.get((life.state, type(event)))
    if rule is None:
        return life, _NOTHING
    after, actions = rule(life, event, now, policy)
    return (replace(after, since=now) if after.state != life.state else after), actions


# -- the rules -----------------------------------------------------------------------------------------


def _begin(life: Life, event: Event, now: float, policy: Policy) -> Step:
    if not life.wanted:
        return life, _NOTHING
    return replace(life, state="starting", starts=life.starts + 1, ready_at=None, cause=None), ("start",)


def _prove(life: Life, event: Event, now: float, policy: Policy) -> Step:
    return replace(life, state="canary"), _NOTHING


def _serve(life: Life, event: Event, now: float, policy: Policy) -> Step:
    return replace(life, state="ready", ready_at=now), ("show",)


def _fail(life: Life, event: Event, now: float, policy: Policy) -> Step:
    assert isinstance(event, StartFailed | Lost)
    return _end(life, now, policy, event.error)


def _check(life: Life, event: Event, now: float, policy: Policy) -> Step:
    assert isinstance(event, Checked)
    if event.failed >= policy.patience and event.error is not None:
        return _end(life, now, policy, event.error)
    if event.failed == 0 and life.state == "suspect":
        return replace(life, state="ready"), ("show",)
    if event.failed > 0 and life.state == "ready":
        return replace(life, state="suspect"), ("hide",)
    return life, _NOTHING


def _drain(life: Life, event: Event, now: float, policy: Policy) -> Step:
    assert isinstance(event, Drain)
    if life.state in ("starting", "canary"):  # it has no work yet
        return replace(life, state="stopping", wanted=event.again), ("stop",)
    hide: tuple[Action, ...] = ("hide",) if life.state == "ready" else ()
    return replace(life, state="draining", wanted=event.again), (*hide, "drain")


def _drained(life: Life, event: Event, now: float, policy: Policy) -> Step:
    return replace(life, state="stopping"), ("stop",)


def _want(life: Life, event: Event, now: float, policy: Policy) -> Step:
    """With no life to end, or one that is ending, only whether another one follows can still change."""
    assert isinstance(event, Drain | Restart)
    if isinstance(event, Restart):
        return replace(life, wanted=True, short=()), _NOTHING  # asked for: the count begins anew
    return replace(life, wanted=life.wanted and event.again), _NOTHING


def _down(life: Life, event: Event, now: float, policy: Policy) -> Step:
    """Drained while it rests: there is no life to end, and no other one follows."""
    after, _ = _want(life, event, now, policy)
    return after, ("release",) if life.wanted and not after.wanted else _NOTHING


def _quarantine(life: Life, event: Event, now: float, policy: Policy) -> Step:
    assert isinstance(event, Quarantine)
    hide: tuple[Action, ...] = ("hide",) if life.state == "ready" else ()
    return replace(life, state="quarantined", cause=event.error), hide


def _restart(life: Life, event: Event, now: float, policy: Policy) -> Step:
    if life.state == "dead":
        if life.wanted and life.verdict is None:
            return life, _NOTHING  # a start is due already
        return _begin(replace(life, wanted=True, short=(), verdict=None), event, now, policy)
    return _drain(replace(life, short=()), Drain(again=True), now, policy)


def _stopped(life: Life, event: Event, now: float, policy: Policy) -> Step:
    dead = replace(life, state="dead")
    if not life.wanted:
        return dead, ("release",)
    verdict = _verdict(life.short, policy)
    if verdict is not None:
        return replace(dead, wanted=False, verdict=verdict), ("release",)
    shortest, longest = policy.backoff
    doubled = shortest * 2 ** min(30, max(0, len(life.short) - 1))
    return replace(dead, rest=min(longest, doubled)), ("rest",)


def _left(life: Life, event: Event, now: float, policy: Policy) -> Step:
    assert isinstance(event, StopFailed)
    return replace(life, state="dead", wanted=False, verdict=event.error), _NOTHING


def _close(life: Life, event: Event, now: float, policy: Policy) -> Step:
    if life.state in ("dead", "stopping"):
        return replace(life, wanted=False), _NOTHING
    hide: tuple[Action, ...] = ("hide",) if life.state == "ready" else ()
    return replace(life, state="stopping", wanted=False), (*hide, "stop")


def _end(life: Life, now: float, policy: Policy, error: CodedError) -> Step:
    """This life is over. Whether it was a short one is known by now."""
    long = life.ready_at is not None and now - life.ready_at >= policy.healthy_run
    hide: tuple[Action, ...] = ("hide",) if life.state == "ready" else ()
    ended = replace(life, state="stopping", cause=error, short=() if long else (*life.short, error))
    return ended, (*hide, "stop")


def _verdict(short: tuple[CodedError, ...], policy: Policy) -> CodedError | None:
    """Why it makes no sense to start again; None while it does."""
    if not short:
        return None
    first, last = short[0], short[-1]
    if catalogue.entry(last.code).advice == "give_up" and not last.data.get("transient"):
        return last  # it would fail the same way again
    if len(short) < policy.budget:
        return None
    kept = ("stage", "status", "signal", "last_lines", "stop_failed", "url")
    facts = {name: first.data[name] for name in kept if name in first.data}
    verdict = CodedError(
        Code("ENGINE.CRASH_LOOP"),
        f"{len(short)} lives in a row were short; the first ended with {first.code}: {first.detail}",
        {"first_code": first.code, **facts},
    )
    verdict.__cause__ = first
    return verdict


Rule = Callable[[Life, Event, float, Policy], Step]
_RULES: Final[dict[tuple[State, type[Event]], Rule]] = {
    ("dead", Begun): _begin,
    ("dead", Restart): _restart,
    ("dead", Drain): _down,
    ("dead", Close): _close,
    ("starting", Proving): _prove,
    ("starting", Proven): _serve,
    ("starting", StartFailed): _fail,
    ("starting", Lost): _fail,
    ("canary", Proven): _serve,
    ("canary", StartFailed): _fail,
    ("canary", Lost): _fail,
    ("ready", Checked): _check,
    ("suspect", Checked): _check,
    **{(state, Lost): _fail for state in ("ready", "suspect", "quarantined", "draining")},
    **{(state, Quarantine): _quarantine for state in ("ready", "suspect")},
    **{(state, Drain): _drain for state in ("starting", "canary", "ready", "suspect", "quarantined")},
    **{(state, Restart): _restart for state in ("starting", "canary", "ready", "suspect", "quarantined")},
    **{(state, kind): _want for state in ("draining", "stopping") for kind in (Drain, Restart)},
    **{
        (state, Close): _close
        for state in ("starting", "canary", "ready", "suspect", "quarantined", "draining", "stopping")
    },
    ("draining", Drained): _drained,
    ("stopping", Stopped): _stopped,
    ("stopping", StopFailed): _left,
}


def table() -> frozenset[tuple[State, type[Event]]]:
    """Which events mean something in which state."""
    return frozenset(_RULES)
