"""Badly behaved exceptions and actors, in a module of their own so that Ray's workers import them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

import aiohttp
import httpx
import ray
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from faults import name_of
from protocol import CodedError, coded, mint


class TwoRequired(Exception):
    """An exception with two required arguments (ray#28436)."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(f"rank {rank} failed at step {step}")
        self.rank, self.step = rank, step


class NoneTaken(Exception):
    """Its ``__init__`` takes nothing, and its ``args`` are not empty (ray#31806)."""

    def __init__(self) -> None:
        super().__init__("written by itself")


class FailsOnLoad(Exception):
    """It pickles, and will not load (ray#55171, ray#55878)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_explode, (str(self),))


def _explode(text: str) -> NoReturn:
    raise RuntimeError("this exception does not load")


def http_status_error(status: int) -> httpx.HTTPStatusError:
    """What ``raise_for_status`` raises: keyword-only arguments."""
    request = httpx.Request("POST", "http://10.0.0.1:30000/generate")
    response = httpx.Response(status, request=request, text="the prompt is too long")
    try:
        response.raise_for_status()
    except httpx.HTTPStatusError as exc:
        return exc
    raise AssertionError(f"{status} is no failure")


def aiohttp_error(status: int) -> aiohttp.ClientResponseError:
    """aiohttp's, with real headers, which do not pickle."""
    headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict({"Retry-After": "3"}))
    info = aiohttp.RequestInfo(URL("http://10.0.0.1/x"), "POST", headers, URL("http://10.0.0.1/x"))
    return aiohttp.ClientResponseError(info, (), status=status, message="said the server", headers=headers)


def make(name: str) -> Exception:
    """The exception called ``name``; made where it is raised."""
    makers: dict[str, Any] = {
        "ordinary": lambda: KeyError("reward"),
        "two_required": lambda: TwoRequired(3, 17),
        "none_taken": NoneTaken,
        "fails_on_load": lambda: FailsOnLoad("the disk is gone"),
        "http_400": lambda: http_status_error(400),
        "http_503": lambda: http_status_error(503),
        "aiohttp_400": lambda: aiohttp_error(400),
        "aiohttp_503": lambda: aiohttp_error(503),
        "group": lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        "bad_leaf": lambda: ExceptionGroup("two", [ValueError("a"), http_status_error(400)]),
        "coded": lambda: CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog", {"rank": 3}),
    }
    made: Exception = makers[name]()
    return made


@ray.remote(num_cpus=0, concurrency_groups={"control": 4})
class Plain:
    """An async actor as people write them."""

    def __init__(self, fail: str = "") -> None:
        if fail:
            raise make(fail)
        self.calls = 0

    async def where(self) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def count(self) -> int:
        self.calls += 1
        return self.calls

    async def fail(self, name: str) -> None:
        raise make(name)

    async def fail_with_cause(self) -> None:
        error = ValueError("outer")
        error.add_note("a note")
        error.attribute = 5  # type: ignore[attr-defined]
        raise error from KeyError("inner")

    async def get_page(self, url: str) -> None:
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            reply.raise_for_status()

    async def through(self, inner: Any, method: str, *args: Any) -> Any:
        """One hop further."""
        return await getattr(inner, method).remote(*args)

    async def get_with_timeout(self, inner: Any) -> Any:
        return ray.get(inner.sleep.remote(30.0), timeout=0.2)

    async def exit(self, how: str) -> None:
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            ctypes.string_at(0)
        elif how == "os_exit":
            os._exit(3)
        elif how == "sys_exit":
            sys.exit(3)
        elif how == "keyboard_interrupt":
            raise KeyboardInterrupt

    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    async def mark(self, path: str, seconds: float) -> None:
        """Say in a file how far this got."""
        with open(path, "a") as file:  # noqa: ASYNC230 - one line, in a test
            file.write("began\n")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            with open(path, "a") as file:  # noqa: ASYNC230 - one line, in a test
                file.write("cancelled\n")
            raise
        with open(path, "a") as file:  # noqa: ASYNC230 - one line, in a test
            file.write("ended\n")

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - a loop that is blocked is the case under test

    @ray.method(concurrency_group="control")
    async def ping(self) -> str:
        return "pong"


@ray.remote(num_cpus=0)
class Sync:
    """An actor without a loop."""

    def pid(self) -> int:
        return os.getpid()

    def exit(self, how: str) -> None:
        if how == "sys_exit":
            sys.exit(3)
        raise KeyboardInterrupt

    def mark(self, path: str, seconds: float) -> None:
        time.sleep(seconds)
        with open(path, "a") as file:
            file.write("ran\n")


@ray.remote(num_cpus=0)
@coded(name=name_of)
class Coded:
    """The same, with names."""

    def __init__(self, fail: str = "") -> None:
        if fail:
            raise make(fail)

    async def fail(self, name: str) -> None:
        raise make(name)

    async def through(self, inner: Any, method: str, *args: Any) -> Any:
        return await getattr(inner, method).remote(*args)

    async def fail_in_child(self) -> None:
        """A watchdog aborts inside the engine's process; all that comes back is a text around its own
        (vLLM's: "Call to collective_rpc method failed")."""
        told = mint("WEIGHTS.REFIT_ABORTED")
        child = subprocess.run(  # noqa: ASYNC221 - a child that ends at once
            [sys.executable, "-c", f"raise SystemExit('{told} the watchdog aborted the refit')"],
            capture_output=True,
            text=True,
            check=False,
        )
        raise Exception(
            f"Call to collective_rpc method failed: Worker failed with error '{child.stderr.strip()}'"
        )
