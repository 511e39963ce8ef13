"""The rows: exceptions as people raise them, and what the caller reads of each."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Self

import aiohttp
import httpx
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from protocol import CodedError, Trust
from tests.protocol.badly_written import KeywordOnly, StrRaises, TakesNone, TwoRequired, WillNotLoad

ONLY_THERE: Final = Path(__file__).parent / "only_there"
"""A folder that workers put on their path, and the caller does not."""
ABORTED: Final = "WEIGHTS.REFIT_ABORTED"
ONE: Final = "0NE0CCVR"
"""The occurrence that is followed through every boundary."""
ANOTHER: Final = "AN0THER1"
DATA: Final = {"rank": 3}
SAID: Final = "what was said"
KILLED: Final = "killed"
NO_DUAL: Final = "coded subclass with a __new__ of its own"
"""Ray makes no class of its own and that of the cause's where it cannot call the latter with one argument."""


class Means(NamedTuple):
    """What `classify` makes of it."""

    code: str
    blame: str
    outcome: str
    trust: Trust = Trust.STRUCTURED


class Shape(NamedTuple):
    """How it is raised; what a plain callee's caller reads (code and trust, None for no code) and what
    that means; what it means with `coded`, where what is read is always structured; and what stands in
    the detail and the data then."""

    run: Callable[[], None]
    read: tuple[str, Trust] | None
    means: Means
    coded: Means
    detail: str = "the watchdog"
    data: dict[str, Any] = DATA


class RefitAborted(CodedError):
    """A user's subclass with arguments of its own, as Ray cannot carry them in other exceptions."""

    def __init__(self, rank: int, *, step: int) -> None:
        super().__init__(ABORTED, f"the watchdog of rank {rank} at step {step}", {"rank": rank}, id=ONE)
        self.rank, self.step = rank, step


class WithItsOwnNew(CodedError):
    """One that cannot be made without its arguments."""

    def __new__(cls, rank: int, *, step: int) -> Self:
        return super().__new__(cls, rank, step)

    def __init__(self, rank: int, *, step: int) -> None:
        super().__init__(ABORTED, f"the watchdog at step {step}", {"rank": rank}, id=ONE)


def raise_it(name: str) -> NoReturn:
    """Raise the shape called ``name``, or a CodedError where it is a code; die where it is `KILLED`."""
    if name == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if name not in SHAPES:
        raise CodedError(name, "by code")
    SHAPES[name].run()
    raise AssertionError(f"{name} was not raised")


def aborted(id: str = ONE) -> CodedError:
    return CodedError(ABORTED, "the watchdog", DATA, id=id)


def _raising(make: Callable[[], BaseException]) -> Callable[[], None]:
    def run() -> None:
        raise make()

    return run


def worker_only(name: str) -> Any:
    """The class called ``name`` of the module that the caller cannot import."""
    if str(ONLY_THERE) not in sys.path:
        sys.path.insert(0, str(ONLY_THERE))
    return getattr(importlib.import_module("worker_only"), name)


def _http_status(status: int) -> Exception:
    request = httpx.Request("POST", "http://10.0.0.1:30000/generate")
    response = httpx.Response(status, request=request, text=SAID)
    return httpx.HTTPStatusError(f"status {status}", request=request, response=response)


def _aiohttp_status(status: int) -> BaseException:
    headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict({"Retry-After": "3"}))
    info = aiohttp.RequestInfo(URL("http://10.0.0.1/x"), "POST", headers, URL("http://10.0.0.1/x"))
    return aiohttp.ClientResponseError(info, (), status=status, message=SAID, headers=headers)


def _locked() -> BaseException:
    exc = RuntimeError(SAID)
    exc.lock = threading.Lock()  # type: ignore[attr-defined]
    return exc


def _noted(exc: BaseException) -> BaseException:
    exc.add_note("while loading shard 7")
    return exc


def _foreign_from_coded() -> None:
    raise ValueError(SAID) from aborted()


def _foreign_while_coded() -> None:
    try:
        raise aborted()
    except CodedError:
        raise ValueError(SAID)  # noqa: B904 - what was being handled is what this is about


def _coded_from_foreign() -> None:
    raise aborted() from KeywordOnly(status=503)


_UNREAD: Final = None
_STRUCTURED: Final = (ABORTED, Trust.STRUCTURED)
_IN_TEXT: Final = (ABORTED, Trust.CHECKSUMMED)
_ABORTED: Final = Means(ABORTED, "upstream", "unknown")
_FAILED: Final = Means("TASK.FAILED", "callee", "ran")
_BUSY: Final = Means("BACKPRESSURE.OVERLOADED", "upstream", "not_run")
_DISK: Final = Means("NODE.IO", "node", "unknown")
_REJECTED: Final = Means("REQUEST.REJECTED", "request", "not_run")


def _guessed(means: Means) -> Means:
    return means._replace(trust=Trust.HEURISTIC)


def _by_token(means: Means) -> Means:
    return means._replace(trust=Trust.CHECKSUMMED)


def _coded(run: Callable[[], None]) -> Shape:
    return Shape(run, _STRUCTURED, _ABORTED, _ABORTED)


def _foreign(run: Callable[[], None], means: Means = _FAILED) -> Shape:
    return Shape(run, _UNREAD, means, _FAILED, SAID, {})


SHAPES: Final[dict[str, Shape]] = {
    "coded error": _coded(_raising(aborted)),
    "coded subclass": _coded(_raising(lambda: RefitAborted(3, step=17))),
    "coded subclass the caller lacks": _coded(_raising(lambda: worker_only("WatchdogAborted")(3, step=17))),
    NO_DUAL: _coded(_raising(lambda: WithItsOwnNew(3, step=17))),
    "coded error with notes": _coded(_raising(lambda: _noted(aborted()))),
    "coded error from a foreign one": _coded(_coded_from_foreign),
    # Ray drops causes; in the traceback that it keeps, the token of the cause still stands.
    "foreign from a coded error": Shape(
        _foreign_from_coded, _IN_TEXT, _by_token(_ABORTED), _ABORTED, SAID, {}
    ),
    "foreign while a coded error is handled": _foreign(_foreign_while_coded),
    "ordinary": _foreign(_raising(lambda: ValueError(SAID))),
    "ordinary with notes": _foreign(_raising(lambda: _noted(ValueError(SAID)))),
    # Of these, Ray keeps text only, in which the type and the status can be found.
    "keyword-only arguments": Shape(
        _raising(lambda: _http_status(503)),
        _UNREAD,
        _guessed(_BUSY),
        _BUSY,
        "status 503",
        {"status": 503, "body": SAID},
    ),
    "real headers": Shape(
        _raising(lambda: _aiohttp_status(503)), _UNREAD, _guessed(_BUSY), _BUSY, SAID, {"status": 503}
    ),
    "two required arguments": _foreign(_raising(lambda: TwoRequired(SAID, "more")), _guessed(_FAILED)),
    "takes no arguments": _foreign(_raising(TakesNone), _guessed(_FAILED))._replace(detail="do not fit"),
    "fails on load": _foreign(_raising(lambda: WillNotLoad(SAID)), _guessed(_FAILED)),
    "foreign class the caller lacks": _foreign(
        _raising(lambda: worker_only("DriverLost")(SAID)), _guessed(_FAILED)
    ),
    "holds a lock": _foreign(_raising(_locked), Means("TASK.UNSERIALIZABLE", "callee", "ran")),
    # Ray's own report of it fails in a worker, and is what the caller gets.
    "str raises": _foreign(_raising(StrRaises))._replace(detail="StrRaises whose str() raised RuntimeError"),
    "text of 20 MB": _foreign(_raising(lambda: ValueError("x" * 20_000_000)))._replace(detail="xxx"),
    # A group means what its strictest leaf means.
    "group of coded errors": Shape(
        _raising(lambda: ExceptionGroup("two", [aborted(), CodedError("NODE.IO", SAID, id=ANOTHER)])),
        ("NODE.IO", Trust.STRUCTURED),  # the leaf that allows the least
        _DISK,
        _DISK,
        "two",
        {},
    ),
    "group in a group": Shape(
        _raising(lambda: ExceptionGroup("outer", [ExceptionGroup("inner", [aborted(ANOTHER)]), aborted()])),
        _STRUCTURED,
        _ABORTED,
        _ABORTED,
        "outer",
        {},
    ),
    "group with a bad leaf": Shape(
        _raising(lambda: ExceptionGroup("two", [aborted(), _http_status(400)])),
        _IN_TEXT,
        _by_token(_ABORTED),
        _REJECTED,
        "two",
        {},
    ),
    "group of ordinary ones": _foreign(
        _raising(lambda: ExceptionGroup(SAID, [ValueError("a"), KeyError("b")]))
    ),
}
