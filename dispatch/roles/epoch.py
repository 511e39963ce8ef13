"""An epoch: one life of all ranks together. It starts, is watched, fails as a whole, and ends.

Which rank failed first is not the one that is heard of first: when a rank is killed its neighbours' sockets
break, and their exception may arrive before Ray's word of the death. So a failure counts at once, but the
first one is named a moment later (`WINDOW`), and a rank that was lost goes before ranks that raised.
torchelastic names the root cause of a group by the earliest timestamp, for the same reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dispatch.processes import CONFIRM, POLITE, see_gone
from dispatch.roles.policy import Role, options_for
from dispatch.roles.rank import RankInfo, Rendezvous, rank_class
from dispatch.tasks import on_node
from faults import classify
from protocol import CodedError

WINDOW: Final = 0.25
"""Seconds after a rank's exception within which a death elsewhere is taken for its cause. Ray tells of a
death in about 15 ms."""
_AWAY: Final = ("ACTOR.UNAVAILABLE", "NODE.NETWORK")
"""What says nothing of whether the rank is alive."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How ranks are watched, in seconds. A heartbeat every ``interval``; a rank that does not answer one for
    ``silence`` is wedged: long enough for code that holds the GIL. One that Ray calls unavailable has
    ``unavailable`` seconds to come back."""

    interval: float = 0.5
    silence: float = 15.0
    unavailable: float = 30.0


class Failure(msgspec.Struct, frozen=True):
    """What one rank did. ``lost``: the rank itself is gone, wedged or out of reach, it did not just raise."""

    rank: int
    error: CodedError
    lost: bool


def first(failures: Sequence[Failure]) -> Failure:
    """The one that the others follow from: the first loss, else the first at all."""
    return next((one for one in failures if one.lost), failures[0])


@dataclass(frozen=True, slots=True)
class Work:
    """What is run: a class, how often, and with what."""

    cls: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bundles: Sequence[Mapping[str, float]]
    runtime_env: Mapping[str, Any] | None


@dataclass(slots=True)
class _Member:
    rank: int
    actor: Any
    info: RankInfo | None = None


class Epoch:
    """See the module. ``on_failure`` hears of each failed rank at once, and whether it is the first heard of;
    ``on_verdict`` of the failure that callers get."""

    def __init__(
        self,
        group: str,
        number: int,
        limits: Limits,
        on_failure: Callable[[Failure, bool], None],
        on_verdict: Callable[[CodedError], None],
    ) -> None:
        self.group = group
        self.number = number
        self.failures: list[Failure] = []
        self._limits = limits
        self._on_failure = on_failure
        self._on_verdict = on_verdict
        self._members: list[_Member] = []
        self._watches: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._verdict: asyncio.Future[CodedError] = asyncio.get_running_loop().create_future()

    @property
    def ranks(self) -> tuple[RankInfo | None, ...]:
        """Who the ranks are, as far as they have said."""
        return tuple(member.info for member in self._members)

    async def start(self, work: Work, placement: Any, timeout: float) -> Rendezvous:
        """Start all ranks within ``timeout`` seconds: processes, where they meet, the user's instances.
        Raises the epoch's failure; `end` then has to be called, and `gone`."""
        end = asyncio.get_running_loop().time() + timeout

        def left() -> float:
            return max(0.0, end - asyncio.get_running_loop().time())

        for rank, bundle in enumerate(work.bundles):
            options = {
                **options_for(Role.RANK),
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "memory": bundle.get("memory"),
                "resources": {name: bundle[name] for name in bundle.keys() - {"CPU", "GPU", "memory"}},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(placement, rank),
                "runtime_env": work.runtime_env,
            }
            try:
                actor = rank_class().options(**options).remote()
            except (TypeError, ValueError) as exc:  # Ray looks at them here, in the caller
                text = f"{self.group}: Ray takes no rank with these options: {exc}"
                raise CodedError.from_exception(exc, "CONFIG.INVALID", text) from exc
            self._members.append(_Member(rank, actor))
        await self._all("introduce", self._introduce, left())
        self._watches = [asyncio.create_task(self._watch(member)) for member in self._members]
        address, port = (await self._all("choose", _chosen_by_the_first, left()))[0]
        rendezvous = Rendezvous(self.group, self.number, address, port)
        size = len(self._members)

        def build(member: _Member) -> Awaitable[None]:
            made: Awaitable[None] = member.actor.build.remote(
                work.cls, member.rank, size, rendezvous, *work.args, **work.kwargs
            )
            return made

        await self._all("__init__", build, left(), again=False)
        return rendezvous

    async def call(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float
    ) -> list[Any]:
        """Run ``method`` at every rank; the results by rank. Raises the epoch's failure, and is one itself
        when it is late or cancelled: nobody knows then which ranks have done it."""
        number = next(self._numbers)
        self._open.add(number)

        def run(member: _Member) -> Awaitable[Any]:
            answer: Awaitable[Any] = member.actor.run.remote(number, min(self._open), method, *args, **kwargs)
            return answer

        try:
            return await self._all(method, run, timeout)
        finally:
            self._open.discard(number)

    def end(self, why: CodedError) -> None:
        """From now on no call of this epoch returns: what is in flight ends as the failure, or as ``why``."""
        for watch in self._watches:
            watch.cancel()
        if not self._verdict.done():
            self._settle() if self.failures else self._verdict.set_result(why)

    async def gone(self) -> list[int]:
        """Kill every rank and see that its process has ended; the ranks of which that is not known."""
        if self._watches:
            await asyncio.wait(self._watches)  # cancelled by `end`
        if ray.is_initialized():
            for member in self._members:
                with contextlib.suppress(Exception):  # Ray refuses to kill what it does not know
                    ray.kill(member.actor, no_restart=True)
        certain = await asyncio.gather(*(self._is_gone(member) for member in self._members))
        return [member.rank for member, sure in zip(self._members, certain, strict=True) if not sure]

    async def failed(self) -> CodedError:
        """Wait for the failure, or for the end."""
        await asyncio.wait({self._verdict})  # not awaited itself: a waiter that goes would take it along
        return self._verdict.result()

    # -- failing -----------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        if any(one.rank == failure.rank and one.lost >= failure.lost for one in self.failures):
            return  # the watch and a call tell of the same death
        self.failures.append(failure)
        self._on_failure(failure, len(self.failures) == 1)
        if self._verdict.done():
            return
        if failure.lost:
            self._settle()
        elif len(self.failures) == 1:
            asyncio.get_running_loop().call_later(WINDOW, self._settle)

    def _settle(self) -> None:
        if self._verdict.done():
            return
        cause = first(self.failures)
        info = self._members[cause.rank].info
        facts: dict[str, Any] = {
            "group": self.group,
            "epoch": self.number,
            "rank": cause.rank,
            "code": cause.error.code,
            "consequences": [[one.rank, one.error.code] for one in self.failures if one is not cause],
        }
        if info is not None:
            facts |= {"pid": info.pid, "node": info.node, "host": info.host}
        error = CodedError(
            "ACTOR.GROUP_FAILED",
            f"{self.group}, epoch {self.number}: rank {cause.rank} failed first: "
            f"{cause.error.code}: {cause.error.detail}",
            facts,
        )
        error.__cause__ = cause.error
        self._verdict.set_result(error)
        self._on_verdict(error)

    def _raise(self) -> None:
        verdict = self._verdict.result()
        raise copy(verdict) from verdict.__cause__  # its own: each of several callers adds to the traceback

    # -- asking ------------------------------------------------------------------------------------

    async def _all(
        self, what: str, ask: Callable[[_Member], Awaitable[Any]], timeout: float, *, again: bool = True
    ) -> list[Any]:
        """``ask`` of every rank at once; ``again``: an answer that was lost may be asked for once more."""
        if self.failures:
            await asyncio.wait({self._verdict})  # `WINDOW` away at most
        if self._verdict.done():
            self._raise()
        tasks = [asyncio.create_task(self._answer(member, ask, again)) for member in self._members]
        answers = asyncio.gather(*tasks)
        try:
            news: set[asyncio.Future[Any]] = {answers, self._verdict}
            await asyncio.wait(news, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done() and not self.failures and not self._verdict.done():
                late = [rank for rank, task in enumerate(tasks) if not task.done()]
                text = f"no answer to {what} within {timeout:.3g} s from rank {_listed(late)}"
                self._fail(Failure(late[0], CodedError("TIMEOUT.DEADLINE", text, {"late": late}), lost=True))
        except asyncio.CancelledError:
            late = [rank for rank, task in enumerate(tasks) if not task.done()]
            if late and not self._verdict.done():
                text = f"{what} was cancelled by its caller while rank {_listed(late)} had not answered"
                self._fail(Failure(late[0], CodedError("CANCEL.CALLER", text), lost=True))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(answers, *tasks, return_exceptions=True)
        if self.failures:
            await asyncio.wait({self._verdict})
        # Last of all, with nothing awaited after it: what came from an epoch that is over is not returned.
        if self._verdict.done():
            self._raise()
        return answers.result()

    async def _answer(self, member: _Member, ask: Callable[[_Member], Awaitable[Any]], again: bool) -> Any:
        while True:
            ref = None
            try:
                _require_ray(self.group)
                ref = ask(member)
                return await ref
            except asyncio.CancelledError:
                if ref is not None:
                    _cancel(ref)
                raise
            except (
                Exception
            ) as exc:  # of any kind: a rank raises what it likes, and it is raised again by name
                error = _named(exc)
                if error.code not in _AWAY or not again:
                    lost = isinstance(exc, RayActorError) and not isinstance(exc, RayTaskError)
                    self._fail(Failure(member.rank, error, lost))
                    raise error from exc
            await asyncio.sleep(self._limits.interval)  # out of reach: how long is the watch's business

    async def _introduce(self, member: _Member) -> None:
        member.info = await member.actor.introduce.remote()

    # -- watching ----------------------------------------------------------------------------------

    async def _watch(self, member: _Member) -> None:
        """Until this rank is lost."""
        try:
            error = await self._until_lost(member)
        except Exception as exc:  # noqa: BLE001 - a watch that ends unseen is a rank that nobody watches
            error = _named(exc)
        self._fail(Failure(member.rank, error, lost=True))

    async def _until_lost(self, member: _Member) -> CodedError:
        loop = asyncio.get_running_loop()
        while True:
            _require_ray(self.group)
            hold = asyncio.ensure_future(_await(member.actor.hold.remote()))
            hold.add_done_callback(_seen)
            error: CodedError | None
            try:
                error = await self._until_trouble(member, hold)
            finally:
                hold.cancel()
            away = loop.time()
            while error is not None:
                if error.code not in _AWAY or loop.time() - away >= self._limits.unavailable:
                    return error
                await asyncio.sleep(self._limits.interval)
                error = await self._pulse(member)

    async def _until_trouble(self, member: _Member, hold: asyncio.Future[Any]) -> CodedError:
        """Heartbeats, until one fails or the call that never returns breaks off."""
        while True:
            pulse = asyncio.create_task(self._pulse(member))
            try:
                await asyncio.wait({hold, pulse}, return_when=asyncio.FIRST_COMPLETED)
                error = pulse.result() if pulse.done() else None
            finally:
                pulse.cancel()
            if error is None:
                await asyncio.wait({hold}, timeout=self._limits.interval)
            if hold.done():
                return _named(hold.exception() or RuntimeError("hold returned"))
            if error is not None:
                return error

    async def _pulse(self, member: _Member) -> CodedError | None:
        silence = self._limits.silence
        ref = None
        try:
            _require_ray(self.group)
            async with asyncio.timeout(silence):
                ref = member.actor.pulse.remote()
                runs: bool = await ref
        except TimeoutError:
            return CodedError(
                "ACTOR.WEDGED", f"rank {member.rank} did not answer a heartbeat within {silence:g} s"
            )
        except Exception as exc:  # noqa: BLE001 - Ray raises a bare Exception for an actor that it does not know
            return _named(exc)
        if not runs:
            return CodedError("ACTOR.WEDGED", f"rank {member.rank}'s event loop has ended")
        return None

    # -- the end -----------------------------------------------------------------------------------

    async def _is_gone(self, member: _Member) -> bool:
        info = member.info
        if not ray.is_initialized():
            return True  # its raylet, which ended with Ray, or Ray's own end took it along
        if info is None:
            return await _is_dead(member.actor, CONFIRM)
        if info.node == ray.get_runtime_context().get_node_id():
            return await see_gone(info.pid, info.create_time)
        return await _is_gone_there(info)


async def _is_dead(actor: Any, timeout: float) -> bool:
    """Whether Ray says within ``timeout`` seconds that the actor is dead."""
    try:
        async with asyncio.timeout(timeout):
            await actor.hold.remote()
    except TimeoutError:
        return False
    except Exception as exc:  # noqa: BLE001 - whatever it is, only what is no doubt about it counts
        return _named(exc).code not in _AWAY
    return False


async def _is_gone_there(info: RankInfo) -> bool:
    """`see_gone`, on the rank's own node: Ray calls an actor dead that it has told to end, and one that is
    stopped does not."""
    try:
        return bool(await on_node(info.node, POLITE + 2 * CONFIRM, _see_gone, info.pid, info.create_time))
    except TimeoutError:
        return False
    except RayError as exc:
        return classify(exc).code in ("TASK.UNSCHEDULABLE", "NODE.DIED")  # that node is gone


def _see_gone(pid: int, create_time: float) -> bool:
    return asyncio.run(see_gone(pid, create_time))


async def _chosen_by_the_first(member: _Member) -> tuple[str, int]:
    chosen: tuple[str, int] = await member.actor.choose.remote() if member.rank == 0 else ("", 0)
    return chosen


async def _await(ref: Any) -> Any:
    return await ref


def _seen(ended: asyncio.Future[Any]) -> None:
    if not ended.cancelled():
        ended.exception()  # or asyncio logs that nobody looked


def _cancel(ref: Any) -> None:
    if isinstance(ref, ray.ObjectRef) and ray.is_initialized():
        ray.cancel(ref)


def _require_ray(group: str) -> None:
    if not ray.is_initialized():  # a call would start another Ray
        raise CodedError("POOL.MISUSE", f"Ray was shut down, and {group} with it")


def _named(exc: BaseException) -> CodedError:
    """A rank's failure: its own CodedError, else by the tables."""
    inner = exc.cause if isinstance(exc, RayTaskError) else exc
    return inner if isinstance(inner, CodedError) else CodedError.from_exception(exc, classify(exc).code)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
