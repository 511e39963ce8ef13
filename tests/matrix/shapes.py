"""The rows: exceptions as real programs raise them, and the code that each must read back as."""

from __future__ import annotations

import errno
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httpx
from aiohttp import ClientResponseError, RequestInfo
from multidict import CIMultiDict, CIMultiDictProxy
from ray.exceptions import RayTaskError
from yarl import URL

from faults import name_of
from protocol import CodedError, Trust, coded, mint
from tests.protocol.badly_written import (
    KeywordOnly,
    RequiredArguments,
    StrRaises,
    TakesNone,
    TwoRequired,
    WillNotLoad,
)


class Shape(NamedTuple):
    """How an exception is made, the code it must read back as, and the most that may be believed."""

    make: Callable[[], BaseException]
    code: str
    trust: Trust = Trust.STRUCTURED


def _not_importable_elsewhere() -> BaseException:
    """A subclass whose module only this process has, as with code that only the workers' image holds."""
    name = f"only_in_process_{os.getpid()}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        source = (
            "from protocol import CodedError\n"
            "class Mine(CodedError):\n"
            "    def __init__(self, rank):\n"
            "        super().__init__('WEIGHTS.REFIT_ABORTED', f'rank {rank}', {'rank': rank})\n"
        )
        exec(compile(source, name, "exec"), vars(module))
        sys.modules[name] = module
    made: BaseException = sys.modules[name].Mine(3)
    return made


def _of_a_class_inside_a_function() -> BaseException:
    class Mine(CodedError):
        pass

    return Mine("WEIGHTS.REFIT_ABORTED", "rank 3")


def _through_ray(cause: BaseException) -> BaseException:
    """What `ray.get` raises in the middle of a chain of calls."""
    made: BaseException = RayTaskError("task", "Traceback: far away", cause).as_instanceof_cause()
    return made


def _locked() -> BaseException:
    exc = RuntimeError("an attribute that cannot be pickled")
    exc.lock = threading.Lock()  # type: ignore[attr-defined]
    return exc


def _httpx(status: int) -> BaseException:
    request = httpx.Request("POST", "http://engine:30000/generate")
    response = httpx.Response(status, json={"error": {"message": "too long"}}, request=request)
    return httpx.HTTPStatusError(f"status {status}", request=request, response=response)


def _aiohttp(status: int) -> BaseException:
    headers = CIMultiDictProxy(CIMultiDict({"Retry-After": "1"}))
    request = RequestInfo(URL("http://engine:30000/generate"), "POST", headers, URL("http://engine:30000"))
    return ClientResponseError(request, (), status=status, message="no", headers=headers)


def _raised_from() -> BaseException:
    exc = RuntimeError("the update failed")
    exc.__cause__ = CodedError("WEIGHTS.REFIT_ABORTED", "watchdog")
    return exc


def _with_notes() -> BaseException:
    exc = CodedError("ENGINE.EXITED", "signal 9", {"signal": 9})
    exc.add_note("rank 3 of 8")
    return exc


def _group() -> BaseException:
    # Named by the leaf that allows the least: whatever the other one is, nobody knows that it may be retried.
    return ExceptionGroup("two engines", [CodedError("ENGINE.EXITED", "engine/1"), KeywordOnly(status=5)])


SHAPES: Final[dict[str, Shape]] = {
    "CodedError": Shape(lambda: CodedError("ENGINE.EXITED", "signal 9", {"signal": 9}), "ENGINE.EXITED"),
    "subclass with its own `__init__`": Shape(lambda: RequiredArguments("sglang", 3), "ENGINE.PORT_TAKEN"),
    "subclass the reader cannot import": Shape(_not_importable_elsewhere, "WEIGHTS.REFIT_ABORTED"),
    "subclass inside a function": Shape(_of_a_class_inside_a_function, "WEIGHTS.REFIT_ABORTED"),
    "CodedError with notes": Shape(_with_notes, "ENGINE.EXITED"),
    "raised `from` a CodedError": Shape(_raised_from, "WEIGHTS.REFIT_ABORTED"),
    "RayTaskError of a CodedError": Shape(
        lambda: _through_ray(CodedError("ENGINE.EXITED", "signal 9", {"signal": 9})), "ENGINE.EXITED"
    ),
    "RayTaskError of a ValueError": Shape(lambda: _through_ray(ValueError("bad")), "TASK.FAILED"),
    "group with a bad leaf": Shape(_group, "TASK.FAILED"),
    "ValueError": Shape(lambda: ValueError("bad"), "TASK.FAILED"),
    "keyword-only `__init__`": Shape(lambda: KeywordOnly(status=503), "TASK.FAILED"),
    "two required arguments": Shape(lambda: TwoRequired("a", "b"), "TASK.FAILED"),
    "`args` that do not fit": Shape(TakesNone, "TASK.FAILED"),
    "pickles, will not load": Shape(WillNotLoad, "TASK.FAILED"),
    "a lock among its attributes": Shape(_locked, "TASK.FAILED"),
    "httpx.HTTPStatusError 400": Shape(lambda: _httpx(400), "REQUEST.REJECTED"),
    "aiohttp.ClientResponseError 503": Shape(lambda: _aiohttp(503), "BACKPRESSURE.OVERLOADED"),
    "OSError ENOSPC": Shape(lambda: OSError(errno.ENOSPC, "No space left"), "NODE.DISK_FULL"),
    "TimeoutError": Shape(lambda: TimeoutError("30 s"), "TIMEOUT.DEADLINE"),
    "message of 20 MB": Shape(lambda: ValueError("x" * 20_000_000), "TASK.FAILED"),
    "`__str__` raises": Shape(StrRaises, "TASK.FAILED"),
    "a token in its text": Shape(
        lambda: RuntimeError(f"Worker failed with error '{mint('WEIGHTS.REFIT_ABORTED', key=b'')}'"),
        "WEIGHTS.REFIT_ABORTED",
        Trust.CHECKSUMMED,
    ),
}


@coded(name=name_of)
def fail(shape: str) -> Any:
    """Raise that shape, as a function at the raising side does: named by `coded`."""
    raise SHAPES[shape].make()


def failure(shape: str) -> CodedError:
    """What `fail` raises, caught."""
    try:
        fail(shape)
    except CodedError as error:
        return error
    raise AssertionError(f"{shape} is no failure")
