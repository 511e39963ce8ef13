"""Who runs, who waits and how fast: the part of the engine that can be full, paused or frozen.

One task steps every running request by the tokens its rate allows. Everything else (submit, abort, pause,
swap) is a plain call on the same event loop, so no state is ever seen half changed and no lock is needed.
A request leaves its slot at the moment it ends, whether it finished, was aborted or lost its client.
"""

import asyncio
import random
from typing import Literal

from dispatch.engines.embedded.generation import Generation, Sampling
from dispatch.engines.embedded.ngram import NGram

PauseMode = Literal["abort", "retract", "in_place"]

MAX_BURST = 64
"""Most tokens a request gains in one step: bounds how long a step holds the loop, and how far an engine that
was stopped (SIGSTOP) catches up when it goes on, since a real one would not catch up at all."""

MIN_PERIOD = 0.001
"""Shortest pause between paced steps, seconds: an event loop's timers are no finer than about this."""


class QueueFull(Exception):
    """The waiting queue has no place; nothing of the request has run."""


class Scheduler:
    """A bounded running set before a bounded waiting queue, stepped by `run`."""

    def __init__(self, *, max_running: int, max_queue: int, token_rate: float) -> None:
        self.max_running = max_running
        self.max_queue = max_queue
        self.model: NGram | None = None
        self.weight_version = ""
        self.paused: PauseMode | None = None
        self.flowing = asyncio.Event()
        """Set while not paused; what a paused SGLang's `/health` waits for."""
        self.flowing.set()
        self.tokens_total = 0
        self._rate = token_rate
        self._frozen = False
        self._closed: str | None = None
        self.swapping = False
        """An update waits for the running requests to end, and holds back new ones until then."""
        self._swap_turn = asyncio.Lock()
        self._waiting: dict[Generation, None] = {}
        self._running: dict[Generation, None] = {}
        self._probes: dict[Generation, None] = {}
        self._work = asyncio.Event()
        self._quiet = asyncio.Event()
        self._settle()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def install(self, model: NGram, weight_version: str | None) -> None:
        """Put a model in place at once; None keeps the version's name, as SGLang does when none is given."""
        self.model = model
        if weight_version is not None:
            self.weight_version = weight_version
        self._settle()

    async def swap(self, model: NGram, weight_version: str | None) -> None:
        """Install a model between requests: hold new ones back and let the running ones end first.

        While paused nothing runs, so the swap is immediate and an in-place request goes on under the new
        weights; that is the point of pausing in place.
        """
        async with self._swap_turn:
            self.swapping = True
            try:
                await self._quiet.wait()
                self.install(model, weight_version)
            finally:
                self.swapping = False
                self._settle()

    def submit(self, generation: Generation) -> None:
        """Run the request now or put it in the queue; raises QueueFull when neither has a place."""
        if self._closed is not None:
            self._finish_aborted(generation, self._closed)
        elif self._admitting() and not self._waiting:
            self._running[generation] = None
        elif len(self._waiting) < self.max_queue:
            self._waiting[generation] = None
        else:
            raise QueueFull(f"the waiting queue is full ({self.max_queue} requests)")
        self._settle()

    async def probe(self) -> Generation:
        """Generate one token beside the running set, so that a full engine still answers its health check.

        It goes through the same step as everything else: paused or frozen, it does not come back.
        """
        probe = Generation((), [], Sampling(max_new_tokens=1), random.Random(0))  # noqa: S311  no secret here
        if self._closed is None:
            self._probes[probe] = None
        else:
            self._finish_aborted(probe, self._closed)
        self._settle()
        try:
            await probe.done.wait()
        finally:
            self._probes.pop(probe, None)
            self._settle()
        return probe

    def abort(self, generation: Generation, message: str) -> None:
        """End one request as aborted, with what it has said so far; nothing happens if it already ended."""
        if generation.finish is None:
            self._finish_aborted(generation, message)
            self._settle()

    def abort_named(self, name: str, message: str) -> int:
        """End every request that goes by this id (a retry may have arrived twice); how many there were."""
        return self._abort_each([one for one in self._everything() if name in one.names], message)

    def abort_all(self, message: str) -> int:
        """End everything that runs or waits; how many there were."""
        return self._abort_each(self._everything(), message)

    def close(self, message: str) -> None:
        """End everything as aborted, now and whatever still comes: a process that leaves starts no work."""
        self._closed = message
        self.abort_all(message)
        self.flowing.set()

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. `abort` ends all requests, `retract` puts the running ones back at the head of
        the queue (past its bound if need be: they were admitted once), `in_place` leaves them where they are.
        """
        self.paused = mode
        self.flowing.clear()
        if mode == "abort":
            self.abort_all("paused: every request was aborted")
        elif mode == "retract":
            self._waiting = {**self._running, **self._waiting}
            self._running = {}
        self._settle()

    def resume(self) -> None:
        self.paused = None
        self.flowing.set()
        self._settle()

    def freeze(self, frozen: bool) -> None:
        """Stop stepping while everything else answers: an engine whose worker hangs behind a live server."""
        self._frozen = frozen
        self._settle()

    async def run(self) -> None:
        """Step for ever. Ends only by cancellation, or by an error that must end the process."""
        clock = asyncio.get_running_loop().time
        period = max(1 / self._rate, MIN_PERIOD) if self._rate else 0.0
        while True:
            await self._work.wait()
            credit, mark = 0.0, clock()
            while self._work.is_set():
                await asyncio.sleep(period)
                now = clock()
                credit = min(credit + (now - mark) * self._rate, MAX_BURST) if self._rate else MAX_BURST
                mark = now
                tokens = int(credit)
                if tokens:
                    credit -= tokens
                    self._step(tokens)

    def _step(self, tokens: int) -> None:
        model = self.model
        if model is None or not self._work.is_set():
            return
        for generation in [*self._running, *self._probes]:
            before = len(generation.output_ids)
            for _ in range(tokens):
                generation.advance(model)
                if generation.finish is not None:
                    generation.weight_version = self.weight_version
                    self._running.pop(generation, None)
                    self._probes.pop(generation, None)
                    break
            self.tokens_total += len(generation.output_ids) - before
            generation.changed.set()
        self._settle()

    def _everything(self) -> list[Generation]:
        return [*self._running, *self._waiting, *self._probes]

    def _abort_each(self, generations: list[Generation], message: str) -> int:
        for generation in generations:
            self._finish_aborted(generation, message)
        self._settle()
        return len(generations)

    def _finish_aborted(self, generation: Generation, message: str) -> None:
        for place in (self._running, self._waiting, self._probes):
            place.pop(generation, None)
        generation.weight_version = self.weight_version
        generation.end({"type": "abort", "message": message})

    def _admitting(self) -> bool:
        return self.paused is None and not self.swapping and len(self._running) < self.max_running

    def _settle(self) -> None:
        """After any change: fill free slots from the queue, and say whether there is work and whether a swap
        may happen. Every mutation ends here, which is what keeps the three facts true."""
        while self._waiting and self._admitting():
            first = next(iter(self._waiting))
            del self._waiting[first]
            self._running[first] = None
        busy = bool(self._running or self._probes)
        _set(self._work, busy and self.paused is None and not self._frozen and self.model is not None)
        _set(self._quiet, self.paused is not None or not self._running)


def _set(event: asyncio.Event, wanted: bool) -> None:
    if wanted:
        event.set()
    else:
        event.clear()
