"""A round: one kind of victim is hit by one signal in all states at once, and each engine is judged."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from tests.engine_matrix.expected import (
    DRAIN,
    GONE,
    SERVES,
    SIGNALS,
    STOPPED,
    VICTIMS,
    WATCH,
    Outcome,
    State,
    Victim,
    detection,
    outcome,
)
from tests.engine_matrix.stage import Stage, Struck, generates
from tests.engine_matrix.traces import Process

ROUNDS: Final = [(victim, how) for victim in VICTIMS for how in SIGNALS]
DOWN: Final = ("suspect", "quarantined", "stopping", "dead")
"""States in which the fleet no longer counts on an engine; in the last two it is not going to again."""
STEP: Final = 0.03


class Cell(NamedTuple):
    """What became of one engine. Times are seconds from the signal, None where it did not come to that."""

    victim: Victim
    how: signal.Signals
    state: State
    outcome: Outcome
    detected: float | None
    gone: float | None
    serving: float | None
    wrong: tuple[str, ...]


def play(stage: Stage, victim: Victim, how: signal.Signals) -> list[Cell]:
    """One round, a cell for each state."""
    stage.set_up()
    if victim == "raylet":
        stage.another_node()  # not before the engines are placed: all of them are on one node
    all_struck = stage.bring()
    victims = _victims(stage, all_struck, victim)
    for struck in all_struck:
        if victim in ("supervisor", "driver", "raylet"):
            struck.traces.processes.add(struck.supervisor)
        if victim == "driver" and how != signal.SIGSTOP:
            struck.traces.processes.add(stage.driver.process)
    began = time.time()
    for one in victims:
        one.send(how)
    if victim == "driver" and how == signal.SIGSTOP:
        time.sleep(STOPPED)
        still = [_goes_on(struck) for struck in all_struck]
        stage.driver.process.send(signal.SIGCONT)
    else:
        still = [() for _ in all_struck]
    judges = [Judge(stage, one, victim, how, began) for one in all_struck]
    with ThreadPoolExecutor(len(judges)) as pool:
        cells = list(pool.map(Judge.cell, judges))
    cells = [cell._replace(wrong=before + cell.wrong) for cell, before in zip(cells, still, strict=True)]
    for one in victims:
        one.send(signal.SIGCONT)
    if victim == "raylet":
        stage.move()
    for struck in all_struck:
        struck.leave()
    stage.spoilt = any(cell.wrong or cell.outcome == "ended" for cell in cells)
    if stage.spoilt:
        for struck in all_struck:
            struck.traces.remove()
    return cells


def unplayed(victim: Victim, how: signal.Signals, state: State, why: Exception) -> Cell:
    """The cell of a round that came to nothing."""
    rule = outcome(victim, how, state)
    return Cell(
        victim, how, state, rule, None, None, None, (f"not played: {str(why).partition(chr(10))[0][:300]}",)
    )


def _victims(stage: Stage, all_struck: list[Struck], victim: Victim) -> list[Process]:
    if victim == "driver":
        return [stage.driver.process]
    if victim == "raylet":
        return [stage.raylet]
    if victim == "supervisor":
        return [struck.supervisor for struck in all_struck]
    return [getattr(struck.traces, victim) for struck in all_struck]


def _goes_on(struck: Struck) -> tuple[str, ...]:
    """While nobody watches it: whether the engine does what it did."""
    if not struck.traces.engine.runs:
        return ("it ended while its driver was stopped",)
    if struck.state in ("idle", "generating") and not generates(struck.traces.url):
        return ("it did not generate while its driver was stopped",)
    return ()


class Judge:
    """Looks at one engine after the signal until it is settled."""

    def __init__(
        self,
        stage: Stage,
        struck: Struck,
        victim: Victim,
        how: signal.Signals,
        began: float,
    ) -> None:
        self._stage = stage
        self._struck = struck
        self._case = (victim, how, struck.state)
        self._began = began
        self._detected: float | None = None
        self._gone: float | None = None
        self._serving: float | None = None
        self._wrong: list[str] = []

    def cell(self) -> Cell:
        """Judge by what has to happen."""
        rule = outcome(*self._case)
        getattr(self, f"_{rule}")()
        times = (one and one - self._began for one in (self._detected, self._gone, self._serving))
        return Cell(*self._case, rule, *times, tuple(self._wrong))

    # -- the outcomes ------------------------------------------------------------------------------

    def _replaced(self) -> None:
        self._must_be_detected()
        self._must_settle(self._detected or time.time(), serving=True)

    def _kept(self) -> None:
        """Also when it had to be kept and was not: then what became of it is looked at all the same."""
        if self._wait(self._is_ended, time.time() + WATCH):
            self._detected = self._down_since()
            self._say(f"given up as {self._last()['state']} {self._last()['code']}: {self._last()['detail']}")
            self._must_settle(time.time(), serving=True)
            return
        struck, began = self._struck, self._began
        struck.leave()
        goes_on = self._wait(lambda: self._is_ready() and generates(struck.traces.url), time.time() + SERVES)
        if goes_on is None:
            self._say(f"it does not serve, and is not replaced: {self._last()}")
        self._began = time.time()
        struck.traces.processes = {one for one in struck.traces.processes if one.name != "supervisor"}
        self._stage.driver.send(do="restart", key=struck.key)
        if not self._wait(self._is_ended, self._began + DRAIN + GONE):  # it may end its work first
            self._say("an orderly restart does not begin")
        self._must_settle(self._down_since(DOWN[-2:]) or time.time(), serving=True)
        self._began, self._serving = began, goes_on

    def _down(self) -> None:
        self._must_be_detected()
        self._must_settle(self._detected or time.time(), serving=False)
        if self._wait(lambda: self._last()["state"] in ("starting", "ready"), time.time() + 1.0):
            self._say("it was started again, though it was drained")

    def _ended(self) -> None:
        self._must_settle(self._began, serving=False)

    # -- what they have in common ------------------------------------------------------------------

    def _must_be_detected(self) -> None:
        limit = detection(*self._case)
        if not self._wait(self._is_down, self._began + limit):
            self._say(f"not noticed within {limit:.1f} s")
        self._detected = self._down_since()

    def _must_settle(self, since: float, *, serving: bool) -> None:
        """Nothing is left of the old engine, no client waits for it, and another one serves."""
        struck = self._struck
        with ThreadPoolExecutor(1) as pool:  # both at once, so that each has its own time
            serves = pool.submit(self._wait, self._another_serves, since + GONE + SERVES) if serving else None
            self._gone = self._wait(lambda: not struck.traces.left(), since + GONE)
            left = struck.traces.left()
        self._serving = serves.result() if serves else None
        if self._gone is None:
            self._say(f"left after {GONE:g} s: {', '.join(left)}")
        if not self._wait(lambda: all(one.ended for one in struck.requests), time.time() + 5.0):
            self._say("a client still waits for its reply")
        if serving and self._serving is None:
            self._say(f"nobody serves after {GONE + SERVES:g} s: {self._last()}")

    def _another_serves(self) -> bool:
        last = self._last()
        new = last["state"] == "ready" and last["pid"] != self._struck.traces.engine.pid
        return new and generates(last["url"])

    def _last(self) -> dict[str, Any]:
        return self._stage.last(self._struck.key)

    def _is_ready(self) -> bool:
        return self._last()["state"] == "ready"

    def _is_down(self) -> bool:
        return self._down_since() is not None

    def _is_ended(self) -> bool:
        return self._down_since(DOWN[-2:]) is not None

    def _down_since(self, states: tuple[str, ...] = DOWN) -> float | None:
        """When the fleet said so, by its own clock, which is this machine's."""
        return next(
            (
                line["at"]
                for line in self._stage.driver.lines
                if line["key"] == self._struck.key and line["at"] >= self._began and line["state"] in states
            ),
            None,
        )

    def _wait(self, predicate: Callable[[], object], end: float) -> float | None:
        """When it came true; None when it did not until ``end`` (both unix seconds)."""
        while True:
            if predicate():
                return time.time()
            if time.time() > end:
                return None
            time.sleep(STEP)

    def _say(self, text: str) -> None:
        self._wrong.append(text)
