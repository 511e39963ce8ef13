"""Rank classes for tests, each wrong in its own way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray

from dispatch.roles import Rendezvous
from protocol import CodedError
from tests.support.wait import until, until_sync


class Trainer:
    """A rank as trainers are: no coroutines. ``die_in_init``: the rank that ends its process in its
    ``__init__``, while the file ``only_if`` is there; ``raise_in_init`` raises."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        rendezvous: Rendezvous,
        die_in_init: int = -1,
        raise_in_init: int = -1,
        linger: float = 0.0,
        only_if: str = "",
    ) -> None:
        self.rank, self.world_size, self.rendezvous = rank, world_size, rendezvous
        self.steps = 0
        wrong = not only_if or Path(only_if).exists()
        if rank == die_in_init and wrong:
            os._exit(7)
        if rank == raise_in_init and wrong:
            raise CodedError("NODE.DISK_FULL", "no room for the checkpoint")
        time.sleep(linger)

    def where(self) -> tuple[int, int, Rendezvous, int]:
        return self.rank, self.world_size, self.rendezvous, os.getpid()

    def step(self, by: int = 1) -> int:
        self.steps += by
        return self.steps

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def wait_for(self, path: str) -> int:
        """Computes until the file ``path`` is there."""
        until_sync(Path(path).exists)
        return self.rank

    def fail(self, rank: int, how: str, gently: float = 0.0) -> int:
        """Rank ``rank`` fails; the others raise after ``gently`` seconds, as if their sockets had broken."""
        if rank != self.rank:
            if gently:
                time.sleep(gently)
                raise ConnectionResetError("a neighbour is gone")
            return self.rank
        if how == "raise":
            raise ValueError("loss is nan")
        if how == "unpicklable":
            raise Unpicklable("loss is nan", limit=1.0)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[how])
        return self.rank


class Unpicklable(Exception):
    def __init__(self, text: str, *, limit: float) -> None:
        super().__init__(text)
        self.limit = limit


class AsyncTrainer:
    """A rank with coroutines, which runs on its actor's loop."""

    def __init__(self, rank: int, world_size: int, rendezvous: Rendezvous) -> None:
        self.rank, self.rendezvous = rank, rendezvous
        self.cancelled = 0

    async def epoch(self) -> int:
        return self.rendezvous.epoch

    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def raise_if(self, rank: int, waiting: str) -> None:
        """Raises at ``rank`` once the other one waits, of which the file ``waiting`` tells."""
        if rank != self.rank:
            Path(waiting).touch()  # noqa: ASYNC240 - an empty file, which nothing waits for
            await self.wait()
        await until(Path(waiting).exists)
        raise ValueError("loss is nan")

    async def interrupt(self, rank: int) -> None:
        """A KeyboardInterrupt that hits this very call."""
        if rank == self.rank:
            raise KeyboardInterrupt

    async def interrupt_beside(self, rank: int) -> None:
        """A KeyboardInterrupt that hits another task of the loop: the loop ends, the process does not."""

        async def hit() -> None:
            raise KeyboardInterrupt

        if rank == self.rank:
            self.task = asyncio.create_task(hit())
        await asyncio.sleep(60)

    async def seen(self) -> int:
        return self.cancelled


def group_of(name: str) -> list[dict[str, Any]]:
    """The placement groups of the training group ``name`` that Ray has, the removed ones left out."""
    rows: dict[str, dict[str, Any]] = ray.util.placement_group_table()
    return [row for row in rows.values() if row["name"].startswith(f"{name}.") and row["state"] != "REMOVED"]
