"""EngineSupervisor: the actor that owns one engine process.

It holds the engine's resources in Ray, starts the process and takes it through the stages

    process up -> port bound -> health -> canary -> routable

and says at once what becomes of it (`look`): that the process ended, that its checks fail. Its own death
ends the engine, through the guard. It decides nothing: what is replaced, and when, is the fleet's business.
The class is a plain asyncio class; `as_actor` makes the Ray actor of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil

from dispatch.engines.child import log_files, ports
from dispatch.engines.child.process import EngineProcess
from dispatch.engines.health import probe
from dispatch.engines.health.checks import Checks
from dispatch.engines.spec import EngineSpec, EngineStatus, ExitReport, State, StopReport
from dispatch.engines.traces import leftovers
from dispatch.roles.policy import Role, options_for
from protocol import CodedError, coded
from protocol.errors import here

if TYPE_CHECKING:
    import httpx

CONTROL: Final = "control"
"""The concurrency group of `status`: a loop and thread of its own, which answers in milliseconds
while the default group is busy, blocked or wedged."""
_PAUSE: Final = 0.02
"""Seconds between two looks at a starting engine, at first; grows to ten times that."""
_ORPHANS: Final = 5.0
"""Seconds for what other engines have left to end, before a start; after that, it starts all the same."""
_CANARIES: Final = 3
"""How often the canary of a start is tried within ``canary_timeout``: some engines answer /health a
moment before they take requests."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a supervisor saw. ``number`` grows with each change; ``failed`` checks in a row, the last of them
    with ``error``; ``exit`` once an engine that was ready has ended."""

    number: int
    status: EngineStatus
    failed: int = 0
    error: CodedError | None = None
    exit: ExitReport | None = None


@coded(code="INTERNAL.BUG")
class EngineSupervisor:
    """Owns one engine. All methods but `status` belong to one loop."""

    def __init__(self, spec: EngineSpec, key: str = "engine/0") -> None:
        self._spec = spec
        self._process: EngineProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._starts = 0
        self._checks: Checks | None = None
        self._watching: tuple[asyncio.Task[None], ...] = ()
        self._news = asyncio.Event()
        self._ports: dict[str, int] = {}  # of the last start
        # Replaced as a whole, never changed: `status` reads it from another thread.
        self._status = EngineStatus(
            key=key,
            state="dead",
            node=here().host,
            node_id=_node_id(),
            supervisor_pid=os.getpid(),
            supervisor_create_time=psutil.Process().create_time(),
            since=time.time(),
        )
        self._sight = Sight(0, self._status)

    async def start(self) -> EngineStatus:
        """Start the engine and return when it is routable. Does nothing when it runs already.

        Raises CodedError, each with the stage and the last lines of output in ``data``:
        ENGINE.SPAWN_FAILED, ENGINE.EXITED, ENGINE.START_TIMEOUT, ENGINE.CANARY_FAILED,
        ENGINE.PORT_TAKEN after five ports, and CANCEL.CALLER when `stop` came in between. Whatever it
        raises, the process is gone by then; cancelled, likewise. ENGINE.STOP_FAILED when the last one could
        not be stopped and still cannot: then nothing is started."""
        if self._starting is not None:
            raise CodedError("POOL.MISUSE", f"{self._status.key} is being started already")
        if self._process is not None and self._process.alive and self._checks is not None:
            return self._status
        # Before anything is awaited: who looks from now on must not see the last life's end.
        self._see(failed=0, error=None, exit=None)
        self._set("starting", stage="process", pid=0, url="")
        self._starting = asyncio.create_task(self._start())
        try:
            await self._starting
        except asyncio.CancelledError:
            if self._starting.cancelled() and not _is_cancelled():
                raise CodedError(
                    "CANCEL.CALLER", f"{self._status.key} was stopped while it started"
                ) from None
            raise
        finally:
            self._starting = None
        return self._status

    async def status(self) -> EngineStatus:
        """How the engine stands, as this supervisor knows it."""
        return self._status

    async def look(self, seen: int, timeout: float) -> Sight:
        """What there is to see, as soon as that is more than ``seen``, the number of the last sight; the same
        again after ``timeout`` seconds. This call hangs on purpose: the caller that keeps one under way
        knows of a change within milliseconds, and of this actor's own death as soon (Ray raises
        ActorDiedError in about 10 ms)."""
        deadline = time.monotonic() + timeout
        while self._sight.number <= seen and (left := deadline - time.monotonic()) > 0:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
        return self._sight

    async def watch(self, timeout: float = 3600.0) -> ExitReport | None:
        """Wait for the engine to end, planned or not; None after ``timeout`` seconds."""
        if self._process is None:
            raise CodedError("POOL.MISUSE", f"{self._status.key} was never started")
        try:
            return await self._process.wait(timeout)
        except TimeoutError:
            return None

    async def complain(self) -> None:
        """A client had trouble with the engine: check it now, generation included."""
        if self._checks is not None:
            self._checks.complain()

    async def hold(self, seconds: float, reason: str) -> None:
        """The engine is about to be paused on purpose: ask it nothing for at most ``seconds``, only see that
        its process lives. Raises CodedError POOL.MISUSE when it is not running."""
        self._running_checks().hold(seconds)
        self._set(self._status.state, held=reason or "held")
        asyncio.get_running_loop().call_later(seconds, self._hold_over, self._checks)

    async def release(self) -> None:
        """It goes on: check it again. Does nothing when it was not held."""
        self._running_checks().release()
        self._set(self._status.state, held="")

    async def drained(self, timeout: float) -> bool:
        """Wait until the engine has nothing under way; False after ``timeout`` seconds, or when it does not
        say how much it has."""
        return await self._running_checks().drained(timeout)

    async def stop(self, term_timeout: float | None = None) -> StopReport:
        """Stop the engine for certain (`EngineProcess.stop`); ``term_timeout`` is seconds, by default
        the spec's. Also during a start, and again. Raises CodedError ENGINE.STOP_FAILED."""
        self._set("stopping")
        if term_timeout == 0 and self._process is not None:
            self._process.kill()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})  # bounded: it stops its process with the same deadlines
        await self._stop_watching()
        report = StopReport()
        if self._process is not None:
            spec = self._spec
            report = await self._process.stop(
                spec.term_timeout if term_timeout is None else term_timeout, spec.kill_timeout
            )
        self._set("dead", held="")
        return report

    # -- watching ----------------------------------------------------------------------------------

    def _watch_over(self, process: EngineProcess, url: str) -> None:
        self._checks = Checks(self._spec, url, self._checked)
        self._watching = (
            asyncio.create_task(self._checks.run()),
            asyncio.create_task(self._until_ended(process)),
        )
        for task in self._watching:
            task.add_done_callback(self._watcher_ended)

    async def _until_ended(self, process: EngineProcess) -> None:
        report = await process.wait()
        self._see(exit=report)
        self._set("dead", detail=report.how, exit=report)

    async def _stop_watching(self) -> None:
        watching, self._watching, self._checks = self._watching, (), None
        await _give_up(*watching)

    def _watcher_ended(self, task: asyncio.Task[None]) -> None:
        """An engine that nobody checks any more is as good as a sick one."""
        if not task.cancelled() and (exc := task.exception()) is not None:
            bug = CodedError.from_exception(exc, "INTERNAL.BUG")
            self._see(failed=self._spec.health_failures, error=bug)

    def _checked(self, failed: int, error: CodedError | None) -> None:
        if self._process is not None and self._process.alive:  # else its exit says more, in a moment
            self._see(failed=failed, error=error)

    def _hold_over(self, checks: Checks | None) -> None:
        if checks is self._checks and checks is not None and not checks.held and self._status.held:
            self._set(self._status.state, held="")

    def _running_checks(self) -> Checks:
        if self._checks is None:
            raise CodedError("POOL.MISUSE", f"{self._status.key} is {self._status.state}, not running")
        return self._checks

    def _see(self, **facts: Any) -> None:
        self._sight = replace(self._sight, number=self._sight.number + 1, **facts)
        self._news.set()

    # -- starting ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._starts += 1
        if self._process is not None and self._process.alive:  # a stop has failed, and may succeed by now
            try:
                await self._process.stop(self._spec.term_timeout, self._spec.kill_timeout)
            except CodedError as exc:
                self._set("dead", code=str(exc.code), detail=exc.detail)
                raise
        deadline = time.monotonic() + self._spec.start_timeout
        async with probe.new_client() as client:
            # Of engines whose owner and guard were both killed: they hold memory that this one needs.
            await leftovers.end_orphans(_ORPHANS)
            for attempt in range(1, ports.TRIES + 1):
                self._set("starting", stage="process", pid=0, url="")
                try:
                    await self._attempt(client, deadline)
                    return
                except CodedError as exc:
                    if exc.code != "ENGINE.PORT_TAKEN" or attempt == ports.TRIES:
                        self._set("dead", code=str(exc.code), detail=exc.detail)
                        raise

    async def _attempt(self, client: httpx.AsyncClient, deadline: float) -> None:
        spec = self._spec
        with ports.reserve(spec.ports, spec.host, avoid=self._ports.values()) as reserved:
            self._ports = numbers = reserved.numbers
            self._process = process = await EngineProcess.spawn(
                spec.argv(numbers),
                env=spec.environment(numbers),
                cwd=spec.cwd,
                log_path=self._log_path(),
                log_bytes=spec.log_bytes,
                log_files=spec.log_files,
                private_tmp=spec.private_tmp,
                reserved=reserved,
            )
        port = numbers[ports.MAIN]
        self._set(
            "starting", stage="port", pid=process.pid, create_time=process.create_time, url=spec.url(port)
        )
        stages = asyncio.create_task(self._stages(client, process, port))
        ended = asyncio.create_task(process.wait())
        try:
            remaining = max(0.0, deadline - time.monotonic())
            await asyncio.wait({stages, ended}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._ended(ended.result(), numbers)
            if not stages.done():
                why = f"not ready within {spec.start_timeout:g} s"
                if self._status.stage == "port":
                    why += await asyncio.to_thread(ports.elsewhere, process.guard_pid, port)
                raise self._failed("ENGINE.START_TIMEOUT", why, process.last_lines)
            try:
                stages.result()
            except CodedError as exc:
                raise self._failed(exc.code, exc.detail, process.last_lines, **exc.data) from exc
        except BaseException as exc:  # also a cancelled start leaves no process behind
            await _give_up(stages, ended)
            await self._clean_up(process, exc)
            raise
        await _give_up(ended)

    async def _stages(self, client: httpx.AsyncClient, process: EngineProcess, port: int) -> None:
        """Everything from the port to routable, without a deadline of its own: `_attempt` has it."""
        spec, url = self._spec, self._spec.url(port)
        pause = _PAUSE
        while not await asyncio.to_thread(ports.listens, process.guard_pid, port):
            await asyncio.sleep(pause)
            pause = min(1.2 * pause, 10 * _PAUSE)
        self._set("starting", stage="health")
        pause = _PAUSE
        while True:
            try:
                await probe.health(client, url, spec.health_timeout)
                break
            except CodedError:
                await asyncio.sleep(pause)  # not yet; what it says at the deadline is in the last lines
                pause = min(1.2 * pause, 10 * _PAUSE)
        self._set("canary", stage="canary")
        await self._canary(client, url)
        version = await probe.weight_version(client, spec, url, spec.health_timeout)
        self._watch_over(process, url)
        self._set("ready", stage="routable", weight_version=version, code="", detail="", exit=None)

    async def _canary(self, client: httpx.AsyncClient, url: str) -> None:
        deadline = time.monotonic() + self._spec.canary_timeout
        for attempt in range(1, _CANARIES + 1):
            try:
                await probe.canary(client, self._spec, url, max(0.05, deadline - time.monotonic()))
                return
            except CodedError:
                if attempt == _CANARIES or time.monotonic() + 10 * _PAUSE >= deadline:
                    raise
                await asyncio.sleep(10 * _PAUSE)

    def _ended(self, report: ExitReport, numbers: dict[str, int]) -> CodedError:
        facts = {"status": report.status, "signal": report.signal}
        if ports.says_taken(report.status, report.last_lines):
            taken = ", ".join(map(str, numbers.values()))
            why = f"port {taken} was taken" if len(numbers) == 1 else f"one of the ports {taken} was taken"
            return self._failed("ENGINE.PORT_TAKEN", why, report.last_lines, **facts)
        why = f"ended before it was ready: {report.how}"
        if report.status == 0:
            why += " (an engine must stay in the foreground)"
        return self._failed("ENGINE.EXITED", why, report.last_lines, **facts)

    def _failed(self, code: str, why: str, last_lines: tuple[str, ...], **facts: Any) -> CodedError:
        stage = self._status.stage
        text = f"{self._spec.command[0]}, stage {stage}: {why}"
        if last_lines:
            text += f"; last line: {last_lines[-1]:.300}"
        facts |= {"stage": stage, "last_lines": last_lines[-20:]}
        return CodedError(code, text, facts)

    async def _clean_up(self, process: EngineProcess, cause: BaseException) -> None:
        # A failed start has served nobody, so it gets no time to end by itself.
        try:
            await process.stop(min(self._spec.term_timeout, 1.0), self._spec.kill_timeout)
        except CodedError as exc:  # the cause stays the failure's name; that something is left is added
            if not isinstance(cause, CodedError):
                raise
            cause.data["stop_failed"] = exc.detail

    def _log_path(self) -> Path | None:
        if self._spec.log_dir is None:
            return None
        return log_files.for_start(self._spec.log_dir, self._status.key, self._starts, self._spec.log_starts)

    def _set(self, state: State, **facts: Any) -> None:
        changed = msgspec.structs.replace(self._status, state=state, **facts)
        if state != self._status.state:
            changed = msgspec.structs.replace(changed, since=time.time())
        self._status = changed
        self._see(status=changed)


@cache
def _actor_class() -> Any:
    # Once: Ray exports each class anew, which blocks its caller for as long as the GCS is away.
    import ray  # here, so that importing this room does not cost a second

    remote: Any = ray.remote  # its types do not know concurrency_groups
    return remote(concurrency_groups={CONTROL: 4})(EngineSupervisor)


def as_actor(spec: EngineSpec, **options: Any) -> Any:
    """The Ray actor class for ``spec``, ready for ``.remote(spec, key)``, with more of Ray's ``options``."""
    return _actor_class().options(
        num_cpus=spec.num_cpus,
        num_gpus=spec.num_gpus,
        resources=spec.resources or None,
        **options_for(Role.OWNER),
        **options,
    )


def _node_id() -> str:
    ray = sys.modules.get("ray")  # a supervisor works without Ray, and then must not load it
    return ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else ""


async def _give_up(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
