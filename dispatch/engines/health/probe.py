"""Probes: does an engine answer, does it generate, which weights has it.

Three questions, since the answers differ (vllm#39863, sglang#22779): ``/health`` can be 200 while
nothing is generated, and a reply of 200 can hold an aborted generation. Each has a finite timeout in
seconds, and each failure is a CodedError with an ENGINE code and what was seen, in ``data``.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import httpx

from dispatch.engines import dialect
from dispatch.engines.spec import EngineSpec
from protocol import Code, CodedError
from protocol.foreign import excerpt

MOST: Final = 16 << 20
"""Bytes of a reply that are read: a router's list of some thousand engines is a few million."""
_PROMPT = "One, two, three,"
_GREEDY = dialect.Sampling(max_new_tokens=4, temperature=0.0)


def new_client() -> httpx.AsyncClient:
    """A client for probes. No proxy of the environment comes between, and no connection is kept: a
    kept one that the engine has closed meanwhile fails the next probe for no reason of the engine's."""
    return httpx.AsyncClient(
        trust_env=False,
        timeout=10.0,
        limits=httpx.Limits(max_keepalive_connections=0),
        follow_redirects=False,
    )


async def exchange(client: httpx.AsyncClient, method: str, url: str, **more: Any) -> httpx.Response:
    """One request and its reply, of which `MOST` bytes are read: one without an end would take as much memory
    as comes in within its timeout. Raises httpx.HTTPError."""
    async with client.stream(method, url, **more) as reply:
        body = bytearray()
        async for chunk in reply.aiter_bytes():
            body += chunk
            if len(body) > MOST:
                raise httpx.RemoteProtocolError(f"its reply is more than {MOST} bytes", request=reply.request)
    headers = [(name, value) for name, value in reply.headers.items() if name != "content-encoding"]
    return httpx.Response(reply.status_code, headers=headers, content=bytes(body), request=reply.request)


async def health(client: httpx.AsyncClient, url: str, timeout: float) -> None:
    """``GET /health`` answers 200. Raises CodedError ENGINE.UNHEALTHY."""
    await _ask(client, "GET", f"{url}/health", timeout, "ENGINE.UNHEALTHY")


async def accepts(url: str, timeout: float) -> None:
    """Its port takes connections. Raises CodedError ENGINE.UNHEALTHY."""
    parsed = httpx.URL(url)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(parsed.host, parsed.port)
    except (OSError, TimeoutError) as exc:
        text = f"{url} takes no connection: {exc or f'none within {timeout:g} s'}"
        raise CodedError("ENGINE.UNHEALTHY", text, {"url": url}) from exc
    writer.close()


async def progress(client: httpx.AsyncClient, spec: EngineSpec, url: str, timeout: float) -> None:
    """The engine generates. SGLang's ``/health_generate`` is content with any output, also of other
    requests, so a full engine passes it; OpenAI servers have nothing like it, so there a canary
    waits in the queue with everybody. Raises CodedError ENGINE.UNHEALTHY."""
    if spec.api == "sglang":
        await _ask(client, "GET", f"{url}/health_generate", timeout, "ENGINE.UNHEALTHY")
        return
    try:
        await canary(client, spec, url, timeout)
    except CodedError as exc:
        raise CodedError("ENGINE.UNHEALTHY", f"no progress: {exc.detail}", exc.data) from exc


async def canary(client: httpx.AsyncClient, spec: EngineSpec, url: str, timeout: float) -> str:
    """Generate a few tokens, greedily, and return the text: only this shows that an engine can serve.
    A 200 is not enough: the text has to be there, and the end must not be an abort.

    Raises CodedError ENGINE.CANARY_FAILED."""
    body = dialect.request(
        spec.api,
        _PROMPT,
        _GREEDY,
        model=spec.model,
        request_id=f"canary-{secrets.token_hex(4)}",
        stream=False,
    )
    path = dialect.PATHS[spec.api]
    reply = await _ask(client, "POST", url + path, timeout, "ENGINE.CANARY_FAILED", body)
    try:
        made = dialect.read(spec.api, reply.json(), path)
    except ValueError as exc:
        raise _failed("ENGINE.CANARY_FAILED", f"{path} answered 200, but not with JSON", reply) from exc
    except CodedError as exc:
        raise _failed("ENGINE.CANARY_FAILED", exc.detail, reply) from exc
    if not made.text and made.completion_tokens < 1:
        raise _failed("ENGINE.CANARY_FAILED", f"{path} answered 200 with an empty sample", reply)
    return made.text


async def weight_version(client: httpx.AsyncClient, spec: EngineSpec, url: str, timeout: float) -> str | None:
    """The version of the weights, in the engine's own words; None where it says nothing (OpenAI
    servers, older SGLang). Raises CodedError ENGINE.UNHEALTHY when it does not answer."""
    if spec.api != "sglang":
        return None
    reply = await _ask(client, "GET", f"{url}/model_info", timeout, "ENGINE.UNHEALTHY", accept=(200, 404))
    try:
        version = reply.json()["weight_version"]
    except (ValueError, LookupError, TypeError):
        return None
    return None if version is None else str(version)


async def _ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    timeout: float,
    code: str,
    body: dict[str, Any] | None = None,
    accept: tuple[int, ...] = (200,),
) -> httpx.Response:
    try:
        async with asyncio.timeout(timeout):  # httpx's own limits are for each read, not for the whole
            reply = await exchange(client, method, url, json=body, timeout=timeout)
    except (TimeoutError, httpx.TimeoutException) as exc:
        data = {"url": url, "timeout": timeout}
        raise CodedError(code, f"{method} {url} did not answer within {timeout:g} s", data) from exc
    except httpx.HTTPError as exc:
        text = f"{method} {url}: {type(exc).__name__}: {exc}"
        raise CodedError(code, text, {"url": url, "error": type(exc).__name__}) from exc
    if reply.status_code not in accept:
        raise _failed(code, f"{method} {url} answered {reply.status_code}", reply)
    return reply


def _failed(code: str, text: str, reply: httpx.Response) -> CodedError:
    data = {"url": str(reply.url), "status": reply.status_code, "body": excerpt(reply.content, 500)}
    return CodedError(Code(code), text, data)
