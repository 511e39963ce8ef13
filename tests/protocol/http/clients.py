"""The HTTP clients that the tests ask with: what each reads in a reply, whole and as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import httpx
import requests

from protocol import Reading, read
from protocol.carriers.http_stream import read_stream, read_stream_sync

CLIENTS = ("httpx", "httpx async", "aiohttp", "requests")
TIMEOUT = 15.0
# httpx with verify=False: there is no TLS here, and loading the certificates takes longer than a test.

BROKEN = (httpx.HTTPError, aiohttp.ClientError, requests.RequestException)
"""What the clients raise by themselves for a reply that is cut: a failure of the transport, without a
name of ours."""


class Seen(NamedTuple):
    status: int
    reading: Reading
    headers: Mapping[str, str]


async def ask(client: str, url: str, headers: Mapping[str, str] | None = None) -> Seen:
    """Get ``url``, let the client read the whole body, and read its response. Raises what the client does."""
    if client == "httpx async":
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=TIMEOUT) as asked:
            got = await asked.get(url, headers=headers)
            return Seen(got.status_code, read(got), got.headers)
    if client == "aiohttp":
        async with _aiohttp() as session, session.get(url, headers=headers) as answer:
            await answer.read()
            return Seen(answer.status, read(answer), answer.headers)
    return await asyncio.to_thread(_ask, client, url, headers)


def _ask(client: str, url: str, headers: Mapping[str, str] | None) -> Seen:
    with _requests() if client == "requests" else _httpx() as asked:
        got: Any = asked.get(url, headers=headers, timeout=TIMEOUT)
        return Seen(got.status_code, read(got), got.headers)


async def stream(client: str, url: str, headers: Mapping[str, str] | None = None, **how: Any) -> Seen:
    """The same without reading the body first: `read_stream` reads what it needs. Never raises for a body
    that is cut."""
    if client == "httpx async":
        session = httpx.AsyncClient(trust_env=False, verify=False, timeout=TIMEOUT)
        async with session, session.stream("GET", url, headers=headers) as got:
            return Seen(got.status_code, await read_stream(got, **how), got.headers)
    if client == "aiohttp":
        async with _aiohttp() as session, session.get(url, headers=headers) as answer:
            return Seen(answer.status, await read_stream(answer, **how), answer.headers)
    return await asyncio.to_thread(_stream, client, url, headers, how)


def _stream(client: str, url: str, headers: Mapping[str, str] | None, how: dict[str, Any]) -> Seen:
    if client == "requests":
        with (
            _requests() as session,
            session.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer,
        ):
            return Seen(answer.status_code, read_stream_sync(answer, **how), answer.headers)
    with _httpx() as asked, asked.stream("GET", url, headers=headers) as got:
        return Seen(got.status_code, read_stream_sync(got, **how), got.headers)


def _httpx() -> httpx.Client:
    return httpx.Client(trust_env=False, verify=False, timeout=TIMEOUT)


def _requests() -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    return session


def _aiohttp() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))
