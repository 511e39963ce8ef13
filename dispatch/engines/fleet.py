"""EngineFleet: a set of engines that is kept alive, and the list of those that may be used.

One task an engine (`dispatch.engines.keeping.keeper`): an engine whose health call hangs delays nobody's
checks but its own. The fleet owns its supervisors: they are not detached, so they end with the
driver, and every engine ends with its supervisor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import ray

from dispatch.engines.keeping import lifecycle
from dispatch.engines.keeping.keeper import Keeper, longest_stop
from dispatch.engines.keeping.lifecycle import Policy
from dispatch.engines.keeping.publication import HIDE, Publication
from dispatch.engines.keeping.record import Recovery
from dispatch.engines.routers.router import Router
from dispatch.engines.spec import EngineSpec, EngineStatus
from protocol import Code, CodedError, Events

Callback = Callable[[EngineStatus], None]


class EngineFleet:
    """Starts the engines of ``specs`` (keys ``engine/0``, ``engine/1``, …) and restarts what goes down.

    ``restart_backoff`` is the shortest and longest pause before a restart in seconds, doubled with each
    short life in a row: one that never was ready, or for less than ``healthy_run`` seconds. After
    ``restart_budget`` of them an engine is given up with ENGINE.CRASH_LOOP and the first cause. A cause that
    will not go away by itself, such as a command that is not there, is given up at once, and so is an engine
    of which something is left (ENGINE.STOP_FAILED). `restart` starts what was given up anew.

    ``router`` is told which engines may be used (`dispatch.engines.routers`): after their canary, and no
    longer before anything is done to them.

    Belongs to one event loop. Raises CodedError CONFIG.INVALID for no specs or senseless numbers,
    and on entering CONFIG.MISSING when Ray is not initialised.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        events: Events | None = None,
        restart_backoff: tuple[float, float] = (0.2, 5.0),
        restart_budget: int = 5,
        healthy_run: float = 60.0,
        router: Router | None = None,
    ) -> None:
        if not specs:
            raise CodedError("CONFIG.INVALID", "engine fleet: specs is empty, name one engine at least")
        if not 0 <= restart_backoff[0] <= restart_backoff[1]:
            raise CodedError(
                "CONFIG.INVALID",
                f"engine fleet: restart_backoff is (shortest, longest) seconds, not {restart_backoff}",
            )
        if restart_budget < 1:
            raise CodedError(
                "CONFIG.INVALID", f"engine fleet: restart_budget is 1 or more, not {restart_budget}"
            )
        if not healthy_run > 0:
            raise CodedError(
                "CONFIG.INVALID", f"engine fleet: healthy_run is seconds, more than 0, not {healthy_run}"
            )
        self.router = router
        self.recoveries: list[Recovery] = []
        self._events = events if events is not None else Events()
        self._callbacks: list[Callback] = []
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[tuple[CodedError, ...]] | None = None
        self._publication = Publication(router, self._events)
        self._keepers = [
            Keeper(
                spec,
                f"engine/{n}",
                events=self._events,
                changed=self._changed,
                recovered=self.recoveries.append,
                policy=Policy(restart_backoff, restart_budget, healthy_run, spec.health_failures),
                publication=self._publication,
            )
            for n, spec in enumerate(specs)
        ]

    async def __aenter__(self) -> Self:
        if not ray.is_initialized():
            raise CodedError(
                "CONFIG.MISSING", "Ray is not initialised: call ray.init() before entering the fleet"
            )
        if self._tasks or self._closing is not None:
            raise CodedError("POOL.MISUSE", "a fleet is entered once: make a new one")
        # No await: a cancelled entry has either started nothing or is followed by __aexit__.
        self._tasks = [asyncio.create_task(keeper.run()) for keeper in self._keepers]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def engines(self) -> tuple[EngineStatus, ...]:
        """All engines, also those that are down or given up."""
        return tuple(keeper.status for keeper in self._keepers)

    def routable(self) -> list[EngineStatus]:
        """The engines that may be sent work at this moment."""
        return [status for status in self.engines() if status.routable]

    @property
    def given_up(self) -> tuple[CodedError, ...]:
        """Why each engine that is not restarted any more was given up."""
        return tuple(keeper.given_up for keeper in self._keepers if keeper.given_up is not None)

    @property
    def restarts(self) -> int:
        """Restarts begun so far, all engines together."""
        return sum(keeper.status.restarts for keeper in self._keepers)

    def on_change(self, callback: Callback) -> Callable[[], None]:
        """Call ``callback`` with the new status at every change of an engine, on the loop, before
        anything else is done about it. The result takes the callback away again."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def report(self, url: str, fault_code: Code | str) -> None:
        """A client's complaint about the engine at ``url``: it is checked at once. Whether it is
        replaced is decided by that check, never by the complaint: a client may be wrong."""
        for keeper in self._keepers:
            if keeper.status.url == url.rstrip("/"):
                keeper.complain()
                self._events.emit(
                    "engine.complaint", level="debug", key=keeper.status.key, code=str(fault_code)
                )

    async def drain(self, key: str, timeout: float | None = None) -> None:
        """Take one engine out of use, let what it has begun end, stop it, and leave it down until `restart`.
        Returns when nothing of it is left, after at most ``timeout`` seconds (None: the spec's deadlines
        added up).

        Raises CodedError POOL.MISUSE for a key that is not there, ENGINE.STOP_FAILED, CANCEL.CALLER when it
        was told to `restart` meanwhile, and TIMEOUT.DEADLINE when it is not down by then; it goes on ending
        all the same."""
        keeper = self._keeper(key)
        spec = keeper.spec
        if timeout is None:
            timeout = HIDE + spec.drain_timeout + longest_stop(spec)
        order = keeper.tell(lifecycle.Drain())

        def down() -> bool:
            if keeper.taken >= order and keeper.life.wanted:
                raise CodedError("CANCEL.CALLER", f"{key} is to serve again, by another order")
            return keeper.life.state == "dead" and not keeper.life.wanted

        await self._until(keeper, down, timeout, "down")
        if keeper.given_up is not None and keeper.given_up.code == "ENGINE.STOP_FAILED":
            raise keeper.given_up

    async def restart(self, key: str, timeout: float | None = None) -> EngineStatus:
        """Give one engine a new life, draining the one it has; also one that was drained or given up.
        Returns when it is ready again.

        Raises CodedError POOL.MISUSE for a key that is not there, why it was given up if it is again,
        CANCEL.CALLER when it was told to `drain` meanwhile, and TIMEOUT.DEADLINE after ``timeout`` seconds
        (None: the spec's deadlines added up)."""
        keeper = self._keeper(key)
        spec, before, known = keeper.spec, keeper.life.starts, keeper.given_up
        if timeout is None:
            timeout = HIDE + spec.drain_timeout + longest_stop(spec) + 2 * spec.start_timeout
        order = keeper.tell(lifecycle.Restart())

        def settled() -> bool:
            if keeper.given_up is not None:  # for another reason than the one that it may have had
                return keeper.given_up is not known
            if keeper.taken >= order and keeper.life.state == "dead" and not keeper.life.wanted:
                raise CodedError("CANCEL.CALLER", f"{key} is to stay down, by another order")
            return keeper.life.starts > before and keeper.life.state == "ready"

        await self._until(keeper, settled, timeout, "ready again")
        if keeper.given_up is not None:
            raise keeper.given_up
        return keeper.status

    def quarantine(self, key: str, error: CodedError) -> None:
        """Take an engine out of use that is alive and must not serve, because of ``error``: it missed a
        weight update, say. It stays so until `restart`, or its end. Raises CodedError POOL.MISUSE for a key
        that is not there."""
        self._keeper(key).tell(lifecycle.Quarantine(error))

    async def hold(self, key: str, seconds: float, reason: str) -> None:
        """An engine is about to be paused on purpose, for at most ``seconds``: until `release` it is not
        `routable` and not asked whether it is healthy, for a paused SGLang does not answer ``/health``; only
        that its process lives is seen to. A router in front keeps it, with requests that wait there: it would
        have no engine left where all are paused at once.

        Raises CodedError POOL.MISUSE when it is not running, ENGINE.SUPERVISOR_LOST when nobody answers."""
        if not seconds > 0:
            raise CodedError("CONFIG.INVALID", f"hold: seconds is more than 0, not {seconds}")
        await self._keeper(key).hold(seconds, reason)

    async def release(self, key: str) -> None:
        """A held engine goes on. Raises CodedError as `hold`."""
        await self._keeper(key).release()

    async def wait_ready(self, timeout: float, count: int | None = None) -> list[EngineStatus]:
        """Wait until ``count`` engines (all, when None) are routable and return these.

        Raises CodedError: the cause of the engine given up when so many cannot be reached any more,
        ENGINE.START_TIMEOUT after ``timeout`` seconds with how each engine stands, POOL.CLOSED."""
        wanted = len(self._keepers) if count is None else count
        try:
            async with asyncio.timeout(timeout):
                while len(self.routable()) < wanted:
                    lost = self.given_up
                    if self._closing is not None or not self._tasks:
                        raise CodedError("POOL.CLOSED", "the fleet is not running: use `async with`")
                    if len(self._keepers) - len(lost) < wanted:
                        raise (
                            lost[0]
                            if lost
                            else CodedError(
                                "CONFIG.INVALID",
                                f"{wanted} ready engines of {len(self._keepers)} can never be",
                            )
                        )
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as exc:
            how = "; ".join(_describe(status) for status in self.engines())
            raise CodedError(
                "ENGINE.START_TIMEOUT",
                f"{len(self.routable())} of {wanted} engines ready after {timeout:g} s: {how}",
            ) from exc
        return self.routable()

    async def close(self, term_timeout: float | None = None) -> tuple[CodedError, ...]:
        """Stop all engines at once and their supervisors after them; what failed, each also an
        ``engine.stopped`` event of level error. ``term_timeout`` is seconds between TERM and KILL, each
        spec's own when None. Idempotent; called again with 0, it kills what is still being asked to end.
        Takes as long as the slowest engine's ``term_timeout + 2 * kill_timeout`` and what it takes to see
        its traces gone; cancelled, it still ends its work before it raises CancelledError."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(term_timeout))
        elif term_timeout == 0 and not self._closing.done():
            for keeper in self._keepers:
                keeper.hasten()
        try:
            return await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            await asyncio.wait({self._closing})
            raise

    async def _close(self, term_timeout: float | None) -> tuple[CodedError, ...]:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._news.set()
        if not self._tasks:
            return ()
        errors = await asyncio.gather(*(keeper.close(term_timeout) for keeper in self._keepers))
        await self._publication.close()
        return tuple(error for error in errors if error is not None)

    def _keeper(self, key: str) -> Keeper:
        if self._closing is not None or not self._tasks:
            raise CodedError("POOL.CLOSED", "the fleet is not running: use `async with`")
        for keeper in self._keepers:
            if keeper.status.key == key:
                return keeper
        known = ", ".join(keeper.status.key for keeper in self._keepers)
        raise CodedError("POOL.MISUSE", f"there is no engine {key!r:.100}, only {known}")

    async def _until(self, keeper: Keeper, holds: Callable[[], bool], timeout: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout):
                while not holds():
                    if self._closing is not None:
                        raise CodedError("POOL.CLOSED", "the fleet was closed meanwhile")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as exc:
            raise CodedError(
                "TIMEOUT.DEADLINE", f"not {what} after {timeout:g} s: {_describe(keeper.status)}"
            ) from exc

    def _changed(self, status: EngineStatus) -> None:
        self._news.set()
        for callback in tuple(self._callbacks):
            try:
                callback(status)
            except Exception as exc:  # noqa: BLE001 - a listener's fault must not stop the keeping of engines
                self._events.emit("engine.listener_failed", level="error", error=exc, key=status.key)


def _describe(status: EngineStatus) -> str:
    text = f"{status.key} {status.state}"
    if status.state == "starting":
        text += f" (stage {status.stage})"
    return f"{text}, last failure {status.code}: {status.detail:.200}" if status.code else text
