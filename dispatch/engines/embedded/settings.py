"""The engine's flags, read into one frozen value.

Kept apart from the program's entry so that the rest of the package can name `Settings` without importing
argparse's side of things, and so that a bad flag is always one line on stderr and exit status 2.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

EXIT_USAGE = 2
"""Exit status for a bad flag or an unreadable model; argparse's own convention."""

EXIT_ADDRESS_IN_USE = 98
"""Exit status when the port is taken: Linux's EADDRINUSE, so that a supervisor can pick another port."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line said. Times are seconds, rates tokens a second for each running request."""

    port: int
    host: str = "127.0.0.1"
    token_rate: float = 200.0
    max_running: int = 16
    max_queue: int = 256
    start_delay: float = 0.0
    weight_version: str = "default"
    model_path: Path | None = None
    seed: int | None = None
    max_input_tokens: int = 2048
    log_requests: bool = False
    faults: bool = False
    litter: bool = False
    litter_port: int = 0


class _OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaint fits in one log line (the stock one prints its usage first)."""

    def error(self, message: str) -> NoReturn:
        print(f"embedded engine: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def _port(text: str) -> int:
    return _whole(text, 0, 65535)


def _positive(text: str) -> int:
    return _whole(text, 1, 1 << 30)


def _count(text: str) -> int:
    return _whole(text, 0, 1 << 30)


def _whole(text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
    return value


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; raises SystemExit(2) after one line on stderr when it can't be read."""
    parser = _OneLineParser(prog="python -m dispatch.engines.embedded", description=__doc__)
    parser.add_argument("--port", type=_port, required=True, help="0 picks a free port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--token-rate", type=_amount, default=200.0, help="tokens a second a request; 0 is unpaced"
    )
    parser.add_argument("--max-running", type=_positive, default=16)
    parser.add_argument("--max-queue", type=_count, default=256, help="waiting requests before a 503")
    parser.add_argument("--start-delay", type=_amount, default=0.0, help="seconds until it is healthy")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--model-path", type=Path, default=None, help="a text file, or a folder of *.txt")
    parser.add_argument("--seed", type=int, default=None, help="makes unseeded requests reproducible")
    parser.add_argument("--max-input-tokens", type=_positive, default=2048)
    parser.add_argument("--log-requests", action="store_true", help="one line a request on stderr")
    parser.add_argument("--faults", action="store_true", help="enable POST /faults; for tests only")
    parser.add_argument("--litter", action="store_true", help="make what real engines make; for tests only")
    parser.add_argument("--litter-port", type=_port, default=0, help="its second port; 0 picks a free one")
    return Settings(**vars(parser.parse_args(arguments)))
