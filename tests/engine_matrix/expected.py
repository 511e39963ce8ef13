"""What has to happen in each cell, and in which time: the one table to change when the fleet learns more."""

from __future__ import annotations

import signal
from typing import Any, Final, Literal

Victim = Literal["engine", "child", "grandchild", "supervisor", "driver", "raylet"]
State = Literal["starting", "idle", "generating", "draining", "updating"]
Outcome = Literal["replaced", "kept", "down", "ended"]
"""``replaced``: the fleet sees it, nothing is left of the old engine, another one serves.
``kept``: the same engine goes on in what it did, and nobody replaces it; an orderly restart leaves nothing.
``down``: the engine ends, nothing is left, and it stays down, since it was being drained.
``ended``: nothing is left and nobody serves: the driver is gone."""

VICTIMS: Final[tuple[Victim, ...]] = ("engine", "child", "grandchild", "supervisor", "driver", "raylet")
STATES: Final[tuple[State, ...]] = ("starting", "idle", "generating", "draining", "updating")
SIGNALS: Final = (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)

START_DELAY: Final = 3.0
DRAIN: Final = 4.0
SILENCE: Final = 4.0
STOPPED: Final = SILENCE + 3.0
"""Seconds that a driver is stopped: longer than it allows its supervisors to be silent."""
HOLD: Final = STOPPED + 4.0
"""Seconds that an engine may be paused for its update, so that none of the above ends it."""
PROBES: Final[dict[str, Any]] = {
    "start_timeout": 10.0,
    "health_timeout": 0.7,
    "health_failures": 3,
    "probe_interval": 0.15,
    "canary_timeout": 2.0,
    "canary_interval": 2.0,
    "term_timeout": 1.0,
    "kill_timeout": 2.0,
    "drain_timeout": DRAIN,
    "supervisor_timeout": SILENCE,
}
"""The deadlines of the engines' specs: short enough to wait for, long enough for a busy machine."""

GONE: Final = 5.0
"""Seconds from the detection (from the signal, when the driver is gone) until nothing may be left."""
SERVES: Final = 20.0
"""Seconds from when nothing may be left until the next engine answers: five starts at once, each with a new
Ray worker."""
WATCH: Final = 2.0
"""Seconds that an engine which has to be kept is watched: as long as the checks would need to condemn it."""

_CHECKS = PROBES["health_failures"] * (PROBES["health_timeout"] + PROBES["probe_interval"])
_LOOK = 3.0
"""Seconds between a supervisor's signs of life, and until their absence is looked at again."""
_NOISE = 3.0
"""Seconds for a machine that is busy with five engines and other people's work."""

_RULES: Final[dict[Victim, dict[signal.Signals, Outcome]]] = {
    "engine": {signal.SIGTERM: "replaced", signal.SIGKILL: "replaced", signal.SIGSTOP: "replaced"},
    # The embedded engine does not need its children, so their death changes nothing: a fleet that replaced
    # it would throw work away.
    "child": {signal.SIGTERM: "kept", signal.SIGKILL: "kept", signal.SIGSTOP: "kept"},
    "grandchild": {signal.SIGTERM: "kept", signal.SIGKILL: "kept", signal.SIGSTOP: "kept"},
    "supervisor": {signal.SIGTERM: "replaced", signal.SIGKILL: "replaced", signal.SIGSTOP: "replaced"},
    # A stopped driver is judged after CONT; meanwhile its engines have to go on.
    "driver": {signal.SIGTERM: "ended", signal.SIGKILL: "ended", signal.SIGSTOP: "kept"},
    "raylet": {signal.SIGTERM: "replaced", signal.SIGKILL: "replaced", signal.SIGSTOP: "replaced"},
}


def outcome(victim: Victim, how: signal.Signals, state: State) -> Outcome:
    """What has to become of the engine."""
    rule = _RULES[victim][how]
    if state == "draining" and rule != "ended":
        return "down"  # with or without our help: a drain is not taken back
    return rule


def detection(victim: Victim, how: signal.Signals, state: State) -> float:
    """Seconds from the signal until the fleet says that the engine cannot be used."""
    return _NOISE + _without_noise(victim, how, state)


def _without_noise(victim: Victim, how: signal.Signals, state: State) -> float:
    if victim == "driver":
        return STOPPED + DRAIN
    if victim == "raylet":
        return 6.0 if how == signal.SIGSTOP else 3.0  # `nodes.HEALTH` adds up to 5.4 s
    if victim == "supervisor":
        # Ray lets an actor that got TERM end what it does, and gives it nothing new meanwhile.
        return 0.0 if how == signal.SIGKILL else SILENCE + _LOOK
    if state == "draining" and (victim != "engine" or how == signal.SIGSTOP):
        return DRAIN
    if victim == "engine" and state == "starting" and how == signal.SIGSTOP:
        return float(PROBES["start_timeout"])  # frozen or still loading: only the deadline can tell
    if victim == "engine" and state == "updating" and how != signal.SIGKILL:
        return HOLD + _CHECKS  # after TERM it waits for its disk, with its port closed
    return _CHECKS if how == signal.SIGSTOP else 0.0
