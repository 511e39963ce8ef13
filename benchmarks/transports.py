"""``python -m benchmarks.transports``: what one POST costs over each HTTP transport, by connections.

The whole of `transport.exchange` is measured, in one process, against a bare server; the
CPU time is the client process's, all of its threads. Interleaved rounds, medians; only ratios carry over to
another machine. A cell that does not finish within its bound is not tried again, and shows what it would have
needed at least: "> x" is the CPU time spent until then, divided by all the POSTs that it should have made.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.server import serving
from dispatch.posting.request import Item, encode
from dispatch.posting.transports.aiohttp_transport import KEEPALIVE, AiohttpTransport, trusted
from dispatch.posting.transports.client import Client, Transport, make_client
from dispatch.posting.transports.transport import exchange

CONNECTIONS: Final = (1, 64, 512, 4096)
ROUNDS: Final = 3
BOUND: Final = 8.0
"""Seconds that one measurement of a cell may take."""
BODY: Final = encode({"text": "prompt " * 40, "sampling_params": {"max_new_tokens": 64}})


def _package(connections: int) -> httpx.AsyncBaseTransport:
    import httpx_aiohttp

    limits = httpx.Limits(max_connections=0, keepalive_expiry=KEEPALIVE)
    return httpx_aiohttp.AiohttpTransport(verify=trusted(), trust_env=False, limits=limits)


class _AsyncClient:
    """httpx's own client, as `exchange` used it before it spoke to the transport itself."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None, connections: int) -> None:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=connections, keepalive_expiry=KEEPALIVE
        )
        self._client = httpx.AsyncClient(transport=transport, limits=limits, trust_env=False, timeout=120.0)

    async def post(self, item: Item) -> Any:
        headers = {"content-type": "application/json", "x-request-id": item.id}
        async with self._client.stream("POST", item.url, content=item.body, headers=headers) as response:
            await response.aread()
            return response.json()

    async def aclose(self) -> None:
        await self._client.aclose()


class _Exchanges:
    def __init__(self, transport: Transport, connections: int) -> None:
        self._client: Client = make_client(connections, transport)

    async def post(self, item: Item) -> Any:
        return await exchange(self._client, item, 120.0)

    async def aclose(self) -> None:
        await self._client.aclose()


ROWS: Final[dict[str, Callable[[int], Any]]] = {
    "httpx.AsyncClient, stock": lambda n: _AsyncClient(None, n),
    "httpx.AsyncClient, over ours": lambda n: _AsyncClient(AiohttpTransport(), n),
    'exchange, "httpx"': lambda n: _Exchanges("httpx", n),
    "exchange, httpx-aiohttp": lambda n: _Exchanges(_package, n),
    'exchange, "aiohttp" (the default)': lambda n: _Exchanges("aiohttp", n),
    'exchange, "reqwest"': lambda n: _Exchanges("reqwest", n),
}


class Cell(NamedTuple):
    """CPU µs a POST and POST/s; ``whole`` is false where the bound came first."""

    cpu: float
    rate: float
    whole: bool


async def measure(make: Callable[[int], Any], url: str, connections: int) -> Cell:
    """``connections`` workers, each sending one POST after another. A first round, which opens the
    connections, does not count, unless it takes all the time there is."""
    client = make(connections)
    try:
        opened = await _run(client, url, connections, connections)
        return await _run(client, url, connections, max(3 * connections, 1000)) if opened.whole else opened
    finally:
        await client.aclose()


async def _run(client: Any, url: str, connections: int, most: int) -> Cell:
    begun = 0

    async def work(number: int) -> None:
        nonlocal begun
        while begun < most:
            begun += 1
            await client.post(Item(f"r{number}", number, url, BODY, {}))

    wall, cpu = time.perf_counter(), time.process_time()
    workers = [asyncio.create_task(work(number)) for number in range(connections)]
    _, left = await asyncio.wait(workers, timeout=BOUND)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    for worker in left:
        worker.cancel()
    for outcome in await asyncio.gather(*workers, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    return Cell(cpu / most * 1e6, most / wall, not left)


def _text(cells: list[Cell], column: str) -> str:
    if not cells[-1].whole:
        return f"> {cells[-1].cpu:.0f}" if column == "cpu" else f"< {cells[-1].rate:.0f}"
    return f"{statistics.median(getattr(cell, column) for cell in cells):.0f}"


def check_files(connections: int) -> None:
    """Raise the limit of open files as far as it goes; exit where that is not enough."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < connections + 200:
        sys.exit(
            f"{connections} connections need {connections + 200} open files; the limit is {most}: ulimit -Hn"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, nargs="*", default=CONNECTIONS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    check_files(max(options.connections))
    cells: dict[tuple[str, int], list[Cell]] = {}
    with serving(0.0) as url:
        for connections in options.connections:
            for _ in range(options.rounds):
                for name, make in ROWS.items():
                    cell = cells.setdefault((name, connections), [])
                    if all(one.whole for one in cell):
                        cell.append(asyncio.run(measure(make, url, connections)))
    table = Table(title=f"CPU µs a POST, and POST/s; medians of {options.rounds} interleaved rounds")
    table.add_column("connections")
    for connections in options.connections:
        table.add_column(f"{connections}\nµs", justify="right")
        table.add_column("\nPOST/s", justify="right")
    for name in ROWS:
        row = []
        for connections in options.connections:
            row += [_text(cells[name, connections], column) for column in ("cpu", "rate")]
        table.add_row(name, *row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
