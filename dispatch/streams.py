"""Streams: many pieces of work at once, their results in completion order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def in_completion_order(
    source: Iterable[T] | AsyncIterable[T], work: Callable[[T], Awaitable[R]], ahead: int
) -> AsyncGenerator[R, None]:
    """Run ``work`` on everything that ``source`` gives, at most ``ahead`` at once, and yield each
    result when it is there. The source is drawn as places come free, so it may be endless, and beside
    the results, so it may itself wait for one of them. Leaving the loop cancels what is under way and
    closes the source (with `contextlib.aclosing`, at once)."""
    # A source that never waits is drawn from directly: a task for each item would cost more than all else.
    plain: Iterator[T] | None = None
    items: AsyncGenerator[T, None] | None = None
    if isinstance(source, AsyncIterable):
        items = _items(source)
    else:
        plain = iter(source)
    running: set[asyncio.Task[R]] = set()
    ready: deque[asyncio.Task[R]] = deque()
    drawing: asyncio.Task[tuple[T] | None] | None = None
    exhausted = False
    news = asyncio.Event()

    def finished(task: asyncio.Task[R]) -> None:
        ready.append(task)
        news.set()

    async def do(item: T) -> R:
        return await work(item)

    try:
        while True:
            while not exhausted and len(running) < ahead:
                if plain is not None:
                    drawn = _next(plain)
                else:
                    assert items is not None
                    if drawing is None:
                        drawing = asyncio.create_task(_draw(items))
                        drawing.add_done_callback(lambda _: news.set())
                    if not drawing.done():
                        break
                    drawn, drawing = drawing.result(), None
                if drawn is None:
                    exhausted = True
                    break
                task = asyncio.create_task(do(drawn[0]))
                task.add_done_callback(finished)
                running.add(task)
            if ready:
                task = ready.popleft()
                running.discard(task)
                yield task.result()
            elif exhausted and not running:
                return
            else:
                news.clear()
                await news.wait()
    finally:
        left: set[asyncio.Task[Any]] = running | ({drawing} if drawing is not None else set())
        for one in left:
            one.cancel()
        if left:
            await asyncio.wait(left)
        if items is not None:
            await items.aclose()


async def _items(source: AsyncIterable[T]) -> AsyncGenerator[T, None]:
    try:
        async for item in source:
            yield item
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()


def _next(items: Iterator[T]) -> tuple[T] | None:
    # In a tuple, so that an item that is None is not taken for the end.
    for item in items:
        return (item,)
    return None


async def _draw(items: AsyncGenerator[T, None]) -> tuple[T] | None:
    try:
        return (await anext(items),)
    except StopAsyncIteration:
        return None
