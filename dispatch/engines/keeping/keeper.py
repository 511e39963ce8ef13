"""Keeper: keeps one engine of a fleet alive, in one task that waits for nobody else's engine.

What becomes of the engine is decided by `dispatch.engines.keeping.lifecycle`; here its decisions are
carried out, and what happens is told to it: one inbox, one event at a time. What takes long (a start, a
drain, a rest) is a task that ends with an event; a stop is waited for, since nothing may come before its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayError

from dispatch.engines.keeping import lifecycle as event
from dispatch.engines.keeping.calls import call, named
from dispatch.engines.keeping.clearing import see_cleared
from dispatch.engines.keeping.lifecycle import Event, Life, Policy, step
from dispatch.engines.keeping.placing import Place
from dispatch.engines.keeping.publication import Publication
from dispatch.engines.keeping.record import Record, Recovery, facts_of
from dispatch.engines.keeping.supervisor import CONTROL, Sight, as_actor
from dispatch.engines.spec import EngineSpec, EngineStatus, ExitReport
from dispatch.engines.traces.owned import CLEAR_UP
from protocol import CodedError, Events

_MARGIN: Final = 5.0
"""Seconds that a call may take beyond what its own deadlines add up to: Ray and a busy machine."""
_LOOK: Final = 2.0
"""Seconds after which a supervisor that has seen nothing new says so: its heartbeat."""
_SHORTEST: Final = 0.05
"""Seconds between two calls of a supervisor that is out of reach, at least."""
_COMPLAINTS: Final = 0.25
"""Seconds between two complaints that are passed on to the supervisor, at least."""
_HARMLESS: Final = ("ports", "shm", "tmp")
"""Stages of a stop of which something may be left without harm to the next start: it gets fresh ports and a
directory of its own. Processes and GPU memory are another matter."""


def longest_stop(spec: EngineSpec) -> float:
    """Seconds that a stop of its engine may take, asked over Ray."""
    return spec.term_timeout + 2 * spec.kill_timeout + CLEAR_UP + _MARGIN


class _Silence:
    """How long a supervisor has been silent while we were there to listen. A driver that was stopped, or
    whose loop was blocked, has heard nothing either: such a gap counts as one tick."""

    TICK: Final = 1.0

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def passed(self) -> None:
        """Count the time since the last call."""
        now = time.monotonic()
        self.seconds += min(now - self._last, self.TICK)
        self._last = now


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
        policy: Policy,
        publication: Publication,
    ) -> None:
        self.spec = spec
        self._record = Record(key, events, changed, recovered)
        self._policy = policy
        self._publication = publication
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._told = 0
        self.taken = 0
        """How many of the events that it was told have had their effect on `life`."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._place = Place(spec, key)
        self._actor: Any = None
        self._answered = False  # the actor has answered once: it has a process
        self._complained = 0.0

    @property
    def status(self) -> EngineStatus:
        """How the engine stands."""
        return self._record.status

    @property
    def life(self) -> Life:
        """The same, as its state machine has it."""
        return self._record.life

    @property
    def given_up(self) -> CodedError | None:
        """Why the engine is not started again by itself."""
        return self.life.verdict

    def tell(self, what: Event) -> int:
        """Something happened, or is asked for. The order of calls is kept; the result is this one's number,
        from when on `taken` counts it."""
        self._inbox.put_nowait(what)
        self._told += 1
        return self._told

    def complain(self) -> None:
        """A client had trouble with this engine: check it now, generation included."""
        now = time.monotonic()
        if self._actor is not None and now - self._complained >= _COMPLAINTS and ray.is_initialized():
            self._complained = now
            self._actor.complain.remote()  # its answer says nothing, its death is seen elsewhere

    async def hold(self, seconds: float, reason: str) -> None:
        """See `EngineFleet.hold`."""
        await self._ask(self._supervisor().hold.remote(seconds, reason), "hold")
        self._record.publish(held=reason or "held")

    async def release(self) -> None:
        """See `EngineFleet.release`."""
        await self._ask(self._supervisor().release.remote(), "release")
        self._record.publish(held="")

    async def run(self) -> None:
        """Keep the engine until it is cancelled, which leaves the rest to `close`."""
        self.tell(event.Begun())
        while True:
            happened = await self._inbox.get()
            try:
                await self._take(happened)
            except Exception as exc:  # noqa: BLE001 - a keeper that ends unseen is an engine that nobody restarts
                bug = CodedError.from_exception(exc, "INTERNAL.BUG")
                self._record.life = Life(state="stopping", wanted=False, starts=self.life.starts)
                self.tell(event.StopFailed(bug))

    async def _take(self, happened: Event) -> None:
        before = self.life
        self._record.life, actions = step(before, happened, time.monotonic(), self._policy)
        self.taken += 1
        self._record.say(before, happened)
        for action in actions:
            await self._do[action](self)

    # -- what is to be done ------------------------------------------------------------------------

    async def _start(self) -> None:
        self._begin(self._live())

    async def _show(self) -> None:
        self._publication.show(self.status.url)

    async def _hide(self) -> None:
        await self._publication.hide(self.status.url)

    async def _drain(self) -> None:
        self._begin(self._until_drained())

    async def _stop(self) -> None:
        await self._end_tasks()
        try:
            await self._clear()
        except CodedError as exc:
            if exc.data.get("stage") not in _HARMLESS:
                self.tell(event.StopFailed(exc))
                return
            self._record.emit("engine.left", level="warning", error=exc, **facts_of(exc))
        self.tell(event.Stopped())

    async def _rest(self) -> None:
        self._begin(self._rested(self.life.rest))

    async def _release(self) -> None:
        """It is down for good: its supervisor ends and its place is given back, for others to use."""
        self._kill_actor()
        try:
            await see_cleared(self.status, self.spec.kill_timeout)
        except CodedError as exc:  # the place stays: what is left may still use what it stands for
            self._record.emit("engine.left", level="error", error=exc, **facts_of(exc))
        else:
            self._place.release()

    _do: Final[dict[str, Callable[[Keeper], Coroutine[Any, Any, None]]]] = {
        "start": _start,
        "show": _show,
        "hide": _hide,
        "drain": _drain,
        "stop": _stop,
        "rest": _rest,
        "release": _release,
    }

    # -- one life ----------------------------------------------------------------------------------

    async def _live(self) -> None:
        self._record.began = time.monotonic()
        try:
            await self._have_actor()
        except CodedError as exc:
            self.tell(event.StartFailed(exc))
            return
        starting = asyncio.create_task(self._until_ready())
        following = asyncio.create_task(self._follow())
        try:
            await asyncio.gather(starting, following)
        finally:
            starting.cancel()
            following.cancel()
            await asyncio.gather(starting, following, return_exceptions=True)

    async def _have_actor(self) -> None:
        spec, key = self.spec, self.status.key
        if self._actor is None:
            self._answered = False
            try:
                options = await self._place.options(spec.start_timeout)
                self._actor = as_actor(spec, **options).remote(spec, key)
            except (TypeError, ValueError) as exc:  # Ray looks at resources here, in the caller
                text = f"{key}: Ray takes no engine with these resources: {exc}"
                raise CodedError.from_exception(exc, "CONFIG.INVALID", text) from exc
            except RayError as exc:
                raise named(exc) from exc
        if not self._answered:
            first = self._actor.status.options(concurrency_group=CONTROL).remote()
            late = f"{key}, stage actor: not scheduled"
            status = await call(first, spec.start_timeout, "ENGINE.START_TIMEOUT", late)
            self._answered = True
            self._record.adopt(status)

    async def _until_ready(self) -> None:
        spec = self.spec
        # The supervisor keeps start_timeout itself; this deadline is for a supervisor that hangs.
        longest = spec.start_timeout + longest_stop(spec)
        late = f"{self.status.key}: no answer"
        try:
            status = await call(self._actor.start.remote(), longest, "ENGINE.START_TIMEOUT", late)
        except CodedError as exc:
            self.tell(event.StartFailed(exc))
            return
        self._record.adopt(status, code="", detail="")
        self.tell(event.Proven())

    async def _follow(self) -> None:
        """Tell what the supervisor sees, until that is the engine's end or it is silent for too long."""
        seen, failed, pause, silence = 0, 0, _SHORTEST, _Silence()
        longest = _LOOK + self.spec.supervisor_timeout
        while True:
            looking = asyncio.ensure_future(self._actor.look.remote(seen, _LOOK))
            try:
                while not looking.done() and silence.seconds < longest:
                    await asyncio.wait({looking}, timeout=_Silence.TICK)
                    silence.passed()
                if not looking.done():
                    text = f"the supervisor was silent for {silence.seconds:.1f} s"
                    facts = {"pid": self.status.supervisor_pid}
                    self.tell(event.Lost(CodedError("ENGINE.SUPERVISOR_LOST", text, facts)))
                    return
                sight: Sight = looking.result()
            except ActorUnavailableError as exc:
                # Not dead, only out of reach: for a while that may pass.
                if silence.seconds >= longest:
                    self.tell(event.Lost(CodedError.from_exception(exc, "ENGINE.SUPERVISOR_LOST")))
                    return
                await asyncio.sleep(pause)
                silence.passed()
                pause = min(2 * pause, _Silence.TICK)
                continue
            except RayError as exc:
                self.tell(event.Lost(named(exc)))
                return
            finally:
                looking.cancel()
            silence, pause = _Silence(), _SHORTEST
            if sight.number == seen:
                continue
            seen = sight.number
            if sight.status.state in ("starting", "canary"):
                self._record.adopt(sight.status)
            if sight.status.state == "canary":
                self.tell(event.Proving())
            if sight.status.held != self.status.held and sight.status.state == "ready":
                self._record.publish(held=sight.status.held)
            if sight.failed != failed:
                failed = sight.failed
                self.tell(event.Checked(failed, sight.error))
            if sight.exit is not None:
                self._record.exit = sight.exit
                self.tell(event.Lost(_ended(sight.exit)))
                return

    async def _until_drained(self) -> None:
        timeout = self.spec.drain_timeout
        try:
            ref = self._supervisor().drained.remote(timeout)
            empty = await call(ref, timeout + _MARGIN, "ENGINE.SUPERVISOR_LOST", "no answer to drained")
        except CodedError as exc:
            self._record.emit("engine.drained", level="warning", error=exc)
        else:
            self._record.emit("engine.drained", empty=empty)
        self.tell(event.Drained())

    async def _rested(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.tell(event.Begun())

    # -- the end -----------------------------------------------------------------------------------

    async def _clear(self, term_timeout: float | None = None) -> None:
        """Nothing of the last life is left when this returns. The supervisor is kept if it answers.
        ``term_timeout`` is seconds, the spec's when None. Raises CodedError ENGINE.STOP_FAILED."""
        if self._actor is None:
            return
        spec = self.spec
        lost = self.life.cause is not None and self.life.cause.code == "ENGINE.SUPERVISOR_LOST"
        if self._answered and not lost and ray.is_initialized():
            stopped = self._actor.stop.remote(term_timeout)
            try:
                await call(stopped, longest_stop(spec), "ENGINE.SUPERVISOR_LOST", "no answer to stop")
                return
            except CodedError as exc:
                if exc.code == "ENGINE.STOP_FAILED":
                    raise
        self._kill_actor()
        await see_cleared(self.status, spec.kill_timeout)

    def _kill_actor(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():  # else it is gone with Ray
            ray.kill(actor)

    def hasten(self) -> None:
        """A stop that is under way is to kill at once."""
        if self._actor is not None and ray.is_initialized():
            self._actor.stop.remote(0.0)  # the stop that is waited for tells what comes of it

    async def close(self, term_timeout: float | None = None) -> CodedError | None:
        """Stop the engine, then release its supervisor and its place, after `run` has been cancelled. What
        failed, if so. ``term_timeout`` is seconds, the spec's when None."""
        error = None
        over = self.life.state == "dead" and not self.life.wanted
        self._record.life, _ = step(self.life, event.Close(), time.monotonic(), self._policy)
        if not over:
            self._record.publish(state="stopping")
        try:
            await self._publication.hide(self.status.url)
            await self._end_tasks()
            await self._clear(term_timeout)
        except CodedError as exc:
            error = exc
        else:
            await self._release()
        finally:
            self._kill_actor()
            self._record.publish(state="dead")
        if error is not None:
            self._record.emit("engine.stopped", level="error", error=error, **facts_of(error))
        elif not over:
            self._record.emit("engine.stopped")
        return error

    # -- small things ------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            bug = CodedError.from_exception(exc, "INTERNAL.BUG")
            self.tell(event.Lost(bug))

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _supervisor(self) -> Any:
        if self._actor is None or self.life.state not in ("ready", "suspect", "quarantined", "draining"):
            raise CodedError("POOL.MISUSE", f"{self.status.key} is {self.life.state}, not running")
        return self._actor

    async def _ask(self, ref: Any, what: str) -> None:
        await call(ref, _MARGIN, "ENGINE.SUPERVISOR_LOST", f"{self.status.key}: no answer to {what}")


def _ended(report: ExitReport) -> CodedError:
    facts = {"status": report.status, "signal": report.signal, "last_lines": report.last_lines[-20:]}
    text = report.how + (f"; last line: {report.last_lines[-1]:.300}" if report.last_lines else "")
    return CodedError("ENGINE.EXITED", text, facts)
