"""targets: how many POSTs each server gets, and who waits for it.

A target is an origin (scheme, host, port). It has a limit that its pushback lowers (`aimd`), a standing
that its failures cost it (`ejection`), and a queue of those who wait (`fair`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from enum import Enum, auto
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import msgspec

from dispatch.posting.load.aimd import Limit
from dispatch.posting.load.ejection import Ejection
from dispatch.posting.load.fair import FairQueue
from protocol import CodedError

MAX_URLS: Final = 4096
"""Of how many URLs the target is remembered."""
_PORTS: Final = {"http": 80, "https": 443}


class Verdict(Enum):
    """What an attempt says about its server."""

    GOOD = auto()
    PUSHBACK = auto()
    """429 or 503: it is alive and has had enough."""
    FAILED = auto()
    """5xx other than 503, a broken connection, a timeout that is the server's."""
    REQUEST = auto()
    """4xx: the request is wrong, and the server alive."""
    NONE = auto()
    """Nothing: it was cancelled, never sent, or lost with its poster."""


class TargetStats(msgspec.Struct, frozen=True):
    """A moment of one target. ``limit`` is how many it may get at once, ``ejected_for`` the seconds
    until a trial is made (0 when it is not ejected), ``waiting`` how many wait for it, ``standing``
    serving, ejected or half_open."""

    origin: str
    in_flight: int
    limit: float
    ejected_for: float
    waiting: int
    standing: str


class Ejected(CodedError):
    """UPSTREAM.EJECTED, said by the pool itself: nothing was sent. A class of its own, because what is
    forgiven for it must not be had by a server that puts the code into its reply."""

    @property
    def seconds(self) -> float:
        """Until a trial may be made; 0 while one is under way."""
        return float(self.data["ejected_for"])


class Lease:
    """The permission to send one request to a target; `done` gives it back, exactly once."""

    __slots__ = ("_epoch", "_target", "_term")

    def __init__(self, target: Target, epoch: int, term: int) -> None:
        self._target: Target | None = target
        self._epoch = epoch
        self._term = term

    def done(self, verdict: Verdict, retry_after: float | None = None) -> None:
        """The attempt is over. ``retry_after`` (seconds) counts with `Verdict.PUSHBACK` only."""
        target = self._target
        assert target is not None, "a lease was given back twice"
        self._target = None
        target.over(self._epoch, self._term, verdict, retry_after)


class _Waiter:
    """Who waits for a target."""

    __slots__ = ("fail_fast", "future")

    def __init__(self, future: asyncio.Future[Lease], fail_fast: bool) -> None:
        self.future = future
        self.fail_fast = fail_fast

    def dead(self) -> bool:
        return self.future.done()


class Target:
    """One server. Whoever waits for it waits for something that ends the wait: a lease that comes back,
    or the timer (one, armed only while somebody waits) at the end of a hold or an ejection."""

    __slots__ = ("_moved", "_now", "_timer", "ejection", "limit", "origin", "queue")

    def __init__(
        self,
        origin: str,
        limit: Limit,
        ejection: Ejection,
        now: Callable[[], float],
        moved: Callable[[TargetStats], None],
    ) -> None:
        self._moved = moved
        self.origin = origin
        self.limit = limit
        self.ejection = ejection
        self.queue: FairQueue[_Waiter] = FairQueue(_Waiter.dead)
        self._now = now
        self._timer: asyncio.TimerHandle | None = None

    def try_acquire(self) -> Lease | None:
        """A lease, unless that would overtake somebody or has to be waited for."""
        if self.queue or not self._free(self._now()):
            return None
        return Lease(self, self.limit.sent(), self.ejection.sent())

    async def acquire(self, caller: Hashable, *, fail_fast: bool) -> Lease:
        """A lease, as soon as there is one for ``caller``; see `Targets.acquire`."""
        if fail_fast and self.ejection.out and not self._free(self._now()):
            raise self._ejected()
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry = self.queue.push(caller, _Waiter(future, fail_fast))
        self._hand_out()
        try:
            return await future
        except BaseException:  # raised again: whatever ends the wait must not keep a lease
            self.queue.discard(entry)
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().done(Verdict.NONE)  # handed over in the instant of the cancellation
            else:
                self._hand_out()  # the last who waited takes the timer with it
            raise

    def over(self, epoch: int, term: int, verdict: Verdict, retry_after: float | None) -> None:
        """A lease came back."""
        until = self.ejection.until if self.ejection.out else None
        if verdict is Verdict.GOOD:
            self.limit.succeeded(epoch)
            self.ejection.answered(term)
        elif verdict is Verdict.PUSHBACK:
            self.limit.pushed_back(epoch, retry_after)
            self.ejection.ended(term)
        else:
            self.limit.ended()
            if verdict is Verdict.REQUEST:
                self.ejection.answered(term)
            elif verdict is Verdict.NONE:
                self.ejection.ended(term)
            elif self.ejection.failed(term):
                self._refuse_the_hasty()
        if (self.ejection.until if self.ejection.out else None) != until:
            self._moved(self.stats())
        if self.queue:
            self._hand_out()

    def spotless(self, now: float) -> bool:
        """Idle, and a new target would be the same."""
        return (
            self.idle(now)
            and not self.ejection.out
            and not self.ejection.failures
            and self.limit.limit >= self.limit.ceiling
        )

    def idle(self, now: float) -> bool:
        """Nobody uses it or waits for it, and nothing keeps anybody from it."""
        return not self.limit.in_flight and not self.queue and self._blocked_until() <= now

    def stats(self) -> TargetStats:
        now = self._now()
        return TargetStats(
            self.origin,
            self.limit.in_flight,
            self.limit.limit,
            self.ejection.ejected_for(now),
            len(self.queue),
            self.ejection.standing.value,
        )

    def close(self, error: CodedError) -> None:
        """Refuse those who wait with ``error``."""
        while (waiter := self.queue.pop()) is not None:
            waiter.future.set_exception(error)
        self._disarm()

    def _free(self, now: float) -> bool:
        return self.limit.may_send(now) and self.ejection.may_send(now)

    def _hand_out(self) -> None:
        now = self._now()
        while self.queue and self._free(now):
            waiter = self.queue.pop()
            if waiter is None:
                break
            waiter.future.set_result(Lease(self, self.limit.sent(), self.ejection.sent()))
        wake = self._blocked_until()
        if not self.queue or wake <= now:
            self._disarm()  # a lease that comes back ends their wait, if anybody waits
        elif self._timer is None or self._timer.when() != wake:
            self._disarm()
            self._timer = asyncio.get_running_loop().call_at(wake, self._awake)

    def _awake(self) -> None:
        self._timer = None
        self._hand_out()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _blocked_until(self) -> float:
        held = self.limit.held_until
        return max(held, self.ejection.until) if self.ejection.out else held

    def _refuse_the_hasty(self) -> None:
        for waiter in self.queue:
            if waiter.fail_fast and not waiter.dead():
                waiter.future.set_exception(self._ejected())

    def _ejected(self) -> Ejected:
        seconds = self.ejection.ejected_for(self._now())
        when = f"for {seconds:.3g} s more" if seconds else "until a trial has gone well"
        return Ejected(
            "UPSTREAM.EJECTED",
            f"{self.origin} failed {self.ejection.failures} times in a row and gets nothing {when}",
            {"origin": self.origin, "failures": self.ejection.failures, "ejected_for": round(seconds, 3)},
        )


class Targets:
    """The targets of a pool, each made when its first URL is seen. Lives on one event loop.

    ``ceiling`` is the most that one target ever gets at once, ``now`` the loop's clock (``loop.time``),
    ``threshold``, ``base`` and ``most`` are `Ejection`'s; ``moved`` hears of each target that is ejected
    or back. Beyond ``keep`` targets those that nobody
    uses are forgotten, first those that have nothing to remember."""

    def __init__(
        self,
        ceiling: int,
        now: Callable[[], float],
        *,
        threshold: int = 5,
        base: float = 1.0,
        most: float = 30.0,
        keep: int = 1024,
        moved: Callable[[TargetStats], None] = lambda _: None,
    ) -> None:
        self._moved = moved
        self._limit = partial(Limit, ceiling, now)
        self._ejection = partial(Ejection, now, threshold=threshold, base=base, most=most)
        self._now = now
        self._keep = keep
        self._sweep_at = keep
        self._by_origin: dict[str, Target] = {}
        self._by_url: dict[str, Target] = {}
        self._closed: CodedError | None = None

    def try_acquire(self, url: str) -> Lease | None:
        """A lease for a request to ``url``, None where it has to be waited for. Never waits."""
        target = self._by_url.get(url)
        return (target or self._find(url)).try_acquire()

    async def acquire(self, url: str, caller: Hashable, *, fail_fast: bool = False) -> Lease:
        """A lease for a request to ``url``. Those who wait are served in the order of their coming, the
        callers taking turns. Waits as long as its caller lets it: every caller has a deadline around
        this. ``fail_fast`` does not wait for a server that is ejected: CodedError UPSTREAM.EJECTED,
        also when that happens during the wait. Raises the error given to `close`, too."""
        if self._closed is not None:
            raise self._closed
        target = self._by_url.get(url) or self._find(url)
        return target.try_acquire() or await target.acquire(caller, fail_fast=fail_fast)

    def stats(self) -> tuple[TargetStats, ...]:
        """The targets, now."""
        return tuple(target.stats() for target in self._by_origin.values())

    def close(self, error: CodedError) -> None:
        """Refuse everybody who waits, or will, with ``error``. Leases may still come back."""
        self._closed = error
        for target in self._by_origin.values():
            target.close(error)

    def _find(self, url: str) -> Target:
        origin = origin_of(url)
        target = self._by_origin.get(origin)
        if target is None:
            if len(self._by_origin) >= self._sweep_at:
                self._sweep()
            target = Target(origin, self._limit(), self._ejection(), self._now, self._moved)
            self._by_origin[origin] = target
        if len(self._by_url) >= MAX_URLS:
            self._by_url.clear()  # all at once: it costs O(1) a URL, and the next look-ups fill it again
        self._by_url[url] = target
        return target

    def _sweep(self) -> None:
        now = self._now()
        for useless in (Target.spotless, Target.idle):
            if len(self._by_origin) >= self._keep:
                self._by_origin = {o: t for o, t in self._by_origin.items() if not useless(t, now)}
        self._by_url.clear()  # a target that is forgotten must not be found again by its URL
        # Where most are in use, sweeping at each new one would cost O(n) every time.
        self._sweep_at = max(self._keep, 2 * len(self._by_origin))


def origin_of(url: str) -> str:
    """``scheme://host:port`` of a URL that `check_url` has seen: lower case, the port always there."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port if parts.port is not None else _PORTS.get(parts.scheme, 0)
    return f"{parts.scheme}://[{host}]:{port}" if ":" in host else f"{parts.scheme}://{host}:{port}"
