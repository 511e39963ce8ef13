"""PosterPool: POSTs through a pool of Ray actors, with nothing lost while actors die.

One POST, from call to reply::

    post() → ledger: submitted
      → attempts.Post → retrying()                  faults.retry, by decision only
          → admission.acquire()                     exact capacity, first come first served
          → lane.run()                              a poster actor, or the local client
              → transport.exchange()                one HTTP exchange, judged
      → ledger: succeeded | failed | cancelled

Beside it one keeper a poster (`dispatch.posting.posters.keeper`) starts, watches, retires and replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import ray

from dispatch.posting.admission import Admission
from dispatch.posting.attempts import Post, Shared
from dispatch.posting.drop_in import Post as DropIn
from dispatch.posting.drop_in import as_post
from dispatch.posting.load import Deaths, Hedging, LoadControl, RetryBudget, Strikes, Targets, TargetStats
from dispatch.posting.observe.metrics import Metrics
from dispatch.posting.observe.quiet import Quiet
from dispatch.posting.observe.stats import Ledger, PoolStats
from dispatch.posting.observe.tracing import Tracing
from dispatch.posting.posters.keeper import Keeper, Recreation
from dispatch.posting.posters.lane import Health, Lane
from dispatch.posting.posters.local import LocalLane
from dispatch.posting.posters.placement import alive_nodes, check_counts
from dispatch.posting.posters.roster import Roster
from dispatch.posting.request import (
    Reply,
    Request,
    check_count,
    check_deadline,
    check_headers,
    check_id,
    check_url,
    encode,
)
from dispatch.posting.transports.client import Transport, check_transport
from dispatch.posting.transports.descriptors import check_descriptors
from dispatch.streams import in_completion_order
from faults import Backoff
from protocol import CodedError, Events

PUBLISH: Final = 1.0
"""Seconds between two publications of metrics."""
FLUSH_AT: Final = 10
"""After so many publications the log says how many events it did not write."""
AHEAD: Final = 2
"""How many times the concurrency `post_many` keeps submitted."""


class Done(msgspec.Struct, frozen=True):
    """One finished request of `PosterPool.post_many`: its reply or its error, never both."""

    request: Request
    reply: Reply | None = None
    error: CodedError | None = None


class PosterPool:
    """A pool of poster actors.

    ``concurrency``: exact ceiling of POSTs that servers see at once, over the whole cluster.
    ``posters_per_node``: posters on each node alive at the start. ``deadline``: default for a POST,
    queueing and retries included, in seconds. ``max_attempts``: most times one POST is sent, those not
    counted (up to 16) that died with their poster.
    ``local_fallback``: POST from this process while no poster is healthy. ``poster_options``: more
    options for the actors (``runtime_env``, ``resources``), as ``.options()`` of Ray takes them.
    ``transport``: what carries the exchanges (`transport.Transport`). ``load``: how servers that are
    slow, full or broken are treated. ``events``: where to write; without it the logger ``failsoft`` gets
    them, which people read, so that there a thousand alike are told once. ``metrics``: publish them
    through Ray (docs/metrics.md). ``tracing``: a span for each POST.

    Use it as ``async with PosterPool(...) as pool``, from one event loop. Raises CodedError
    CONFIG.INVALID for settings that cannot work, POOL.MISUSE for use outside of that.
    """

    def __init__(
        self,
        concurrency: int = 1024,
        posters_per_node: int = 2,
        deadline: float = 600.0,
        *,
        max_attempts: int = 4,
        local_fallback: bool = True,
        backoff: Backoff = Backoff(),  # noqa: B008 - frozen, so sharing the default is safe
        health: Health = Health(),  # noqa: B008 - frozen, so sharing the default is safe
        recreation: Recreation = Recreation(),  # noqa: B008 - frozen, so sharing the default is safe
        events: Events | None = None,
        poster_options: Mapping[str, Any] | None = None,
        transport: Transport = "aiohttp",
        load: LoadControl = LoadControl(),  # noqa: B008 - frozen, so sharing the default is safe
        metrics: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        for name, value in (
            ("concurrency", concurrency),
            ("posters_per_node", posters_per_node),
            ("max_attempts", max_attempts),
        ):
            check_count(value, name, "CONFIG.INVALID")
        self._concurrency = concurrency
        self._posters_per_node = posters_per_node
        self._deadline = check_deadline(deadline)
        self._max_attempts = max_attempts
        self._local_fallback = local_fallback
        self._health = health
        self._recreation = recreation
        self._events = events or Quiet(Events())
        self._options = {"num_cpus": 0.001, **(poster_options or {})}
        self._transport: Transport = check_transport(transport)
        self._ledger = Ledger()
        self._admission: Admission[Lane] = Admission(concurrency)
        self._closing = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._backoff = backoff
        self._load = load
        self._metrics = Metrics() if metrics else None
        self._tracing = tracing
        self._telling: asyncio.Task[None] | None = None
        self._shared: Shared | None = None
        self._roster: Roster | None = None
        self._local: LocalLane | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Create the posters and wait until each serves or has failed once (then the pool serves with
        the others, or locally, while its keeper tries on)."""
        if self._loop is not None:
            raise CodedError(
                "POOL.MISUSE", "this pool was started before: make a new PosterPool for each use"
            )
        if not ray.is_initialized():
            raise CodedError("POOL.MISUSE", "Ray is not initialised in this process: call ray.init() first")
        nodes = alive_nodes()
        check_counts(self._concurrency, self._posters_per_node, len(nodes))
        if self._local_fallback:
            check_descriptors(self._concurrency, "the pool's local client")
        self._loop = asyncio.get_running_loop()
        if self._metrics is not None:
            self._metrics.open()
        self._local = LocalLane(self._admission.release, self._concurrency, self._transport)
        self._roster = Roster(
            self._posters_per_node,
            self._keeper,
            self._admission,
            self._local if self._local_fallback else None,
            self._events,
        )
        self._shared = self._make_shared(self._loop, self._roster)
        try:
            await self._roster.start(nodes)
        except BaseException:  # cancelled or failed: a start leaves nothing behind
            await self.close()
            raise
        self._telling = asyncio.create_task(self._tell(self._metrics))

    async def post(
        self,
        url: str,
        payload: Any,
        *,
        deadline: float | None = None,
        idempotent: bool = True,
        headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
        max_attempts: int | None = None,
        retry_upstream: bool = True,
        caller: Hashable = None,
        strikes: Strikes | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> Reply:
        """POST ``payload`` as JSON to ``url``.

        ``deadline`` in seconds from now counts queueing and retries. ``idempotent=False``: sent again
        only when it is known not to have run. ``request_id`` is sent as X-Request-Id, the same with
        every attempt. ``retry_upstream=False`` leaves failures of the server to the caller, who may
        know another server; the pool then retries only what its posters did. ``caller`` says for whom
        it is: where POSTs have to wait, callers take turns, however many each of them has waiting.
        ``strikes`` (from `strikes`) remembers the deaths that it was there at, for a caller that sends it
        to one server after the other, and says with `Strikes.ended` when it gives up. ``on_sent`` is
        called whenever it goes out, be it again: once it has its place, however long it waited for that.

        Raises CodedError: what failed last, REQUEST.OUTCOME_UNKNOWN where a request that is not
        idempotent may have run, REQUEST.INVALID for what cannot be sent, POOL.* for the pool itself."""
        shared = self._usable()
        check_url(url)
        body = encode(payload)
        sent_headers = check_headers(headers)
        id = check_id(request_id)
        budget = self._deadline if deadline is None else check_deadline(deadline)
        most = self._max_attempts if max_attempts is None else check_count(max_attempts, "max_attempts")
        post = Post(
            shared,
            id,
            url,
            body,
            sent_headers,
            asyncio.get_running_loop().time() + budget,
            idempotent=idempotent,
            retry_upstream=retry_upstream,
            caller=caller,
            strikes=strikes,
            on_sent=on_sent,
        )
        span = self._tracing.begin(url) if self._tracing is not None else None
        status: int | None = None
        code = ""
        ledger = self._ledger
        ledger.submitted += 1
        ledger.in_flight += 1
        self._idle.clear()
        try:
            reply = await post.run(most)
        except asyncio.CancelledError:
            ledger.cancelled += 1
            code = "CANCEL.CALLER"
            raise
        except CodedError as error:
            ledger.failed += 1
            code, status = str(error.code), error.data.get("status")
            ledger.failed_by_code[code] += 1
            raise
        except BaseException as exc:  # whatever it is, the accounting has to hold
            ledger.failed += 1
            code = "INTERNAL.BUG"
            ledger.failed_by_code[code] += 1
            if not isinstance(exc, Exception):
                raise  # KeyboardInterrupt and the like are not ours to rename
            raise CodedError.from_exception(exc, "INTERNAL.BUG") from exc
        else:
            ledger.succeeded += 1
            status = reply.status
            if self._metrics is not None:
                self._metrics.observe(reply.seconds)
            return reply
        finally:
            ledger.in_flight -= 1
            if self._tracing is not None:
                self._tracing.end(span, attempts=post.attempts, status=status, code=code)
            if ledger.in_flight == 0:
                self._idle.set()

    async def post_many(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncIterator[Done]:
        """POST them all and yield each when it is done, in completion order. Requests are drawn as
        capacity allows, so the source may be endless; leaving the loop cancels what is under way."""
        self._usable()
        caller = object()  # each call of this is a caller of its own

        def one(request: Request) -> Awaitable[Done]:
            return self._one(request, caller)

        everything = in_completion_order(requests, one, AHEAD * self._concurrency)
        async with contextlib.aclosing(everything) as results:
            async for done in results:
                yield done

    def stats(self) -> PoolStats:
        """The accounting, now."""
        ledger, admission = self._ledger, self._admission
        targets = self._shared.targets.stats() if self._shared is not None else ()
        keepers = self._roster.keepers if self._roster is not None else ()
        return PoolStats(
            submitted=ledger.submitted,
            succeeded=ledger.succeeded,
            failed=ledger.failed,
            cancelled=ledger.cancelled,
            in_flight=ledger.in_flight,
            waiting=admission.waiting + sum(target.waiting for target in targets),
            occupied=admission.occupied,
            peak=admission.peak,
            sent=ledger.sent,
            retried=ledger.retried,
            hedged=ledger.hedged,
            local=ledger.local,
            failed_by_code=dict(ledger.failed_by_code),
            retried_by_code=dict(ledger.retried_by_code),
            recreated=ledger.recreated,
            recoveries=tuple(ledger.recoveries),
            posters=tuple(keeper.stats() for keeper in keepers),
            targets=targets,
        )

    async def close(self) -> None:
        """End the pool: outstanding POSTs fail with POOL.CLOSED, and afterwards no actor, process or
        connection of it is left. Idempotent; one that is cancelled goes on by itself, and the next waits for
        its end."""
        if self._loop is None:
            return
        if self._ending is None:
            self._closing.set()
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)  # whoever came first, and whatever becomes of who waits for it

    async def _end(self) -> None:
        closed = CodedError("POOL.CLOSED", "the pool was closed before the request was sent")
        self._admission.close(closed)
        if self._shared is not None:
            self._shared.targets.close(closed)
        if self._telling is not None:
            self._telling.cancel()
        if self._roster is not None:
            await self._roster.end()
        if self._local is not None:
            await self._local.close()
        with contextlib.suppress(TimeoutError):
            # Every outstanding post has been failed by now; this lets their callers take notice.
            async with asyncio.timeout(5.0):
                await self._idle.wait()
        if self._metrics is not None:
            self._metrics.publish(self.stats())
            self._metrics.close()
        if isinstance(self._events, Quiet):
            self._events.flush()
        self._events.emit("pool.closed", key="pool", **msgspec.to_builtins(self.stats()))

    def strikes(self) -> Strikes:
        """The memory of one request that is POSTed several times; see `post`."""
        return Strikes(self._usable().deaths, self._load.poison_after)

    def as_post(self, *, deadline: float | None = None, idempotent: bool = True) -> DropIn:
        """This pool behind slime's calling convention; see `drop_in.as_post`."""
        return as_post(self, deadline=deadline, idempotent=idempotent)

    def _make_shared(self, loop: asyncio.AbstractEventLoop, roster: Roster) -> Shared:
        load = self._load
        return Shared(
            self._admission,
            self._ledger,
            self._events,
            self._backoff,
            self._closing,
            Targets(
                self._concurrency,
                loop.time,
                threshold=load.eject_after,
                base=load.eject_first,
                most=load.eject_most,
                moved=self._target_moved,
            ),
            RetryBudget(
                loop.time,
                share=load.retry_share,
                floor=load.retry_floor,
                # One retry of everything that can be in flight: what a server's restart costs.
                burst=float(max(100, self._concurrency)),
            ),
            Hedging(percentile=load.hedge_at, share=load.hedge_share) if load.hedge_at is not None else None,
            load.poison_after,
            Deaths(loop.time),
            roster.remote,
        )

    def _target_moved(self, target: TargetStats) -> None:
        if target.standing == "serving":
            self._events.emit("target.back", key=target.origin, detail="a trial went well")
            return
        self._events.emit(
            "target.ejected",
            level="warning",
            key=target.origin,
            code="UPSTREAM.EJECTED",
            detail=f"it failed again and again: nothing is sent there for {target.ejected_for:.3g} s",
            seconds=round(target.ejected_for, 3),
            waiting=target.waiting,
        )

    async def _tell(self, metrics: Metrics | None) -> None:
        while True:
            for _ in range(FLUSH_AT):
                await asyncio.sleep(PUBLISH)
                if metrics is not None:
                    metrics.publish(self.stats())
            if isinstance(self._events, Quiet):
                self._events.flush()

    def _usable(self) -> Shared:
        if self._loop is None or self._shared is None:
            raise CodedError(
                "POOL.MISUSE", "the pool was not started: use `async with PosterPool(...) as pool`"
            )
        if self._closing.is_set():
            raise CodedError("POOL.CLOSED", "the pool is closed: post inside its `async with` block")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:
            raise CodedError(
                "POOL.MISUSE", "the pool belongs to another event loop: use it from the loop that started it"
            )
        return self._shared

    async def _one(self, request: Request, caller: Hashable) -> Done:
        try:
            reply = await self.post(
                request.url,
                request.payload,
                deadline=request.deadline,
                idempotent=request.idempotent,
                headers=request.headers,
                request_id=request.request_id,
                caller=caller,
            )
        except CodedError as error:
            return Done(request, error=error)
        return Done(request, reply=reply)

    def _keeper(self, key: str, node: str, changed: Callable[[], None]) -> Keeper:
        return Keeper(
            key,
            node,
            concurrency=self._concurrency,
            options=self._options,
            transport=self._transport,
            release=self._admission.release,
            changed=changed,
            health=self._health,
            recreation=self._recreation,
            events=self._events,
            ledger=self._ledger,
        )
