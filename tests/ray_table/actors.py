"""The actors of the table: each method does one of the things that a row is about."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any, NoReturn

import aiohttp
import httpx
import ray
from aiohttp import web

from faults import name_of
from protocol import CodedError, coded
from tests.protocol.badly_written import KeywordOnly, TakesNone, TwoRequired, WillNotLoad


@ray.remote(num_cpus=0)
class Inner:
    """What our callee calls."""

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> NoReturn:
        os._exit(1)

    async def forever(self) -> None:
        await asyncio.Event().wait()

    def will_not_load(self) -> NoReturn:
        raise WillNotLoad("what was said in the inner actor")


class Everything:
    """What an async actor can do to its caller."""

    def __init__(self) -> None:
        self.calls = 0
        self.ran: list[str] = []
        self.cancelled: list[str] = []

    async def pid(self) -> int:
        self.calls += 1
        return os.getpid()

    async def counted(self) -> int:
        self.calls += 1
        return self.calls

    @ray.method(concurrency_group="control")
    async def control(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "ran": self.ran, "cancelled": self.cancelled}

    async def ordinary(self) -> NoReturn:
        exc = ValueError("boom")
        exc.extra = 5  # type: ignore[attr-defined]
        exc.add_note("a note")
        raise exc from KeyError("its cause")

    async def await_one_that_dies(self) -> None:
        inner = Inner.remote()
        await inner.die.remote()

    async def get_one_that_hangs(self) -> None:
        inner = Inner.remote()
        ray.get(inner.forever.remote(), timeout=0.1)

    async def await_one_that_will_not_load(self) -> None:
        inner = Inner.remote()
        await inner.will_not_load.remote()

    async def keyword_only(self) -> NoReturn:
        raise KeywordOnly(status=503)

    async def two_required(self) -> NoReturn:
        raise TwoRequired("one", "two")

    async def takes_none(self) -> NoReturn:
        raise TakesNone

    async def will_not_load(self) -> NoReturn:
        raise WillNotLoad("what was said")

    async def httpx_status(self, status: int) -> None:
        request = httpx.Request("POST", "http://10.0.0.1:30000/generate")
        httpx.Response(status, text="the prompt is too long", request=request).raise_for_status()

    async def aiohttp_status(self, status: int) -> None:
        """Real headers: they are what cannot be pickled."""

        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, text="busy", headers={"Retry-After": "2"})

        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        try:
            async with aiohttp.ClientSession() as session:
                await session.post(url, raise_for_status=True)
        finally:
            await runner.cleanup()

    async def bad_leaf(self) -> NoReturn:
        raise ExceptionGroup("two", [ConnectionRefusedError("a good leaf"), KeywordOnly(status=500)])

    async def good_leaves(self) -> NoReturn:
        raise ExceptionGroup("two", [ConnectionRefusedError("a"), CodedError("BACKPRESSURE.OVERLOADED", "b")])

    async def die(self, how: str) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "exit":
            os._exit(1)

    async def sys_exit(self) -> NoReturn:
        sys.exit(3)

    async def interrupted(self) -> NoReturn:
        raise KeyboardInterrupt

    async def block(self) -> None:
        signal.sigwait([signal.SIGUSR1])  # the loop's thread waits, and nothing else runs on it

    async def wait(self, name: str) -> None:
        self.ran.append(name)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise


AsyncActor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Everything)


@ray.remote(num_cpus=0)
class SyncActor:
    def __init__(self) -> None:
        self.ran: list[str] = []

    def pid(self) -> int:
        return os.getpid()

    def sys_exit(self) -> NoReturn:
        sys.exit(3)

    def interrupted(self) -> NoReturn:
        raise KeyboardInterrupt

    def until(self, path: str, name: str) -> str:
        """Runs until ``path`` is there, without ever leaving the interpreter's loop for long."""
        self.ran.append(name)
        while not os.path.exists(path):
            time.sleep(0.02)
        self.ran.append(f"{name} ended")
        return name

    def log(self) -> list[str]:
        return self.ran


class Init:
    """``__init__`` fails in the ways of I8."""

    def __init__(self, how: str) -> None:
        if how == "coded":
            raise CodedError("CONFIG.MISSING", "no file of weights")
        if how == "plain":
            raise ValueError("a plain failure")
        if how == "keyword only":
            raise KeywordOnly(status=503)
        raise ConnectionRefusedError("nobody listens")

    async def ping(self) -> None:
        return None


PlainInit = ray.remote(num_cpus=0)(Init)


@ray.remote(num_cpus=0)
@coded(name=name_of)
class CodedInside:
    """``@coded`` next to the class."""

    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise FileNotFoundError(2, "no such file", "weights.bin")

    async def httpx_status(self, status: int) -> None:
        request = httpx.Request("POST", "http://10.0.0.1:30000/generate")
        httpx.Response(status, text="the prompt is too long", request=request).raise_for_status()

    async def keyword_only(self) -> NoReturn:
        raise KeywordOnly(status=503)

    def sync(self) -> NoReturn:
        raise WillNotLoad("what was said")

    async def coded(self) -> NoReturn:
        raise CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog", {"step": 7})

    async def works(self) -> int:
        return 1


@coded(name=name_of)
@ray.remote(num_cpus=0)
class CodedOutside:
    """``@coded`` over Ray's decorator."""

    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise FileNotFoundError(2, "no such file", "weights.bin")

    async def httpx_status(self, status: int) -> None:
        request = httpx.Request("POST", "http://10.0.0.1:30000/generate")
        httpx.Response(status, text="the prompt is too long", request=request).raise_for_status()

    async def keyword_only(self) -> NoReturn:
        raise KeywordOnly(status=503)

    def sync(self) -> NoReturn:
        raise WillNotLoad("what was said")

    async def coded(self) -> NoReturn:
        raise CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog", {"step": 7})

    async def works(self) -> int:
        return 1


@coded(name=name_of)
@ray.remote(num_cpus=0)
def coded_task() -> None:
    raise KeywordOnly(status=503)


@ray.remote(num_cpus=0)
class Aiohttp:
    """aiohttp's errors through ``@coded`` methods."""

    @coded(name=name_of)
    async def aiohttp_status(self, status: int) -> None:
        await Everything().aiohttp_status(status)
