"""A word-level n-gram language model with a fixed vocabulary, small enough to be trained at start.

The vocabulary plays the tokenizer's part: it always comes from the packaged corpus, so token ids mean the
same on every engine and across weight updates, as they do with a real model. The counts play the weights'
part: they come from whatever text the model was last trained on, and words that text has but the vocabulary
lacks are spelled in bytes.

Training keeps no table of n-grams. It keeps, for each token, the places where it occurs; the places that
agree with the longest stretch of the context are found when a token is wanted, and the result is cached.
That makes training linear in the text (milliseconds), which a fast start and a fast weight update need.
"""

import bisect
import random
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

BYTES = 256
"""Ids 0..255 are raw bytes: every text can be encoded, and encoding loses nothing."""

EOS = 256
"""The end-of-text id. It reads as a line break where it does not end a text (`ignore_eos`)."""

CONTEXT = 6
"""How many tokens back the model looks: enough to reach both numbers of a short sum in its question."""

LONGEST_SHARE = 0.8
"""Share of the probability given to the longest matching context; the rest falls to shorter ones in the same
way. With 0.8 the packaged model answers about half of its sums rightly at temperature 1, and nearly all at
0.5 (counted over 300 sums): enough of both for a reward to tell samples apart."""

MAX_TEXT_BYTES = 1 << 20
"""Largest training text. Beyond about a megabyte the uncached search for a common word takes milliseconds."""

_CACHED_DISTRIBUTIONS = 50_000

_TOKEN = re.compile(r" ?[^\W\d_]+(?:'[a-z]+)?| ?\d+| ?[^\w\s]| ?_|\s")
_CORPUS = Path(__file__).with_name("corpus.txt")


class BadModel(ValueError):
    """The text at a model path can't be read or has nothing to train on; the message says which."""


class Vocabulary:
    """Words with the space before them, punctuation, and bytes for everything else."""

    def __init__(self, text: str) -> None:
        words = sorted(set(_TOKEN.findall(text)))
        self._pieces: list[bytes] = [bytes([value]) for value in range(BYTES)]
        self._pieces.append(b"\n")
        self._pieces.extend(word.encode() for word in words)
        self._ids = {word: EOS + 1 + place for place, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; `decode` gives the text back (lone surrogates excepted: they become `?`)."""
        ids: list[int] = []
        for word in _TOKEN.findall(text):
            known = self._ids.get(word)
            if known is None:
                ids.extend(word.encode(errors="replace"))
            else:
                ids.append(known)
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes one token stands for; a byte token may be only part of a character."""
        return self._pieces[token]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.piece, ids)).decode(errors="replace")


def packaged_corpus() -> Path:
    """Where the text that ships with the package lies."""
    return _CORPUS


def read_text(path: Path) -> str:
    """The training text at a path: a UTF-8 file, or a folder's `*.txt` files in the order of their names.

    Raises BadModel, never OSError, so that a caller has one thing to turn into its 400 or its exit status.
    """
    try:
        if path.is_dir():
            files = sorted(path.glob("*.txt"))
            if not files:
                raise BadModel(f"no *.txt file in {path}")
        else:
            files = [path]
        if sum(file.stat().st_size for file in files) > MAX_TEXT_BYTES:
            raise BadModel(f"the text at {path} is larger than {MAX_TEXT_BYTES} bytes")
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise BadModel(f"can't read a model from {path}: {error}") from error
    if not text.strip():
        raise BadModel(f"the text at {path} is empty")
    return text


class NGram:
    """The trained counts over a vocabulary, and the drawing of the next token."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.vocabulary = vocabulary
        stream = [EOS]
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if words:
                stream += vocabulary.encode(words)
                stream.append(EOS)
        self._stream = stream
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(stream[:-1]):
            self._places.setdefault(token, []).append(place)
        self._cache: dict[tuple[tuple[int, ...], float, float], tuple[list[int], list[float]]] = {}

    def next_id(self, context: tuple[int, ...], temperature: float, top_p: float, rng: random.Random) -> int:
        """Draw the token that follows; temperature 0 takes the likeliest (the smallest id among equals)."""
        key = (context[-CONTEXT:], temperature, top_p)
        drawn = self._cache.get(key)
        if drawn is None:
            if len(self._cache) >= _CACHED_DISTRIBUTIONS:
                self._cache.clear()
            drawn = self._cache[key] = _sharpen(self._weights(key[0]), temperature, top_p)
        ids, cumulative = drawn
        if len(ids) == 1:
            return ids[0]
        return ids[min(bisect.bisect(cumulative, rng.random() * cumulative[-1]), len(ids) - 1)]

    def _weights(self, context: Sequence[int]) -> dict[int, float]:
        """What may follow, each token with its probability mixed over all context lengths that occur.

        A context the text never had falls back to the start of a paragraph, which always exists.
        """
        stream = self._stream
        by_length: list[dict[int, int]] = [{} for _ in range(CONTEXT)]
        last = context[-1] if context and context[-1] in self._places else EOS
        longest = len(context) if context and last == context[-1] else 1
        for place in self._places[last]:
            agreed = 1
            while agreed < longest and agreed <= place and stream[place - agreed] == context[-1 - agreed]:
                agreed += 1
            follower = stream[place + 1]
            counts = by_length[agreed - 1]
            counts[follower] = counts.get(follower, 0) + 1
        weights: dict[int, float] = {}
        share = 1.0
        seen: dict[int, int] = {}
        for counts in reversed(by_length):
            if not counts:
                continue
            for token, count in counts.items():
                seen[token] = seen.get(token, 0) + count
            part = share * LONGEST_SHARE / sum(seen.values())
            for token, count in seen.items():
                weights[token] = weights.get(token, 0.0) + part * count
            share *= 1 - LONGEST_SHARE
        return weights


def _sharpen(weights: dict[int, float], temperature: float, top_p: float) -> tuple[list[int], list[float]]:
    """Apply temperature, then keep the likeliest tokens up to `top_p`; ids with cumulative weights."""
    ranked = sorted(weights.items(), key=lambda pair: (-pair[1], pair[0]))
    if temperature == 0:
        return [ranked[0][0]], [1.0]
    top = ranked[0][1]
    # Dividing by the largest first keeps every power in 0..1, however small the temperature.
    shaped = [(weight / top) ** (1 / temperature) for _, weight in ranked]
    cumulative = list(accumulate(shaped))
    keep = bisect.bisect_left(cumulative, top_p * cumulative[-1]) + 1
    return [token for token, _ in ranked[:keep]], cumulative[:keep]
