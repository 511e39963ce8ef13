"""Make examples/prompts.jsonl anew: small, checkable tasks for trying a rollout.

The tasks come from the public package reasoning-gym, which generates them from a seed, so the file is
the same bytes on every machine with the same version of that package. Every dataset here has one
short answer that can be compared as text: a run that loses, doubles or mixes up samples then shows in
the scores, without a judge.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

MAX_PROMPT_CHARS: Final = 1500
MAX_TEXT_CHARS: Final = 80
POOL: Final = 1_000_000
"""How many tasks a level may be asked for (they are generated one by one, as they are read). Task k is
made from seed + k, so this is also how far apart two levels' seeds lie: nearer, they share numbers."""

LEVELS: Final = ("easy", "medium", "hard")

# One row a dataset, one column a level. Left out on purpose: datasets whose answer is only one of
# many (they need reasoning-gym to score) and datasets that read today's date (never the same twice).
DATASETS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    # No division: reasoning-gym 0.1.25 gives 51 / 193 - 2516 as -2516.
    "basic_arithmetic": (
        {"max_terms": 2, "max_digits": 2, "operators": ("+", "-", "*")},
        {"min_terms": 3, "max_terms": 4, "max_digits": 3, "operators": ("+", "-", "*")},
        {"min_terms": 5, "max_terms": 6, "min_digits": 2, "operators": ("+", "-", "*")},
    ),
    "leg_counting": (
        {"min_animals": 2, "max_animals": 3, "max_instances": 5},
        {"min_animals": 4, "max_animals": 6, "max_instances": 15},
        {"min_animals": 8, "max_animals": 12, "max_instances": 60},
    ),
    "gcd": (
        {"max_value": 100},
        {"max_value": 5000},
        {"min_numbers": 3, "max_numbers": 4, "min_value": 100, "max_value": 50000},
    ),
    "prime_factorization": (
        {"max_value": 100},
        {"min_value": 100, "max_value": 2000},
        {"min_value": 5000, "max_value": 90000},
    ),
    "fraction_simplification": (
        {"max_value": 20, "max_factor": 5, "styles": ("plain",)},
        {"max_value": 200, "max_factor": 20, "styles": ("plain",)},
        {"min_value": 100, "max_value": 2000, "min_factor": 10, "max_factor": 100, "styles": ("plain",)},
    ),
    "base_conversion": (
        {"min_base": 2, "max_base": 10, "max_value": 100},
        {"max_value": 2000},
        {"min_value": 5000, "max_value": 100000},
    ),
    "simple_equations": (
        {"min_terms": 2, "max_terms": 2, "max_value": 20},
        {"min_terms": 2, "max_terms": 4},
        {"min_terms": 4, "max_terms": 6, "max_value": 500},
    ),
    "maze": (
        {"min_dist": 3, "max_dist": 5, "min_grid_size": 5, "max_grid_size": 6},
        {"min_dist": 6, "max_dist": 9, "min_grid_size": 7, "max_grid_size": 10},
        {"min_dist": 12, "max_dist": 20, "min_grid_size": 12, "max_grid_size": 16},
    ),
    "spell_backward": (
        {"max_word_len": 5},
        {"min_word_len": 6, "max_word_len": 8},
        {"min_word_len": 9, "max_word_len": 10},
    ),
    "letter_counting": (
        {"min_words": 3, "max_words": 6},
        {"min_words": 8, "max_words": 15},
        {"min_words": 25, "max_words": 50},
    ),
    "caesar_cipher": (
        {"max_words": 4, "max_rotation": 3},
        {"min_words": 5, "max_words": 10},
        {"min_words": 12, "max_words": 24},
    ),
    "mini_sudoku": (
        {"min_empty": 4, "max_empty": 6},
        {"min_empty": 7, "max_empty": 9},
        {"min_empty": 10, "max_empty": 12},
    ),
}

Create = Callable[..., Any]


def draw(create: Create, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the tasks of one dataset without end, its levels taking turns, each prompt once."""
    pools = [
        iter(create(name, seed=seed + place * POOL, size=POOL, **config))
        for place, config in enumerate(DATASETS[name])
    ]
    seen: set[str] = set()
    number = 0
    while True:
        level = number % len(LEVELS)
        for item in pools[level]:
            prompt, answer = item["question"], item["answer"]
            if prompt not in seen and len(prompt) <= MAX_PROMPT_CHARS and isinstance(answer, str) and answer:
                break
        else:
            raise RuntimeError(
                f"{name}/{LEVELS[level]} has no more different tasks; ask for a smaller --count"
            )
        seen.add(prompt)
        number += 1
        yield {
            "id": f"{name}-{number:04d}",
            "prompt": prompt,
            "answer": answer,
            "source": f"reasoning_gym/{name}",
            "metadata": {"level": LEVELS[level], **small(item["metadata"])},
        }


def small(metadata: dict[str, Any]) -> dict[str, Any]:
    """Keep what is a single short value; grids and word lists would outweigh the prompts."""
    kept: dict[str, Any] = {}
    for key, value in metadata.items():
        if key == "source_dataset" or not isinstance(value, str | int | float | bool):
            continue
        if not isinstance(value, str) or len(value) <= MAX_TEXT_CHARS:
            kept[key] = value
    return kept


def make(create: Create, count: int, seed: int) -> bytes:
    """Make the file's bytes. Datasets take turns, so the first N lines are a fair mix too."""
    sources = [draw(create, name, seed + place * POOL * len(LEVELS)) for place, name in enumerate(DATASETS)]
    tasks = (next(sources[k % len(sources)]) for k in range(count))
    lines = (json.dumps(task, ensure_ascii=False, allow_nan=False) for task in tasks)
    return "".join(f"{line}\n" for line in lines).encode()


def save(path: Path, content: bytes) -> None:
    """Write whole or not at all, so that a run reading the file never meets half of it.

    This does by hand what failsoft has a helper for: the script runs where failsoft is not installed.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:  # an interrupt too must leave no temporary file behind
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make examples/prompts.jsonl anew with reasoning-gym.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error("--count must be 1 or more")
    try:
        from reasoning_gym import create_dataset
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "reasoning_gym":
            raise  # reasoning-gym is there, something it needs is not: that message names it
        print("reasoning-gym is not installed; run: pip install -e .[examples]", file=sys.stderr)
        return 1
    try:
        content = make(create_dataset, args.count, args.seed)
        save(args.out, content)
    except OSError as error:
        print(f"cannot write {args.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"cannot make {args.count} tasks: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.out}: {args.count} tasks from {min(args.count, len(DATASETS))} datasets, {len(content)} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
