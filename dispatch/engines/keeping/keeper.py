"""Keeper: keeps one engine of a fleet alive, in one task that waits for nobody else's engine.

    start -> ready -> down -> stopped for certain -> pause -> start …            -> given up

"Down" is one of three things: the engine's process ended, its supervisor is gone, or its checks
failed too often in a row. Whichever it is, the engine is published as not routable first and
touched afterwards, so that nobody is sent to an engine that is being killed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError

from dispatch.engines.health.checks import until_unhealthy
from dispatch.engines.keeping.calls import call, named
from dispatch.engines.keeping.supervisor import CONTROL, as_actor
from dispatch.engines.spec import EngineSpec, EngineStatus, ExitReport, State
from dispatch.processes import is_alive
from protocol import CodedError, Events, catalogue
from protocol.errors import here

HEALTHY_RUN: Final = 60.0
"""Seconds that an engine has to be ready for its failed starts to be forgotten."""
_MARGIN: Final = 5.0
"""Seconds that a call may take beyond what its own deadlines add up to: Ray and a busy machine."""
_SHORTEST: Final = 0.05
"""Seconds between two calls of a supervisor that is out of reach, at least."""
_REPORTED: Final = ("stage", "status", "signal", "last_lines", "stop_failed", "url")


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was ready, went down and is ready again: ``seconds`` from the detection (unix
    seconds) to being routable; ``code`` is why it went down."""

    key: str
    code: str
    detected_at: float
    seconds: float


class Keeper:
    """One engine's watcher. `run` is its task; `close` ends both."""

    def __init__(
        self,
        spec: EngineSpec,
        key: str,
        *,
        events: Events,
        changed: Callable[[EngineStatus], None],
        recovered: Callable[[Recovery], None],
        backoff: tuple[float, float],
        budget: int,
    ) -> None:
        self.spec = spec
        self.status = EngineStatus(key=key, since=time.time())
        self.given_up: CodedError | None = None
        self._events = events
        self._changed = changed
        self._recovered = recovered
        self._backoff = backoff
        self._budget = budget
        self._actor: Any = None
        self._answered = False  # the actor has answered once: it has a process
        self._attempt = 0
        self._failures: list[CodedError] = []  # failed starts in a row, oldest first
        self._complaint = asyncio.Event()

    def complain(self) -> None:
        """A client had trouble with this engine: check it now, generation included."""
        self._complaint.set()

    async def run(self) -> None:
        """Keep the engine until it is given up. Cancelled, it leaves the rest to `close`."""
        try:
            await self._keep()
        except CodedError as exc:
            self._give_up(exc)
        except Exception as exc:  # noqa: BLE001 - a keeper that ends unseen is an engine that nobody restarts
            self._give_up(CodedError.from_exception(exc, "INTERNAL.BUG"))

    async def _keep(self) -> None:
        down: tuple[str, float, float] | None = None  # code, unix and monotonic time of the detection
        while True:
            began = time.monotonic()
            try:
                await self._start()
            except CodedError as failed:
                self._failures.append(failed)
                self._down("dead", failed)
            else:
                ready = time.monotonic()
                self._emit("engine.ready", seconds=ready - began, url=self.status.url, pid=self.status.pid)
                if down is not None:
                    code, detected_at, since = down
                    self._recovered(
                        Recovery(
                            key=self.status.key, code=code, detected_at=detected_at, seconds=ready - since
                        )
                    )
                cause = await self._until_down()
                down = (str(cause.code), time.time(), time.monotonic())
                self._down("suspect" if cause.code == "ENGINE.UNHEALTHY" else "dead", cause)
                if time.monotonic() - ready >= HEALTHY_RUN:
                    self._failures.clear()
            await self._clear()
            self._raise_if_hopeless()
            pause = min(self._backoff[1], self._backoff[0] * 2 ** max(0, len(self._failures) - 1))
            self._publish("dead", restarts=self.status.restarts + 1)
            self._emit("engine.restarting", code=self.status.code, pause=pause)
            await asyncio.sleep(pause)

    def _raise_if_hopeless(self) -> None:
        if not self._failures:
            return
        first, last = self._failures[0], self._failures[-1]
        if catalogue.entry(last.code).advice == "give_up":
            raise last  # it would fail the same way again
        if len(self._failures) >= self._budget:
            raise CodedError(
                "ENGINE.CRASH_LOOP",
                f"{len(self._failures)} starts in a row failed; the first with {first.code}: {first.detail}",
                {
                    "first_code": first.code,
                    **{name: first.data[name] for name in _REPORTED if name in first.data},
                },
            ) from first

    def _give_up(self, error: CodedError) -> None:
        self.given_up = error
        self._publish("dead", code=str(error.code), detail=error.detail)
        self._emit("engine.given_up", level="error", error=error, **_facts(error))

    # -- one run -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._attempt += 1
        self._publish("starting", stage="actor", pid=0, create_time=0.0, url="", weight_version=None)
        self._emit("engine.starting")
        spec, key = self.spec, self.status.key
        if self._actor is None:
            self._answered = False
            self._actor = as_actor(spec).remote(spec, key)
        if not self._answered:
            first = self._actor.status.options(concurrency_group=CONTROL).remote()
            await call(
                first, spec.start_timeout, "ENGINE.START_TIMEOUT", f"{key}, stage actor: not scheduled"
            )
            self._answered = True
        # The supervisor keeps start_timeout itself; this deadline is for a supervisor that hangs.
        longest = spec.start_timeout + spec.term_timeout + 2 * spec.kill_timeout + _MARGIN
        status = await call(self._actor.start.remote(), longest, "ENGINE.START_TIMEOUT", f"{key}: no answer")
        self._complaint.clear()
        self._publish(
            "ready",
            stage="routable",
            pid=status.pid,
            create_time=status.create_time,
            url=status.url,
            node=status.node,
            supervisor_pid=status.supervisor_pid,
            weight_version=status.weight_version,
            code="",
            detail="",
        )

    async def _until_down(self) -> CodedError:
        """Why the engine can no longer be used, the moment that it is known."""
        ended = asyncio.create_task(self._until_ended())
        unhealthy = asyncio.create_task(until_unhealthy(self.spec, self.status.url, self._complaint))
        try:
            await asyncio.wait({ended, unhealthy}, return_when=asyncio.FIRST_COMPLETED)
            return (ended if ended.done() else unhealthy).result()
        finally:
            ended.cancel()
            unhealthy.cancel()
            await asyncio.gather(ended, unhealthy, return_exceptions=True)

    async def _until_ended(self) -> CodedError:
        pause = max(_SHORTEST, self._backoff[0])
        while True:
            try:
                async with asyncio.timeout(3600.0 + _MARGIN):
                    report: ExitReport | None = await self._actor.watch.remote(3600.0)
            except ActorUnavailableError:
                # Not dead, only out of reach: what decides meanwhile is whether the engine answers.
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._backoff[1])
                continue
            except TimeoutError:
                continue  # the supervisor hangs; the engine is checked without it
            except RayError as exc:
                return named(exc)
            if report is not None:
                facts = {
                    "status": report.status,
                    "signal": report.signal,
                    "last_lines": report.last_lines[-20:],
                }
                text = report.how + (
                    f"; last line: {report.last_lines[-1]:.300}" if report.last_lines else ""
                )
                return CodedError("ENGINE.EXITED", text, facts)

    # -- the end -----------------------------------------------------------------------------------

    async def _clear(self) -> None:
        """Nothing of the last run is left when this returns. The supervisor is kept if it answers.
        Raises CodedError ENGINE.STOP_FAILED."""
        if self._actor is None:
            return
        spec = self.spec
        if self._answered and ray.is_initialized():
            longest = spec.term_timeout + 2 * spec.kill_timeout + _MARGIN
            try:
                await call(self._actor.stop.remote(), longest, "ENGINE.SUPERVISOR_LOST", "no answer to stop")
                return
            except CodedError as exc:
                if exc.code == "ENGINE.STOP_FAILED":
                    raise
        self._kill_actor()
        await self._confirm_gone(spec.kill_timeout)

    def _kill_actor(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():  # else it is gone with Ray
            ray.kill(actor)

    async def _confirm_gone(self, timeout: float) -> None:
        """The supervisor is dead, so its guard is killing the engine: 10 ms. Seen from here only when
        the engine ran on this machine."""
        status, deadline = self.status, time.monotonic() + timeout
        if not status.pid or status.node != here().host:
            return
        while is_alive(status.pid, status.create_time):
            if time.monotonic() > deadline:
                raise CodedError(
                    "ENGINE.STOP_FAILED",
                    f"stage guard: process {status.pid} of {status.key} outlived its supervisor",
                    {"stage": "guard", "pids": [status.pid]},
                )
            await asyncio.sleep(0.01)

    async def close(self) -> CodedError | None:
        """Stop the engine, then its supervisor, after `run` has been cancelled. What failed, if so."""
        error = None
        self._publish("stopping")
        try:
            await self._clear()
        except CodedError as exc:
            error = exc
        finally:
            self._kill_actor()
            self._publish("dead")
        if error is not None:
            self._emit("engine.stopped", level="error", error=error, **_facts(error))
        elif self.given_up is None:
            self._emit("engine.stopped")
        return error

    # -- small things ------------------------------------------------------------------------------

    def _down(self, state: State, error: CodedError) -> None:
        self._publish(state, code=str(error.code), detail=error.detail)
        self._emit("engine.died", level="error", error=error, pid=self.status.pid, **_facts(error))

    def _publish(self, state: State, **facts: Any) -> None:
        now = self.status.since if state == self.status.state else time.time()
        self.status = msgspec.structs.replace(self.status, state=state, since=now, **facts)
        self._changed(self.status)

    def _emit(self, event: str, **facts: Any) -> None:
        self._events.emit(event, key=self.status.key, attempt=self._attempt, **facts)


def _facts(error: CodedError) -> dict[str, Any]:
    return {name: error.data[name] for name in _REPORTED if name in error.data}
