"""RolloutClient: n samples for each prompt, through the poster pool, over engines that come and go.

A sample is asked for with one id, whatever happens to it: the id is made from the run, the prompt and
the sample's number, so that a second arrival is recognisable as the same request. A failed attempt
goes to another engine where `faults.decide` allows it; a request that the engines refuse is sent
once. What is yielded is final: a `Sample`, or a `Failure` with its code.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from hashlib import blake2s
from typing import Any, Final

import msgspec

from dispatch.engines.dialect import PATHS, Api, Generated, Sampling, read, request
from dispatch.posting.load import Ejected
from dispatch.posting.pool import PosterPool
from dispatch.rollout.prompts import Prompt
from dispatch.rollout.routing import Router
from dispatch.streams import in_completion_order
from faults import Action, Backoff, Blame, Decision, Fault, classify, retrying
from protocol import CodedError, Events

TRIAL: Final = 0.1
"""Seconds that an engine is left to the one request that tries whether it is back."""
AHEAD: Final = 2
"""How many times the pool's concurrency is kept submitted, so that no place waits for the client."""


class Sample(msgspec.Struct, frozen=True):
    """One finished sample. ``weight_version`` is the engine's at the dispatch of the attempt that
    succeeded (rllm#622), ``seconds`` from asking to having, retries included; ``attempts`` counts
    what was sent to engines."""

    prompt_id: str
    index: int
    prompt: str
    text: str
    finish_reason: str
    answer: str | None
    prompt_tokens: int
    completion_tokens: int
    weight_version: str | None
    engine: str
    via: str
    attempts: int
    seconds: float
    request_id: str
    finished_at: float
    metadata: dict[str, Any]


class Failure(msgspec.Struct, frozen=True):
    """One sample that could not be had: what failed last, and its name."""

    prompt_id: str
    index: int
    code: str
    detail: str
    error_id: str
    attempts: int
    seconds: float
    request_id: str
    finished_at: float


class Group(msgspec.Struct, frozen=True):
    """The n samples of one prompt, once all are settled: those that came, and what became of the
    others."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...]


class RolloutStats(msgspec.Struct, frozen=True):
    """``asked = completed + failed + in_flight``; ``lost`` is what that leaves over: always 0.
    ``retried`` counts attempts after a sample's first, by the code that made them necessary."""

    asked: int
    completed: int
    failed: int
    in_flight: int
    failed_by_code: dict[str, int]
    retried_by_code: dict[str, int]

    @property
    def lost(self) -> int:
        """Samples that nobody accounts for."""
        return self.asked - self.completed - self.failed - self.in_flight

    @property
    def retried(self) -> int:
        """All retries."""
        return sum(self.retried_by_code.values())


class RolloutClient:
    """Samples prompts.

    ``pool`` posts, ``router`` chooses engines. ``n`` samples a prompt; ``deadline`` for one sample in
    seconds, queueing and retries included; ``max_attempts`` most times one is sent to an engine;
    ``stream`` asks for event streams, which show an engine's death sooner; ``run`` goes into the
    request ids."""

    def __init__(
        self,
        pool: PosterPool,
        router: Router,
        *,
        n: int = 4,
        api: Api = "sglang",
        model: str = "",
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen, so sharing the default is safe
        deadline: float = 120.0,
        max_attempts: int = 8,
        backoff: Backoff = Backoff(0.1, 5.0),  # noqa: B008 - frozen, so sharing the default is safe
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
        concurrency: int = 64,
        run: str = "",
        events: Events | None = None,
    ) -> None:
        for name, value in (("n", n), ("max_attempts", max_attempts), ("concurrency", concurrency)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CodedError(
                    "CONFIG.INVALID", f"{name} is {value!r}: a whole number of at least 1, please"
                )
        self._pool = pool
        self._router = router
        self._n = n
        self._api: Api = api
        self._model = model
        self._sampling = sampling
        self._deadline = deadline
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._headers = headers
        self._stream = stream
        self._ahead = AHEAD * concurrency
        self._run = run
        self._events = events or Events()
        self._asked = self._completed = self._failed = self._in_flight = 0
        self._failed_by_code: Counter[str] = Counter()
        self._retried_by_code: Counter[str] = Counter()

    async def samples(
        self, prompts: Iterable[Prompt], *, skip: Collection[tuple[str, int]] = ()
    ) -> AsyncGenerator[Sample | Failure, None]:
        """Every sample of every prompt in completion order, but for those whose (prompt id, index) is
        in ``skip``. Prompts are drawn as capacity allows; leaving the loop cancels what is under way."""
        wanted = ((p, i) for p in prompts for i in range(self._n) if (p.id, i) not in skip)
        everything = in_completion_order(wanted, lambda one: self._settle(*one), self._ahead)
        async with aclosing(everything) as settled:
            async for one in settled:
                yield one

    async def groups(self, prompts: Iterable[Prompt]) -> AsyncGenerator[Group, None]:
        """Whole groups in the order in which they are settled. A group keeps the samples that came,
        also when others of it failed."""
        open_groups: dict[str, tuple[Prompt, list[Sample], list[Failure]]] = {}

        def opened() -> Iterable[Prompt]:
            for prompt in prompts:
                open_groups[prompt.id] = (prompt, [], [])
                yield prompt

        async with aclosing(self.samples(opened())) as settled:  # leaving here must end it too, and now
            async for one in settled:
                prompt, samples, failures = open_groups[one.prompt_id]
                if isinstance(one, Sample):
                    samples.append(one)
                else:
                    failures.append(one)
                if len(samples) + len(failures) == self._n:
                    del open_groups[one.prompt_id]
                    samples.sort(key=lambda s: s.index)
                    yield Group(prompt, tuple(samples), tuple(failures))

    def stats(self) -> RolloutStats:
        """The accounting, now."""
        return RolloutStats(
            self._asked,
            self._completed,
            self._failed,
            self._in_flight,
            dict(self._failed_by_code),
            dict(self._retried_by_code),
        )

    def request_id(self, prompt_id: str, index: int) -> str:
        """The id under which a sample is asked for: the same for every attempt and in every process
        that continues the same run."""
        return blake2s(f"{self._run}\0{prompt_id}\0{index}".encode(), digest_size=16).hexdigest()

    async def _settle(self, prompt: Prompt, index: int) -> Sample | Failure:
        self._asked += 1
        self._in_flight += 1
        began = time.monotonic()
        asking = _Asking(self, prompt, index)
        try:
            sample = await asking.run()
        except CodedError as error:
            self._failed += 1
            self._failed_by_code[str(error.code)] += 1
            self._events.emit(
                "sample.failed",
                level="warning",
                error=error,
                key=f"{prompt.id}/{index}",
                request_id=asking.id,
                attempts=asking.attempts,
            )
            seconds = time.monotonic() - began
            return Failure(
                prompt.id,
                index,
                str(error.code),
                error.detail,
                error.id,
                asking.attempts,
                seconds,
                asking.id,
                time.time(),
            )
        except asyncio.CancelledError:
            self._asked -= 1  # nobody waits for it any more: it counts as never asked for
            raise
        else:
            self._completed += 1
            return sample
        finally:
            self._in_flight -= 1


class _Asking:
    """One sample on its way."""

    def __init__(self, client: RolloutClient, prompt: Prompt, index: int) -> None:
        self._client = client
        self._prompt = prompt
        self._index = index
        self.id = client.request_id(prompt.id, index)
        self.attempts = 0
        self._began = time.monotonic()
        self._avoid: set[str] = set()
        self._strikes = client._pool.strikes()

    async def run(self) -> Sample:
        client = self._client
        try:
            return await retrying(
                self._attempt,
                idempotent=True,
                max_attempts=client._max_attempts,
                remaining=self._remaining,
                backoff=client._backoff,
                on_failure=self._failed,
            )
        except BaseException as exc:  # raised again: a cancelled sample is no suspect any more, either
            self._strikes.ended(exc)
            raise

    def _remaining(self) -> float:
        return self._client._deadline - (time.monotonic() - self._began)

    async def _attempt(self, number: int) -> Sample:
        while True:
            try:
                return await self._sent(number)
            except Ejected:
                continue  # nothing was sent, so this was no attempt; the router knows now, and waits

    async def _sent(self, number: int) -> Sample:
        client = self._client
        target = await client._router.pick(self._avoid, timeout=max(self._remaining(), 0.0))
        version: str | None = None

        def dispatched() -> None:  # the engine may be updated before, while it waits, and while it generates
            nonlocal version
            version = client._router.version(target)

        url = target.url + PATHS[client._api]
        fault: Fault | None = None
        try:
            left = self._remaining()
            if left <= 0:
                raise CodedError("TIMEOUT.DEADLINE", f"the deadline of {client._deadline:.3g} s passed")
            self.attempts = number
            reply = await client._pool.post(
                url,
                self._body(),
                deadline=left,
                headers=client._headers,
                request_id=self.id,
                retry_upstream=False,
                strikes=self._strikes,
                on_sent=dispatched,
            )
            made = read(client._api, reply.data, url)
            client._router.learn(target, made.weight_version)
        except CodedError as error:
            fault = classify(error)
            if fault.blame is Blame.UPSTREAM:
                self._avoid = {target.url}
            if isinstance(error, Ejected):
                client._router.set_aside(target, max(error.seconds, TRIAL))
            raise
        except asyncio.CancelledError as gone:
            fault = classify(gone)  # no verdict on the engine, so not a success either
            raise
        finally:
            client._router.done(target, fault)
        return self._sample(made, target.url, version, reply.via, number)

    def _body(self) -> dict[str, Any]:
        client, sampling = self._client, self._client._sampling
        if sampling.seed is not None:  # one seed for a run, another for each of its samples
            own = int.from_bytes(
                blake2s(f"{self._prompt.id}\0{self._index}".encode(), digest_size=4).digest(), "big"
            )
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + own) % 2**31)
        return request(
            client._api,
            self._prompt.text,
            sampling,
            model=client._model,
            request_id=self.id,
            stream=client._stream,
        )

    def _sample(self, made: Generated, engine: str, version: str | None, via: str, attempts: int) -> Sample:
        return Sample(
            prompt_id=self._prompt.id,
            index=self._index,
            prompt=self._prompt.text,
            text=made.text,
            finish_reason=made.finish_reason,
            answer=self._prompt.answer,
            prompt_tokens=made.prompt_tokens,
            completion_tokens=made.completion_tokens,
            weight_version=version if version is not None else made.weight_version,
            engine=engine,
            via=via,
            attempts=attempts,
            seconds=time.monotonic() - self._began,
            request_id=self.id,
            finished_at=time.time(),
            metadata=self._prompt.metadata,
        )

    def _failed(self, fault: Fault, decision: Decision, number: int, exc: Exception) -> None:
        if not decision.action.sends_again:
            return
        self._client._retried_by_code[str(fault.code)] += 1
        self._client._events.emit(
            "sample.retried",
            error=exc,
            key=f"{self._prompt.id}/{self._index}",
            request_id=self.id,
            attempt=number,
            action=str(Action(decision.action)),
            delay=round(decision.delay, 3),
            why=decision.why,
        )
