"""Router: what a fleet needs of whatever spreads requests over its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

import httpx

from protocol import CodedError


class Router(Protocol):
    """A list of engines that others send work to. Every call may be made again: what is there is not
    added twice, what is gone is not missed. Each has a deadline of its own and raises CodedError when
    it could not be done by then."""

    async def add(self, url: str) -> None:
        """From its return on, the router sends work to ``url``."""
        ...

    async def remove(self, url: str) -> None:
        """From its return on, the router sends no new work to ``url``. What it is doing there goes on."""
        ...

    async def urls(self) -> tuple[str, ...]:
        """The engines that the router has now, whoever added them, without a slash at their ends."""
        ...

    async def reconcile(self, wanted: Iterable[str]) -> None:
        """Make the list right: add what is missing of ``wanted``, and remove what this object has added
        before and is not wanted any more. Others' engines stay. For a router that was restarted and has
        forgotten everything, and for calls that failed halfway."""
        ...

    async def close(self) -> None:
        """Let go of connections. The list stays as it is."""
        ...


def tidy(url: str) -> str:
    """``url`` as it is compared: no slash at its end. Raises CodedError CONFIG.INVALID for what is no
    address of a server, and for one with a password in it, which a router's list would show to all."""
    tidied = url.strip().rstrip("/")
    try:
        parsed = httpx.URL(tidied)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    extra = parsed.query or parsed.fragment or parsed.userinfo
    if parsed.scheme not in ("http", "https") or not parsed.host or extra:
        raise CodedError("CONFIG.INVALID", f"router: {shown(url)!r} is no URL such as http://10.0.0.7:30000")
    return tidied


def shown(url: str) -> str:
    """``url`` for a message: without what may be a name and a password before its host."""
    scheme, slashes, rest = url.rpartition("//")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"[:200]


async def all_of(doings: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all at once. One that fails keeps none of the others from being done; the first failure is
    raised at the end, the number of the others in its ``data``."""
    results = await asyncio.gather(*doings, return_exceptions=True)
    failures = [result for result in results if result is not None]
    if failures:
        first = failures[0]
        if isinstance(first, CodedError):
            first.data["further_failures"] = len(failures) - 1
        raise first
