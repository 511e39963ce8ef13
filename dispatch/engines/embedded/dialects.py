"""The two JSON shapes the engine speaks: SGLang's `/generate` and OpenAI's `/v1/completions`.

A dialect reads a body into an Order and renders a Generation back; nothing else in the package knows a field
name of either. Fields the engine has no use for (`return_logprob`, `top_k`, …) are ignored, as SGLang does
with most of them; a field it knows with a wrong type is a 400. The shapes follow SGLang 0.5 and the OpenAI
completions reference.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from dispatch.engines.embedded.generation import Generation, Sampling

MAX_NEW_TOKENS = 1 << 20
"""A longer output is a mistake in the request and not a wish."""

T = TypeVar("T")


class Refusal(Exception):
    """A request that gets no generation: a 4xx that describes it, or a 503 that describes the engine."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Order:
    """What a request asks for, whichever dialect it was written in."""

    prompt: str | list[int]
    sampling: Sampling
    stream: bool
    rid: str | None = None
    model: str = ""
    started: int = field(default_factory=lambda: int(time.time()))


class Dialect(Protocol):
    def read(self, raw: bytes) -> Order:
        """Raises Refusal(400) with what is wrong, in words a person can act on."""
        ...

    def whole(self, request_id: str, order: Order, generation: Generation) -> dict[str, Any]: ...

    def event(self, request_id: str, order: Order, generation: Generation, sent: int) -> dict[str, Any]:
        """One stream event; `sent` is how many characters the client has already been given."""
        ...

    def error(self, status: int, message: str) -> dict[str, Any]: ...


def decode(raw: bytes, shape: type[T]) -> T:
    """JSON into a typed value, or Refusal(400): the one place where a body's types are checked."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise Refusal(400, f"can't read the request: {error}") from error


class _SglangSampling(msgspec.Struct):
    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: str | list[str] | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    n: int = 1
    ignore_eos: bool = False


class _SglangBody(msgspec.Struct):
    text: str | list[str] | None = None
    input_ids: list[int] | None = None
    sampling_params: _SglangSampling | None = None
    stream: bool = False
    rid: str | None = None


class _OpenAIBody(msgspec.Struct):
    prompt: str | list[Any]
    model: str = "default"
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None


class Sglang:
    """`POST /generate`: cumulative text in streams, `finish_reason` as an object, errors with a message."""

    default_tokens = 128

    def read(self, raw: bytes) -> Order:
        body = decode(raw, _SglangBody)
        wish = body.sampling_params or _SglangSampling()
        if (body.text is None) == (body.input_ids is None):
            raise Refusal(400, "exactly one of text and input_ids must be given")
        if isinstance(body.text, list):
            raise Refusal(400, "text must be one string: this engine takes one prompt a request")
        prompt = body.text if body.text is not None else body.input_ids
        assert prompt is not None
        sampling = _sampling(
            self.default_tokens if wish.max_new_tokens is None else wish.max_new_tokens,
            wish.temperature,
            wish.top_p,
            wish.stop,
            wish.sampling_seed if wish.seed is None else wish.seed,
            wish.n,
            ignore_eos=wish.ignore_eos,
        )
        return Order(prompt, sampling, body.stream, rid=body.rid)

    def whole(self, request_id: str, order: Order, generation: Generation) -> dict[str, Any]:
        return self._reply(request_id, generation, generation.text)

    def event(self, request_id: str, order: Order, generation: Generation, sent: int) -> dict[str, Any]:
        return self._reply(request_id, generation, generation.settled_text())

    def error(self, status: int, message: str) -> dict[str, Any]:
        return {"error": {"message": message}}

    def _reply(self, request_id: str, generation: Generation, text: str) -> dict[str, Any]:
        return {
            "text": text,
            "output_ids": generation.output_ids,
            "meta_info": {
                "id": request_id,
                "finish_reason": generation.finish,
                "prompt_tokens": generation.prompt_tokens,
                "completion_tokens": len(generation.output_ids),
                "weight_version": generation.weight_version,
                "e2e_latency": (generation.ended or time.monotonic()) - generation.created,
            },
        }


class OpenAI:
    """`POST /v1/completions`: text deltas in streams, a one-word finish reason, usage, typed errors.

    Any model name is served, as SGLang does (vLLM would answer 404). `metadata.weight_version` is SGLang's
    addition to the shape.
    """

    default_tokens = 16

    def read(self, raw: bytes) -> Order:
        body = decode(raw, _OpenAIBody)
        if isinstance(body.prompt, list):
            raise Refusal(400, "prompt must be one string: this engine takes one prompt a request")
        sampling = _sampling(
            self.default_tokens if body.max_tokens is None else body.max_tokens,
            1.0 if body.temperature is None else body.temperature,
            1.0 if body.top_p is None else body.top_p,
            body.stop,
            body.seed,
            1 if body.n is None else body.n,
        )
        return Order(body.prompt, sampling, bool(body.stream), model=body.model)

    def whole(self, request_id: str, order: Order, generation: Generation) -> dict[str, Any]:
        reply = self._reply(request_id, order, generation, generation.text)
        spent = len(generation.output_ids)
        reply["usage"] = {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": spent,
            "total_tokens": generation.prompt_tokens + spent,
        }
        reply["metadata"] = {"weight_version": generation.weight_version}
        return reply

    def event(self, request_id: str, order: Order, generation: Generation, sent: int) -> dict[str, Any]:
        return self._reply(request_id, order, generation, generation.settled_text()[sent:])

    def error(self, status: int, message: str) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "service_unavailable"
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    def _reply(self, request_id: str, order: Order, generation: Generation, text: str) -> dict[str, Any]:
        finish = generation.finish
        choice = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finish and finish["type"],
            "matched_stop": finish and finish.get("matched"),
        }
        return {
            "id": request_id,
            "object": "text_completion",
            "created": order.started,
            "model": order.model,
            "choices": [choice],
        }


def _sampling(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    stop: str | list[str] | None,
    seed: int | None,
    n: int,
    *,
    ignore_eos: bool = False,
) -> Sampling:
    """The range checks both dialects share."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if n != 1:
        raise Refusal(400, f"n must be 1, not {n}")
    if not 0 <= max_new_tokens <= MAX_NEW_TOKENS:
        raise Refusal(400, f"the number of new tokens must be between 0 and {MAX_NEW_TOKENS}")
    if temperature < 0:
        raise Refusal(400, f"temperature must be at least 0, not {temperature}")
    if not 0 < top_p <= 1:
        raise Refusal(400, f"top_p must be above 0 and at most 1, not {top_p}")
    if not all(stops):
        raise Refusal(400, "a stop string must not be empty")
    return Sampling(max_new_tokens, temperature, top_p, stops, seed, ignore_eos)
