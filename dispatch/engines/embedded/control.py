"""The endpoints around generation: health, information, pausing, weights, and the witness.

The answers that surprise are SGLang's own and are copied on purpose: `/health` does not answer while paused
(a health monitor that doesn't know this kills an engine in the middle of a weight update), `/model_info` and
the load endpoints always answer, and the cache can't be flushed while requests hold their slots.
"""

from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from dispatch.engines.embedded.dialects import Refusal, decode
from dispatch.engines.embedded.engine import ENGINE, Engine
from dispatch.engines.embedded.misbehave import FaultSpec
from dispatch.engines.embedded.ngram import EOS, BadModel
from dispatch.engines.embedded.replies import json_response
from dispatch.engines.embedded.scheduler import PauseMode

T = TypeVar("T")


class PauseBody(msgspec.Struct):
    mode: PauseMode = "abort"


class AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class UpdateBody(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


async def health(request: web.Request) -> web.Response:
    """200 with an empty body. Hangs while paused, until generation continues or the client leaves."""
    engine = request.app[ENGINE]
    engine.require_open()
    await engine.scheduler.flowing.wait()
    engine.require_open()
    return web.Response()


async def health_generate(request: web.Request) -> web.Response:
    """One token through the scheduler: no answer while paused or frozen, an answer when merely full."""
    engine = request.app[ENGINE]
    engine.require_open()
    probe = await engine.scheduler.probe()
    if probe.finish is not None and probe.finish["type"] == "abort":
        raise Refusal(503, f"the health check's generation was aborted: {probe.finish['message']}")
    return web.Response()


async def model_info(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    return json_response(
        {
            "model_path": str(engine.model_path),
            "tokenizer_path": "embedded",
            "is_generation": True,
            "weight_version": engine.scheduler.weight_version,
            "vocab_size": len(engine.vocabulary),
            "eos_token_id": EOS,
            "max_input_tokens": engine.settings.max_input_tokens,
        }
    )


async def models(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    card = {"id": str(engine.model_path), "object": "model", "created": 0, "owned_by": "failsoft"}
    return json_response({"object": "list", "data": [card]})


async def loads(request: web.Request) -> web.Response:
    """How full the engine is. `num_tokens_total` counts the tokens generated since the start."""
    engine = request.app[ENGINE]
    scheduler = engine.scheduler
    return json_response(
        {
            "num_running": scheduler.running,
            "num_waiting": scheduler.waiting,
            "num_tokens_total": scheduler.tokens_total,
            "max_running": scheduler.max_running,
            "max_queue": scheduler.max_queue,
            "paused": scheduler.paused,
            "updating": scheduler.swapping,
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """How full it is and how far it has come, as Prometheus text."""
    scheduler = request.app[ENGINE].scheduler
    lines = (
        "# TYPE failsoft:generation_tokens counter",
        f"failsoft:generation_tokens_total {scheduler.tokens_total}",
        "# TYPE failsoft:num_requests_running gauge",
        f"failsoft:num_requests_running {scheduler.running}",
        "# TYPE failsoft:num_requests_waiting gauge",
        f"failsoft:num_requests_waiting {scheduler.waiting}",
    )
    return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


async def counts(request: web.Request) -> web.Response:
    return json_response(request.app[ENGINE].witness.as_json())


async def litter(request: web.Request) -> web.Response:
    """What `--litter` has made, also while the engine is starting; null without the flag."""
    made = request.app[ENGINE].litter
    return json_response(None if made is None else msgspec.to_builtins(made))


async def abort_request(request: web.Request) -> web.Response:
    """200 also when nothing matched: the request may have ended a moment ago, and that is no error."""
    scheduler = request.app[ENGINE].scheduler
    body = await _read(request, AbortBody)
    if body.abort_all:
        return json_response({"aborted": scheduler.abort_all("aborted by abort_all")})
    if not body.rid:
        raise Refusal(400, "rid or abort_all must be given")
    return json_response({"aborted": scheduler.abort_named(body.rid, "aborted by its id")})


async def pause_generation(request: web.Request) -> web.Response:
    body = await _read(request, PauseBody)
    request.app[ENGINE].scheduler.pause(body.mode)
    return json_response({"message": f"paused ({body.mode})", "status": "ok"})


async def continue_generation(request: web.Request) -> web.Response:
    request.app[ENGINE].scheduler.resume()
    return json_response({"message": "continued", "status": "ok"})


async def flush_cache(request: web.Request) -> web.Response:
    """There is no cache to flush; what is kept is the precondition that callers have to get right."""
    _require_flushable(request.app[ENGINE])
    return json_response({"message": "cache flushed", "status": "ok"})


async def update_weights_from_disk(request: web.Request) -> web.Response:
    """Train on the text at `model_path` and swap it in, between requests unless paused.

    With `flush_cache` (the default, as in SGLang) an engine paused in place with work in flight answers 400
    and keeps its weights: pass `flush_cache: false` to go on with those requests under the new ones.
    """
    engine = request.app[ENGINE]
    engine.require_open()
    body = await _read(request, UpdateBody)
    try:
        if body.flush_cache and engine.scheduler.paused is not None:
            _require_flushable(engine)
        model = await engine.train(Path(body.model_path))
    except (BadModel, Refusal) as error:
        message = error.message if isinstance(error, Refusal) else str(error)
        return json_response({"success": False, "message": message}, 400)
    await engine.scheduler.swap(model, body.weight_version)
    engine.model_path = Path(body.model_path)
    return json_response({"success": True, "message": "weights updated", "num_paused_requests": 0})


async def arm_fault(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    spec = await _read(request, FaultSpec)
    if spec.kind == "freeze":
        engine.scheduler.freeze(True)
    else:
        engine.faults.armed.append(spec)
    return json_response({"armed": engine.faults.armed})


async def armed_faults(request: web.Request) -> web.Response:
    return json_response({"armed": request.app[ENGINE].faults.armed})


async def clear_faults(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    engine.faults.clear()
    engine.scheduler.freeze(False)
    return json_response({"armed": []})


def add_routes(app: web.Application, *, faults: bool) -> None:
    """Mount every endpoint of this module; the fault hooks only where they were asked for."""
    for path, handler in (
        ("/health", health),
        ("/health_generate", health_generate),
        ("/model_info", model_info),
        ("/get_model_info", model_info),
        ("/v1/models", models),
        ("/v1/loads", loads),
        ("/get_load", loads),
        ("/metrics", metrics),
        ("/counts", counts),
        ("/litter", litter),
        ("/flush_cache", flush_cache),
    ):
        app.router.add_get(path, handler)
    for path, handler in (
        ("/flush_cache", flush_cache),
        ("/abort_request", abort_request),
        ("/pause_generation", pause_generation),
        ("/continue_generation", continue_generation),
        ("/update_weights_from_disk", update_weights_from_disk),
    ):
        app.router.add_post(path, handler)
    if faults:
        app.router.add_post("/faults", arm_fault)
        app.router.add_get("/faults", armed_faults)
        app.router.add_delete("/faults", clear_faults)


def _require_flushable(engine: Engine) -> None:
    running = engine.scheduler.running
    if running:
        raise Refusal(400, f"the cache can't be flushed: {running} requests are in flight")


async def _read(request: web.Request, shape: type[T]) -> T:
    """A control endpoint's body; an empty one means all defaults, as curl without data sends it."""
    return decode(await request.read() or b"{}", shape)
