"""The two HTTP dialects that engines speak, as requests and as judged replies.

A 200 is not a sample (vLLM and SGLang both end a generation that they had to drop with HTTP 200 and
finish_reason "abort"): `Dialect.read` returns a `Generated` or raises a CodedError, for a plain reply
and for a stream's events alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NoReturn

import msgspec

from protocol import CodedError
from protocol.foreign import excerpt
from protocol.safe import json_safe

Api = Literal["sglang", "openai"]
PATHS: Final[dict[Api, str]] = {"sglang": "/generate", "openai": "/v1/completions"}


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample, in neutral words. ``stop`` are texts that end a sample; ``seed`` None leaves the
    choice to the engine."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


class Generated(msgspec.Struct, frozen=True):
    """What an engine generated. ``finish_reason`` is "stop" or "length"; counts are tokens, 0 where
    the engine does not say; ``weight_version`` is what the engine said at the end, if anything."""

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    weight_version: str | None = None


def request(
    api: Api, prompt: str, sampling: Sampling, *, model: str, request_id: str, stream: bool
) -> dict[str, Any]:
    """The body of a generation request."""
    if api == "sglang":
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        body: dict[str, Any] = {"text": prompt, "sampling_params": params, "rid": request_id}
    else:
        body = {
            "prompt": prompt,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": 1,
        }
        if model:
            body["model"] = model
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
    if stream:
        body["stream"] = True
    return body


def read(api: Api, data: Any, where: str) -> Generated:
    """The sample in a reply's decoded body, or in the list of a stream's events.

    Raises CodedError: UPSTREAM.ABORTED for an abort that nobody asked for, UPSTREAM.TRUNCATED where
    the end is missing, UPSTREAM.STREAM_ERROR for an error inside, UPSTREAM.BAD_BODY for a wrong
    shape. ``where`` (a URL) goes into the text."""
    events = data if isinstance(data, list) else [data]
    if not events:
        raise CodedError("UPSTREAM.TRUNCATED", f"an empty stream from {where}")
    for event in events:
        if not isinstance(event, dict):
            _wrong_shape(where, event, "a JSON object")
        if event.get("error") is not None:
            raise CodedError(
                "UPSTREAM.STREAM_ERROR", f"an error under HTTP 200 from {where}: {_excerpt(event)}"
            )
    made = _sglang(events, where) if api == "sglang" else _openai(events, where)
    if made.finish_reason in ("stop", "length"):
        return made
    if not made.finish_reason:
        raise CodedError(
            "UPSTREAM.TRUNCATED", f"the generation from {where} has no end: no finish_reason", _partial(made)
        )
    if made.finish_reason == "abort":
        raise CodedError(
            "UPSTREAM.ABORTED",
            f"{where} ended the generation with finish_reason abort after {made.completion_tokens} tokens",
            _partial(made),
        )
    raise CodedError(
        "UPSTREAM.STREAM_ERROR",
        f"{where} ended the generation with finish_reason {excerpt(made.finish_reason, 80)!r}",
        _partial(made),
    )


def _sglang(events: Sequence[dict[str, Any]], where: str) -> Generated:
    last = events[-1]  # SGLang's streams are cumulative
    meta, text = last.get("meta_info"), last.get("text")
    if not isinstance(text, str) or not isinstance(meta, dict):
        _wrong_shape(where, last, 'SGLang\'s {"text", "meta_info"}')
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    return Generated(
        text,
        kind if isinstance(kind, str) else "",
        _count(meta.get("prompt_tokens")),
        _count(meta.get("completion_tokens")),
        str(meta["weight_version"]) if meta.get("weight_version") is not None else None,
    )


def _openai(events: Sequence[dict[str, Any]], where: str) -> Generated:
    text, reason, usage = "", "", {}
    for event in events:
        choices = event.get("choices")
        if not isinstance(choices, list):
            _wrong_shape(where, event, 'OpenAI\'s {"choices": [...]}')
        if isinstance(event.get("usage"), dict):
            usage = event["usage"]
        if not choices:  # a last event may hold the usage alone
            continue
        choice = choices[0]
        piece = choice.get("text") if isinstance(choice, dict) else None
        if not isinstance(piece, str):
            _wrong_shape(where, event, "a completion's text")
        text += piece
        if isinstance(choice.get("finish_reason"), str):
            reason = choice["finish_reason"]
    return Generated(text, reason, _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int:
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if known else 0  # a larger one could not be written with the sample


def _partial(made: Generated) -> dict[str, Any]:
    return {"completion_tokens": made.completion_tokens, "characters": len(made.text)}


def _excerpt(value: Any) -> str:
    # Reduced first: a lenient decoder lets halves of surrogate pairs and huge numbers through.
    return excerpt(msgspec.json.encode(json_safe(value)), 300)


def _wrong_shape(where: str, value: Any, wanted: str) -> NoReturn:
    raise CodedError("UPSTREAM.BAD_BODY", f"{where} answered 200, but not with {wanted}: {_excerpt(value)}")
