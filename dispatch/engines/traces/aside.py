"""Aside: a call that may hang for ever, made where that keeps nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], timeout: float) -> T:
    """The result of ``call``, made in a thread of its own. Raises TimeoutError after ``timeout`` seconds.

    Not in the loop's executor: asyncio and the interpreter wait for its threads when they end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type] # no error: then it is call's result

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="failsoft-aside").start()
    async with asyncio.timeout(timeout):
        return await done
