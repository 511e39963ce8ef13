"""The engine's state: its parts, what it is doing, and what it takes and turns away."""

import asyncio
import random
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from dispatch.engines.embedded.dialects import Dialect, Order, Refusal
from dispatch.engines.embedded.litter import Litter
from dispatch.engines.embedded.misbehave import FaultBook
from dispatch.engines.embedded.ngram import NGram, Vocabulary, packaged_corpus, read_text
from dispatch.engines.embedded.replies import RETRY_AFTER, Ticket
from dispatch.engines.embedded.scheduler import Scheduler
from dispatch.engines.embedded.settings import Settings
from dispatch.engines.embedded.witness import Visit, Witness


@dataclass(slots=True)
class Engine:
    """Everything the handlers share."""

    settings: Settings
    vocabulary: Vocabulary
    scheduler: Scheduler
    model_path: Path
    litter: Litter | None = None
    witness: Witness = field(default_factory=Witness)
    faults: FaultBook = field(default_factory=FaultBook)
    ready: bool = False
    closing: bool = False
    _seeds: random.Random = field(default_factory=random.Random)

    @classmethod
    def make(cls, settings: Settings, litter: Litter | None = None) -> "Engine":
        scheduler = Scheduler(
            max_running=settings.max_running, max_queue=settings.max_queue, token_rate=settings.token_rate
        )
        engine = cls(
            settings,
            vocabulary=Vocabulary(read_text(packaged_corpus())),
            scheduler=scheduler,
            model_path=settings.model_path or packaged_corpus(),
            litter=litter,
        )
        engine._seeds.seed(settings.seed)
        return engine

    def require_open(self) -> None:
        """Raise a 503 while there is no model yet, or no future."""
        if self.closing:
            raise Refusal(503, "the engine is shutting down")
        if not self.ready:
            raise Refusal(503, "the engine is starting: its model isn't trained yet", RETRY_AFTER)

    def close(self) -> None:
        """End all work as aborted and turn new work away; what SIGTERM does first."""
        self.closing = True
        self.faults.clear()
        self.scheduler.close("the engine is shutting down")

    async def train(self, path: Path) -> NGram:
        """A model of the text at a path, made in a thread so that the loop goes on; raises BadModel."""
        return await asyncio.to_thread(lambda: NGram(self.vocabulary, read_text(path)))

    def ticket(self, request: web.Request, visit: Visit, dialect: Dialect, order: Order) -> Ticket:
        """Check an order against this engine and make it ready to run; raises a 400 Refusal."""
        header = request.headers.get("X-Request-Id")
        names = tuple(name for name in (header, order.rid) if name) or (uuid.uuid4().hex,)
        ids = self._ids(order)
        seed = order.sampling.seed
        rng = random.Random(self._seeds.getrandbits(64) if seed is None else seed)  # noqa: S311  text, no secret
        return Ticket(request, visit, dialect, order, ids, names, self.scheduler, rng)

    def _ids(self, order: Order) -> list[int]:
        size = len(self.vocabulary)
        limit = self.settings.max_input_tokens
        if isinstance(order.prompt, str):
            ids = self.vocabulary.encode(order.prompt)
        else:
            ids = order.prompt
            outside = next((token for token in ids if not 0 <= token < size), None)
            if outside is not None:
                raise Refusal(400, f"token id {outside} is outside the vocabulary (0 to {size - 1})")
        if len(ids) > limit:
            raise Refusal(400, f"the prompt is too long: {len(ids)} tokens, and {limit} are allowed")
        return ids


ENGINE = web.AppKey("engine", Engine)
