"""A keeper: starts one poster, watches it, retires it, replaces it. One task a poster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dispatch.posting.observe.stats import Ledger, PosterStats, Recovery
from dispatch.posting.posters.batching import MAX_CALLS
from dispatch.posting.posters.lane import Health, Lane, PosterLane, State
from dispatch.posting.posters.placement import affinity
from dispatch.posting.posters.session import Session
from dispatch.posting.transports.client import Transport
from dispatch.processes import until
from dispatch.roles.policy import Role, options_for
from faults import Backoff, classify
from protocol import CodedError, Events


@dataclass(frozen=True, slots=True)
class Recreation:
    """How posters are replaced: after ``backoff`` (seconds, growing with each failure in a row), and
    no more once ``budget`` lives in a row failed to start or ended within ``proven`` seconds."""

    backoff: Backoff = Backoff(0.1, 10.0)  # noqa: RUF009 - frozen, so sharing the default is safe
    budget: int = 6
    proven: float = 30.0


class Keeper:
    """See the module. ``settled`` is set once the first start has succeeded or failed, ``leaving`` when its
    node is about to go and nothing new is to be sent there, ``refused`` when it cannot start with such
    settings, and trying again would change nothing."""

    def __init__(
        self,
        key: str,
        node: str,
        *,
        concurrency: int,
        options: dict[str, Any],
        transport: Transport,
        release: Callable[[Lane], None],
        changed: Callable[[], None],
        health: Health,
        recreation: Recreation,
        events: Events,
        ledger: Ledger,
    ) -> None:
        self.key = key
        self.lane: PosterLane | None = None
        self.node = node
        self.settled = asyncio.Event()
        self.leaving = False
        self.refused: CodedError | None = None
        self._session = Session()
        self._concurrency = concurrency
        self._options = options
        self._transport: Transport = transport
        self._release = release
        self._changed = changed
        self._health = health
        self._recreation = recreation
        self._events = events
        self._ledger = ledger
        self._generation = 0
        self._abandoned = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start keeping."""
        self._task = asyncio.create_task(self._keep(), name=self.key)

    async def drained(self, timeout: float) -> None:
        """Until nothing is in flight with the poster, for at most ``timeout`` seconds."""
        lane = self.lane
        if lane is not None and lane.state is not State.DEAD:
            await until(lambda: lane.occupied == 0, timeout)

    async def end(self, why: CodedError) -> None:
        """Stop keeping, and close the poster; what is in flight with it ends as ``why``."""
        if self.lane is not None:
            self.lane.settle(why)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self.settled.set()
        if self.lane is not None and self.lane.state is not State.DEAD:
            gone = await self.lane.close()
            if not gone:
                self._events.emit(
                    "poster.unconfirmed",
                    level="error",
                    key=self.key,
                    code="ACTOR.WEDGED",
                    detail="the poster was killed, but its process is not known to be gone",
                )

    def stats(self) -> PosterStats:
        """This poster, now."""
        lane = self.lane
        state = "abandoned" if self._abandoned else str(lane.state) if lane is not None else "starting"
        info = lane.info if lane is not None else None
        return PosterStats(
            self.key,
            state,
            info.pid if info is not None else 0,
            info.create_time if info is not None else 0.0,
            info.node if info is not None else self.node,
            self._generation,
            lane.share if lane is not None else 0,
            lane.occupied if lane is not None else 0,
        )

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0  # lives in a row that came to nothing
        first_cause: CodedError | None = None
        lost: tuple[float, CodedError] | None = None  # since when, and why, this poster is missing
        while True:
            began = loop.time()
            try:
                ended, seen, served = await self._live(lost)
            except Exception as exc:  # noqa: BLE001 - else nobody would keep this poster any more, nor tell
                ended, seen, served = CodedError.from_exception(exc, "INTERNAL.BUG"), loop.time(), False
                await self._drop(ended)
            if loop.time() - began >= self._recreation.proven:
                failures, first_cause = 0, None
            failures += 1
            first_cause = first_cause or ended
            if lost is None or served:
                lost = (seen, ended)  # a new loss; failing to start again is still the same one
            if not served and ended.code.family == "CONFIG":
                self.refused = ended
                self._give_up(ended)
                return
            over = self._session.over()
            if over is not None:
                self._give_up(over)
                return
            if failures > self._recreation.budget:
                error = CodedError(
                    "POOL.RECREATE_BUDGET",
                    f"{self.key} failed {failures} times in a row and is not replaced any more; "
                    f"first: {first_cause.detail}",
                )
                error.__cause__ = first_cause
                self._give_up(error)
                return
            await asyncio.sleep(self._recreation.backoff.delay(failures))

    async def _live(self, lost: tuple[float, CodedError] | None) -> tuple[CodedError, float, bool]:
        """One life: from creating the actor to knowing that it is dead. Returns why it ended, when
        that was seen (loop time), and whether it had served."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._generation += 1
        lane = PosterLane(
            f"{self.key}.{self._generation}", self._release, self._moved, self._health, self._session
        )
        self.lane = lane
        try:
            await lane.start(
                {
                    **self._options,
                    **options_for(Role.OWNER),
                    "max_concurrency": 4 * MAX_CALLS,  # room for what a cancelled call leaves behind
                    "scheduling_strategy": affinity(self.node),
                },
                self._concurrency,
                self._transport,
            )
        except Exception as exc:  # noqa: BLE001 - Ray refuses options with builtin exceptions of any kind
            failed = (
                exc if isinstance(exc, CodedError) else CodedError.from_exception(exc, classify(exc).code)
            )
            self.settled.set()
            self._changed()
            self._events.emit(
                "poster.start_failed", level="error", error=failed, key=self.key, generation=self._generation
            )
            return failed, loop.time(), False
        assert lane.info is not None
        self.settled.set()
        seconds = loop.time() - began
        if lost is not None:
            since, why = lost
            self._ledger.recreated += 1
            self._ledger.recoveries.append(Recovery(self.key, str(why.code), loop.time() - since))
        self._changed()
        self._events.emit(
            "poster.ready",
            key=self.key,
            pid_of_poster=lane.info.pid,
            node=lane.info.node,
            generation=self._generation,
            seconds=round(seconds, 3),
        )
        why = await lane.watch()
        seen = loop.time()
        lane.state = State.DEAD
        self._changed()  # nothing new goes there from here on
        gone = await lane.retire(why)
        self._events.emit(
            "poster.died",
            level="error",
            error=why,
            key=self.key,
            pid_of_poster=lane.info.pid,
            node=lane.info.node,
            generation=self._generation,
            confirmed_gone=gone,
        )
        return why, seen, True

    def _moved(self, lane: PosterLane) -> None:
        if lane.state is State.QUARANTINED:
            if lane.lost is None:  # what is dead is told as that, once it is confirmed
                self._events.emit(
                    "poster.quarantined",
                    level="warning",
                    key=self.key,
                    error=lane.trouble,
                    generation=self._generation,
                )
            self._changed()
        elif lane.state is State.SERVING:
            self._events.emit(
                "poster.ready", key=self.key, detail="it answers again", generation=self._generation
            )
            self._changed()

    async def _drop(self, why: CodedError) -> None:
        """End the life that a bug has left behind."""
        self.settled.set()
        lane = self.lane
        if lane is not None and lane.state is not State.DEAD:
            self._events.emit(
                "poster.died", level="error", error=why, key=self.key, generation=self._generation
            )
            lane.state = State.DEAD
            self._changed()
            await lane.retire(why)

    def _give_up(self, error: CodedError) -> None:
        self._abandoned = True
        self._events.emit("poster.abandoned", level="error", error=error, key=self.key)
        self._changed()
