"""A server that answers what the test says, and exchanges with it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from dispatch.posting.request import Item
from dispatch.posting.transports.client import Client
from dispatch.posting.transports.transport import exchange
from protocol import CodedError


class Server:
    """Answers each request with ``reply``, bytes that may be given by the number of the request; None never
    answers. ``close`` ends the connection after each reply. One that is ``done_after_5xx`` is so with a
    connection that has brought a 5xx, and resets it at its next request, as vLLM does."""

    def __init__(self) -> None:
        self.reply: Callable[[int], bytes | None] = lambda _: ok(b"{}")
        self.close: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
        self.done_after_5xx = False
        self.open: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.requests: list[int] = []
        self.heads: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self.open.add(writer)
        done = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                self.requests.append(number)
                self.heads.append(head)
                if done:
                    reset(writer)
                    break
                reply = self.reply(len(self.requests))
                if reply is None:
                    await reader.read()
                    break
                writer.write(reply)
                done = self.done_after_5xx and reply.startswith(b"HTTP/1.1 5")
                if self.close is not None:
                    await self.close(writer)
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close the connection."""
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection with a reset: with SO_LINGER of 0 s that is what closing does."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01" + b"\x00" * 7)
    writer.transport.abort()


def ok(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{more}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def item(url: str, body: bytes = b"{}", **headers: str) -> Item:
    return Item("r", 1, url, body, headers)


async def failure(client: Client, url: str, budget: float = 20.0, body: bytes = b"{}") -> CodedError:
    with pytest.raises(CodedError) as caught:
        await exchange(client, item(url, body), budget)
    return caught.value
