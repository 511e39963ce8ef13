"""reach: is there an engine at a URL, and which dialect does it speak? Asked once, before a run.

A generation of one token is the only honest answer: a wrong port, a web page, a proxy's login form
and an engine of the other dialect all answer something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from dispatch.engines.dialect import PATHS, Api, Sampling, read, request
from dispatch.posting.request import Item, check_headers, check_url, encode
from dispatch.posting.transports.client import Client, make_client
from dispatch.posting.transports.transport import exchange
from protocol import CodedError

_NAMES: Final[dict[Api, str]] = {"sglang": "an SGLang server", "openai": "an OpenAI-compatible one"}
ONE_TOKEN: Final = Sampling(max_new_tokens=1, temperature=0.0)


class Reached(msgspec.Struct, frozen=True):
    """An engine that generated: its base URL without a slash at the end, its dialect, its model's
    name (openai only) and its weight version where it tells one."""

    url: str
    api: Api
    model: str
    weight_version: str | None


async def reach(
    url: str,
    *,
    api: Literal["auto", "sglang", "openai"] = "auto",
    model: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> Reached:
    """Find the engine at ``url`` within ``timeout`` seconds a question. Raises CodedError
    CONFIG.INVALID: one line that names the URL, what was found there, and the remedy."""
    base = _base(url)
    sent = check_headers(headers)
    dialects: tuple[Api, ...] = ("sglang", "openai") if api == "auto" else (api,)
    tried: list[CodedError] = []
    name = ""
    client = make_client(1)
    try:
        for dialect in dialects:
            try:
                name = model or await _model(client, base, sent, timeout) if dialect == "openai" else ""
                body = request(dialect, "1 + 1 =", ONE_TOKEN, model=name, request_id="reach", stream=False)
                item = Item("reach", 0, base + PATHS[dialect], encode(body), sent)
                answer = await exchange(client, item, timeout)
                made = read(dialect, answer.data, item.url)
                return Reached(base, dialect, name, made.weight_version)
            except CodedError as error:
                tried.append(error)
                if error.code not in ("REQUEST.NOT_FOUND", "UPSTREAM.BAD_BODY", "REQUEST.REJECTED"):
                    break
    finally:
        await client.aclose()
    raise CodedError(
        "CONFIG.INVALID",
        _line(base, dialects, name, tried),
        {"url": base, "codes": [str(e.code) for e in tried]},
    )


def _base(url: str) -> str:
    try:
        parts = urlsplit(check_url(url.strip()))
    except CodedError as error:
        raise CodedError(
            "CONFIG.INVALID", f"engine {error.detail}; for instance http://127.0.0.1:30000"
        ) from error
    if parts.query or parts.fragment:
        raise CodedError("CONFIG.INVALID", f"engine URL {url!r}: give the base URL, without ? and #")
    base = url.strip().rstrip("/")
    if not base.isprintable() or " " in base:
        raise CodedError("CONFIG.INVALID", f"engine URL {url!r}: no spaces or line breaks, please")
    for path in (*PATHS.values(), "/v1"):
        base = base.removesuffix(path)
    return base


async def _model(client: Client, base: str, headers: dict[str, str], timeout: float) -> str:
    """The first model that an OpenAI-compatible server lists; empty where it lists none."""
    try:
        reply = await client.get(f"{base}/v1/models", headers=headers, timeout=timeout)
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return ""  # the generation that follows says what is wrong, and says it better


def _line(base: str, dialects: tuple[Api, ...], model: str, tried: list[CodedError]) -> str:
    first, last = tried[0], tried[-1]
    codes = {str(error.code) for error in tried}
    if last.code == "TRANSPORT.CONNECT":
        return f"engine {base}: nothing listens there ({_short(last)}); is it running, and is the port right?"
    if last.code.family in ("TIMEOUT", "TRANSPORT"):
        return f"engine {base}: no whole answer ({last.code}: {_short(last)}); is it healthy, and an engine?"
    if codes <= {"REQUEST.NOT_FOUND"}:
        paths = " and ".join(PATHS[dialect] for dialect in dialects)
        what = " or ".join(_NAMES[dialect] for dialect in dialects)
        if model:  # vLLM answers 404 for a model that it does not serve
            what += f", or without the model {model!r} (--model): {_short(last)}"
        return f"engine {base}: 404 for {paths}: not {what}"
    if last.code == "REQUEST.UNAUTHORIZED":
        return (
            f"engine {base}: {last.data.get('status')} unauthorized; pass --header 'Authorization: Bearer …'"
        )
    if "UPSTREAM.BAD_BODY" in codes:
        bad = next(e for e in tried if e.code == "UPSTREAM.BAD_BODY")
        return f"engine {base}: answers, but not as an inference engine: {_short(bad)}"
    worst = first if last.code == "REQUEST.NOT_FOUND" else last
    return f"engine {base}: refused a generation of one token ({worst.code}: {_short(worst)})"


def _short(error: CodedError) -> str:
    return " ".join(error.detail.split())[:200]
