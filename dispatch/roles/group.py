"""TrainingGroup: ranks that live and fail together, and are restarted together, by an explicit call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Mapping, Sequence
from copy import copy
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

from dispatch.roles.epoch import Epoch, Failure, Limits, Work
from dispatch.roles.placement import Placement
from dispatch.roles.rank import RankInfo, Rendezvous, is_async
from dispatch.roles.states import Event, State, after
from protocol import CodedError, Events

T = TypeVar("T")
Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


class TrainingGroup:
    """``world_size`` actors of ``cls``, each made as ``cls(rank, world_size, rendezvous, *args, **kwargs)``
    and holding ``resources`` (a CPU by default; CPU, GPU and memory, in bytes, by these names) in one
    placement group.

    Use as ``async with``, or `start` and `close`; one event loop's. A rank that dies, wedges, is out of reach
    for too long or raises fails the whole group at once: `call` raises ACTOR.GROUP_FAILED, which names the
    rank that failed first, until `restart` is called. The ranks that are left stay as they are until then,
    for whoever wants to look at them, but are asked nothing any more.

    ``start_timeout`` (seconds) bounds a start as a whole, the placement included. An owner that was restarted
    goes on with ``first_epoch`` above the last that it knows of, so that names and fences stay unique.
    Raises CodedError CONFIG.INVALID for what cannot be started."""

    def __init__(
        self,
        cls: type,
        world_size: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str = "trainer",
        resources: Mapping[str, float] | None = None,
        strategy: Strategy = "PACK",
        start_timeout: float = 120.0,
        limits: Limits | None = None,
        first_epoch: int = 1,
        runtime_env: Mapping[str, Any] | None = None,
        events: Events | None = None,
    ) -> None:
        resources = {"CPU": 1.0} if resources is None else dict(resources)
        _check(cls, world_size, resources, strategy, start_timeout)
        self.name = name
        self.state = State.NEW
        self.failure: CodedError | None = None
        """Why the group failed; None again after a restart."""
        self._work = Work(cls, tuple(args), kwargs or {}, [resources] * world_size, runtime_env)
        self._placement = Placement(name, self._work.bundles, strategy)
        self._start_timeout = start_timeout
        self._limits = limits or Limits()
        self._events = events or Events(role="trainer")
        self._next = first_epoch
        self._epoch: Epoch | None = None
        self._rendezvous: Rendezvous | None = None
        self._starting: asyncio.Task[Rendezvous] | None = None
        self._closing: asyncio.Task[None] | None = None
        # Calls of a class without coroutines are made one after another, or two of them could meet in a
        # different order at different ranks (Ray keeps no order for async actors), and wait for each other.
        self._turn = None if is_async(cls) else asyncio.Lock()

    @property
    def epoch(self) -> int:
        """The number of the epoch that runs, or ran last; 0 before the first."""
        return self._epoch.number if self._epoch is not None else 0

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Where the ranks met that are ready now."""
        return self._rendezvous

    @property
    def ranks(self) -> tuple[RankInfo | None, ...]:
        """The ranks' processes, by rank, of the epoch that runs or ran last."""
        return self._epoch.ranks if self._epoch is not None else ()

    @property
    def consequences(self) -> tuple[Failure, ...]:
        """The failures that came after the first one, in the order in which they were heard of."""
        failures = self._epoch.failures if self._epoch is not None else []
        cause = self.failure.data.get("rank") if self.failure is not None else None
        return tuple(one for one in failures if one.rank != cause)

    async def start(self) -> Rendezvous:
        """Place and start all ranks. Raises what `restart` raises, and leaves nothing behind: neither ranks
        nor a placement group."""
        self._enter("start")
        try:
            return await self._run(self._first())
        except asyncio.CancelledError:
            await self.close()
            raise

    async def restart(self, reason: str) -> Rendezvous:
        """Kill all ranks, see that their processes are gone, and start new ones under the next epoch. Calls
        that are in flight end as CANCEL.CALLER. While one restart runs, others wait for it and get its
        outcome; a caller that goes away does not end it.

        Raises CodedError: ACTOR.GROUP_FAILED when a rank failed while it started, CONFIG.INVALID where Ray
        refuses the ranks' options, TASK.UNSCHEDULABLE or TIMEOUT.DEADLINE where there was no room,
        ACTOR.WEDGED when a rank of the last epoch is not known to be gone (nothing was started then),
        CANCEL.CALLER when the group was closed meanwhile, POOL.CLOSED. After each but the last two the group
        is failed and may be restarted."""
        already = self.state is State.RESTARTING
        self._enter("restart")
        if already:
            assert self._starting is not None
            return await _outcome(self._starting)
        self._emit("group.restarting", reason=reason)
        last = self._epoch
        if last is not None:
            text = f"{self.name} was restarted with the call in flight: {reason}"
            last.end(CodedError("CANCEL.CALLER", text, {"epoch": last.number}))
        self._rendezvous = self.failure = None
        return await self._run(self._again(last))

    async def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> list[Any]:
        """Run ``method`` at every rank with the same arguments; the results by rank, all of this epoch.
        ``timeout`` is seconds, waiting for earlier calls included. A call that is late, or whose caller goes
        away before all ranks have answered, fails the group: nobody knows which of them have run it. An
        exception of one rank does, too, for the others may be waiting for it in a collective.

        Raises CodedError: ACTOR.GROUP_FAILED; CANCEL.CALLER when the group was restarted or closed meanwhile;
        TIMEOUT.DEADLINE while earlier calls had the turn (nothing was run); POOL.MISUSE in a group that is
        not ready, for a method that the class does not have or a timeout that is none; POOL.CLOSED."""
        if not callable(getattr(self._work.cls, method, None)):
            raise CodedError("POOL.MISUSE", f"{self._work.cls.__qualname__} has no method {method!r}")
        if not isinstance(timeout, int | float) or not timeout >= 0:  # nan would never be over
            raise CodedError("POOL.MISUSE", f"{method}: timeout is {timeout}: seconds, 0 or more")
        epoch = self._ready()
        if self._turn is None:
            return await epoch.call(method, args, kwargs, timeout)
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._turn.acquire()
        except TimeoutError:
            text = f"{method} had not begun within {timeout:g} s: earlier calls still run"
            raise CodedError("TIMEOUT.DEADLINE", text) from None
        try:
            # In the epoch that it was made in: raises what became of that one.
            return await epoch.call(method, args, kwargs, max(0.0, end - loop.time()))
        finally:
            self._turn.release()

    async def failed(self) -> CodedError:
        """Wait until the group fails, and say why; for a caller that has no call in flight. Raises
        CodedError when the group is restarted or closed instead, POOL.MISUSE when it is not ready."""
        if self.state is State.FAILED and self.failure is not None:
            return self.failure
        error = await self._ready().failed()
        if error.code != "ACTOR.GROUP_FAILED":
            raise error
        return error

    async def close(self) -> None:
        """Kill the ranks, then remove the placement group, each seen to be gone. Idempotent; also during a
        start or restart, which ends as CANCEL.CALLER. Raises CodedError: ACTOR.WEDGED or TIMEOUT.DEADLINE
        when something is not known to be gone."""
        if self._closing is None:
            self._enter("close")
            self._closing = asyncio.create_task(self._close(), name=f"{self.name} closing")
            self._closing.add_done_callback(_seen)
        await _outcome(self._closing)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # -- starting ----------------------------------------------------------------------------------

    async def _run(self, start: Coroutine[Any, Any, Rendezvous]) -> Rendezvous:
        self._starting = asyncio.create_task(start, name=f"{self.name} starting")
        self._starting.add_done_callback(_seen)
        return await _outcome(self._starting)

    async def _first(self) -> Rendezvous:
        try:
            return await self._start()
        except CodedError as exc:
            try:
                await self._placement.remove()
            finally:
                self._fail(exc)
            raise

    async def _again(self, last: Epoch | None) -> Rendezvous:
        try:
            if last is not None:
                await self._see_gone(last)
            return await self._start()
        except CodedError as exc:
            self._fail(exc)
            raise

    async def _start(self) -> Rendezvous:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._start_timeout
        epoch = self._epoch = Epoch(self.name, self._next, self._limits, self._on_failure, self._on_verdict)
        self._next += 1
        self._emit("group.starting", world_size=len(self._work.bundles))
        try:
            placement = await self._placement.have(self._start_timeout)
            self._rendezvous = await epoch.start(self._work, placement, max(0.0, end - loop.time()))
        except CodedError as exc:
            epoch.end(exc)
            await self._see_gone(epoch)
            raise
        self._enter("started")
        self._emit("group.ready", address=self._rendezvous.address, port=self._rendezvous.port)
        return self._rendezvous

    async def _see_gone(self, epoch: Epoch) -> None:
        unsure = await epoch.gone()
        if unsure:
            error = CodedError(
                "ACTOR.WEDGED",
                f"{self.name}, epoch {epoch.number}: rank {unsure} was killed but is not known to be gone",
                {"ranks": unsure, "processes": [epoch.ranks[rank] for rank in unsure]},
            )
            self._emit("group.unconfirmed", level="error", error=error)
            raise error

    async def _close(self) -> None:
        closed = CodedError("CANCEL.CALLER", f"{self.name} was closed with the call in flight")
        if self._epoch is not None:
            self._epoch.end(closed)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        self._rendezvous = None
        try:
            if self._epoch is not None:
                self._epoch.end(closed)  # the start may have made one since
                await self._see_gone(self._epoch)
        finally:
            try:
                await self._placement.remove()
            finally:
                self._enter("closed")
        self._emit("group.closed")

    # -- failing -----------------------------------------------------------------------------------

    def _on_failure(self, failure: Failure, is_first: bool) -> None:
        self._emit(
            "group.rank_failed",
            level="error",
            error=failure.error,
            rank=failure.rank,
            consequence=not is_first,
        )
        if is_first and self.state is State.READY:
            self._rendezvous = None
            self._enter("failed")

    def _on_verdict(self, error: CodedError) -> None:
        self.failure = error
        self._emit("group.failed", level="error", error=error)

    def _fail(self, error: CodedError) -> None:
        """A start came to nothing, and nothing of it is left."""
        self._rendezvous = None
        self._enter("failed")
        if self.state is State.FAILED and (self.failure is None or self.failure.id != error.id):
            self._on_verdict(error)

    # -- small things ------------------------------------------------------------------------------

    def _ready(self) -> Epoch:
        if self.state is State.FAILED and self.failure is not None:
            raise copy(self.failure) from self.failure.__cause__
        if self.state in (State.READY, State.FAILED) and self._epoch is not None:
            return self._epoch  # of a group that has just failed: it raises the failure in a moment
        if self.state in (State.CLOSING, State.CLOSED):
            raise CodedError("POOL.CLOSED", f"{self.name} is {self.state}: make a new one")
        raise CodedError("POOL.MISUSE", f"{self.name} is {self.state}: calls need a group that is ready")

    def _enter(self, event: Event) -> None:
        self.state = after(self.state, event)

    def _emit(self, event: str, **facts: Any) -> None:
        self._events.emit(event, key=self.name, epoch=self.epoch, **facts)


async def _outcome(task: asyncio.Task[T]) -> T:
    """What ``task`` comes to; a caller that goes away does not take it along."""
    await asyncio.wait({task})
    if task.cancelled():
        raise CodedError("CANCEL.CALLER", "the group was closed while it started")
    return task.result()


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # it may be that all callers went away; the event has told of it


def _check(
    cls: object, world_size: int, resources: Mapping[str, float], strategy: str, start_timeout: float
) -> None:
    if not inspect.isclass(cls):
        raise CodedError(
            "CONFIG.INVALID",
            f"cls is {type(cls).__name__}, not a class: pass the plain class, without @ray.remote",
        )
    if not isinstance(world_size, int) or world_size < 1:
        text = f"world_size is {world_size}: a whole number, for a group has at least one rank"
        raise CodedError("CONFIG.INVALID", text)
    if strategy not in get_args(Strategy):
        text = f"strategy is {strategy!r}, not PACK, STRICT_PACK, SPREAD or STRICT_SPREAD"
        raise CodedError("CONFIG.INVALID", text)
    wrong = {name: amount for name, amount in resources.items() if not amount > 0}
    if wrong or not resources:
        raise CodedError(
            "CONFIG.INVALID",
            f"resources of a rank are {dict(resources)}: name at least one, each with an amount above 0 (Ray "
            f"places no empty bundle; 0.01 of a CPU will do)",
        )
    if not start_timeout > 0:
        raise CodedError("CONFIG.INVALID", f"start_timeout is {start_timeout}: it must be above 0 seconds")
