"""decide: from what a failure means to what is done about it. A pure function over one table: the
catalogue's advice, then the rules below, each of which can only take permission away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from faults.fault import Action, Blame, Decision, Fault, Outcome
from protocol import Family, Trust, catalogue
from protocol.catalogue import STRICTNESS

_ORDER: Final = tuple(Action(advice) for advice in STRICTNESS)

# Whatever advice a code of these families was registered with: sending a request again does not make
# it right, and nothing unknown is retried.
_NEVER: Final = (Family.REQUEST, Family.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: ``first`` seconds before the second attempt, doubling up to ``most``."""

    first: float = 0.1
    most: float = 5.0

    def delay(self, attempt: int) -> float:
        """Seconds to wait after attempt number ``attempt`` (from 1) failed, before any jitter."""
        return float(min(self.most, self.first * 2 ** min(attempt - 1, 30)))


def decide(
    fault: Fault,
    *,
    idempotent: bool = True,
    attempt: int = 1,
    max_attempts: int = 4,
    remaining: float | None = None,
    backoff: Backoff = Backoff(),
    jitter: float = 1.0,
) -> Decision:
    """What to do about ``fault`` after attempt number ``attempt`` (from 1).

    ``remaining`` is what is left of the deadline (seconds, None for none), ``jitter`` a factor from
    0 to 1 on the delay that the caller draws, so that this stays a pure function. Nothing unknown is
    retried; what is not idempotent is sent again only when it is known not to have run; a wait that
    would outlast the deadline is no wait. After the first death of a callee nothing waits: load was not
    its cause."""
    action = Action(catalogue.entry(fault.code).advice)
    why = f"{fault.code}: {action.value}"
    if action is Action.RECREATE and fault.blame is Blame.NESTED:
        action, why = Action.RETRY_ELSEWHERE, f"{fault.code}: our callee is alive, what it called is not"
    if not action.sends_again:
        return Decision(action, 0.0, why)
    if fault.code.family in _NEVER:
        return Decision(Action.GIVE_UP, 0.0, f"{fault.code}: {fault.code.family} is never sent again")
    if not idempotent and fault.outcome is not Outcome.NOT_RUN:
        return Decision(Action.GIVE_UP, 0.0, f"{fault.code}: not idempotent, and it may have run")
    if not idempotent and fault.trust < Trust.SIGNED:
        return Decision(
            Action.GIVE_UP, 0.0, f"{fault.code}: not idempotent, and only text says it did not run"
        )
    if attempt >= max_attempts:
        return Decision(
            Action.GIVE_UP, 0.0, f"{fault.code}: attempt {attempt} of {max_attempts} was the last"
        )
    # A worker of ours that died once says nothing of load: another one may have the work at once.
    hurry = action is Action.RECREATE and fault.blame is Blame.CALLEE and attempt == 1
    delay = 0.0 if hurry else backoff.delay(attempt) * min(max(jitter, 0.0), 1.0)
    if fault.retry_after is not None:
        delay = max(delay, fault.retry_after)
    if remaining is not None and delay >= remaining:
        return Decision(
            Action.GIVE_UP, 0.0, f"{fault.code}: waiting {delay:.3g} s would outlast the deadline"
        )
    return Decision(action, delay, why)


def rank(fault: Fault) -> int:
    """How little a fault allows: higher is stricter. Orders the leaves of an ExceptionGroup."""
    return _ORDER.index(Action(catalogue.entry(fault.code).advice))
