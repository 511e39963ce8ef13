"""One request's life inside the scheduler: what it asked for, what it has said so far, and how it ended."""

import asyncio
import codecs
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dispatch.engines.embedded.ngram import CONTEXT, EOS, NGram

Finish = dict[str, Any]
"""SGLang's `finish_reason`: `{"type": "stop", "matched": …}`, `{"type": "length", "length": n}` or
`{"type": "abort", "message": …}`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw and when to stop. `seed=None` means a fresh random stream for each request."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    abort_after: int | None = None
    """Set by faults only: end as aborted after this many tokens, whatever the text says by then."""


class Generation:
    """A running text. Only the scheduler advances or finishes it; the HTTP side reads it and waits.

    `done` is set once, at the end. `changed` is set after every step in which text may have grown, so that a
    stream wakes once a step and not once a token.
    """

    def __init__(self, names: Iterable[str], ids: list[int], sampling: Sampling, rng: random.Random) -> None:
        self.names = frozenset(names)
        self.prompt_tokens = len(ids)
        self.output_ids: list[int] = []
        self.text = ""
        self.finish: Finish | None = None
        self.weight_version = ""
        self.created = time.monotonic()
        self.ended: float | None = None
        self.done = asyncio.Event()
        self.changed = asyncio.Event()
        self._sampling = sampling
        self._rng = rng
        self._context = (EOS, *ids[-CONTEXT:])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, model: NGram) -> None:
        """Add one token, and finish when that token, a stop string or the length limit says so."""
        sampling = self._sampling
        if sampling.abort_after is not None and len(self.output_ids) >= sampling.abort_after:
            self.end({"type": "abort", "message": "fault: aborted"})
            return
        if len(self.output_ids) >= sampling.max_new_tokens:  # only with max_new_tokens=0: a prefill
            self.end({"type": "length", "length": sampling.max_new_tokens})
            return
        token = model.next_id(self._context, sampling.temperature, sampling.top_p, self._rng)
        self.output_ids.append(token)
        self._context = (*self._context[-CONTEXT + 1 :], token)
        if token == EOS and not sampling.ignore_eos:
            self.end({"type": "stop", "matched": EOS})
            return
        before = len(self.text)
        self.text += self._decoder.decode(model.vocabulary.piece(token))
        if self._stopped(before):
            return
        if len(self.output_ids) >= sampling.max_new_tokens:
            self.end({"type": "length", "length": sampling.max_new_tokens})

    def end(self, finish: Finish) -> None:
        """Finish, once; later calls change nothing, because a finished text was already handed out."""
        if self.finish is None:
            if finish["type"] != "stop" or finish["matched"] == EOS:
                self.text += self._decoder.decode(b"", final=True)
            self.finish = finish
            self.ended = time.monotonic()
            self.done.set()
            self.changed.set()

    def settled_text(self) -> str:
        """The text that no later stop string can take back: what a stream may show already."""
        if self.finish is not None:
            return self.text
        held = 0
        for stop in self._sampling.stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]

    def _stopped(self, before: int) -> bool:
        """Look for the earliest stop string that the newest token completed, and cut the text there."""
        found: tuple[int, str] | None = None
        for stop in self._sampling.stop:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = at, stop
        if found is None:
            return False
        self.text = self.text[: found[0]]
        self.end({"type": "stop", "matched": found[1]})
        return True
