"""A server that answers each POST after a fixed time, in a process of its own.

It is bare on purpose: HTTP/1.1, kept-alive connections, bodies with a Content-Length, nothing else, so that
it costs little beside the client that is measured. With ``counting`` it counts arrivals by X-Request-Id, and
tells whoever GETs them: how many ids came, and which came more than once, and how often.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_BODY: Final = json.dumps({"text": "x" * 200}).encode()
_REPLY: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_GOOD: Final = _REPLY % (len(_BODY), _BODY)
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_ID: Final = re.compile(rb"\r\nx-request-id: *([^\r]*)\r\n", re.IGNORECASE)


@contextmanager
def serving(service_time: float, *, counting: bool = False) -> Iterator[str]:
    """Start the server; yields the URL to POST to (and GET counts from). ``service_time`` in seconds."""
    command = [sys.executable, "-m", "benchmarks.server", "--service-time", str(service_time)]
    child = subprocess.Popen(
        [*command, *(["--counting"] if counting else [])], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        yield f"http://127.0.0.1:{int(child.stdout.readline())}/generate"
    finally:
        child.kill()
        child.wait()


class _Connection(asyncio.Protocol):
    """One connection: every whole request in what has come is answered ``service_time`` later. ``arrived``
    counts, where it is there."""

    def __init__(self, service_time: float, arrived: Counter[str] | None) -> None:
        self._service_time = service_time
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._come = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._come += data
        while (end := self._come.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._come, 0, end + 2)
            size = end + 4 + (int(found.group(1)) if found else 0)
            if len(self._come) < size:
                return
            head, self._come = self._come[: end + 2], self._come[size:]
            if self._arrived is not None:
                if head.startswith(b"GET"):
                    more = {id: count for id, count in self._arrived.items() if count > 1}
                    counts = json.dumps({"ids": len(self._arrived), "more": more}).encode()
                    self._answer(_REPLY % (len(counts), counts))
                    continue
                named = _ID.search(head)
                self._arrived[named.group(1).decode() if named else ""] += 1
            if self._service_time > 0:
                self._loop.call_later(self._service_time, self._answer, _GOOD)
            else:
                self._answer(_GOOD)

    def _answer(self, reply: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(reply)


async def _serve(service_time: float, counting: bool) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    arrived: Counter[str] | None = Counter() if counting else None
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Connection(service_time, arrived), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--service-time", type=float, default=0.1)
    parser.add_argument("--counting", action="store_true")
    said = parser.parse_args()
    asyncio.run(_serve(said.service_time, said.counting))
