"""What a rollout is asked to do; the flags of ``failsoft rollout``, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dispatch.engines.dialect import Sampling
from protocol import CodedError


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """See the flags' help texts. Times are seconds. ``chaos`` kills a poster and an embedded engine
    on the way. Raises CodedError CONFIG.INVALID, one line that names the flag."""

    prompts: Path
    out: Path
    n: int = 4
    engines: tuple[str, ...] = ()
    embedded: int = 2
    api: Literal["auto", "sglang", "openai"] = "auto"
    model: str = ""
    headers: dict[str, str] = {}
    concurrency: int = 64
    posters_per_node: int = 2
    deadline: float = 120.0
    stream: bool = False
    sampling: Sampling = Sampling()
    token_rate: float = 120.0
    chaos: bool = True
    mode: Literal["new", "resume", "overwrite"] = "new"
    rules: Path | None = None
    webhooks: tuple[str, ...] = ()
    alertmanagers: tuple[str, ...] = ()
    ray_address: str | None = None

    def __post_init__(self) -> None:
        for flag, value in (
            ("-n", self.n),
            ("--concurrency", self.concurrency),
            ("--posters-per-node", self.posters_per_node),
            ("--max-new-tokens", self.sampling.max_new_tokens),
        ):
            if value < 1:
                raise CodedError("CONFIG.INVALID", f"{flag} {value}: a whole number of at least 1, please")
        for flag, number in (("--deadline", self.deadline), ("--token-rate", self.token_rate)):
            if not 0 < number < 1e7:
                raise CodedError("CONFIG.INVALID", f"{flag} {number}: a number above 0, please")
        if not 0 <= self.sampling.temperature <= 100:
            raise CodedError(
                "CONFIG.INVALID", f"--temperature {self.sampling.temperature}: 0 or more, please"
            )
        if not self.engines and self.embedded < 1:
            raise CodedError(
                "CONFIG.INVALID", f"--embedded {self.embedded}: at least 1, or name engines with --engine"
            )


def parse_headers(lines: list[str]) -> dict[str, str]:
    """``NAME: VALUE`` lines as a dict. The value is never repeated in an error: it may be a key."""
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise CodedError("CONFIG.INVALID", f"--header number {number}: write 'NAME: VALUE'")
        headers[name.strip()] = value.strip()
    return headers
