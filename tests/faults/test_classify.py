"""classify: what an exception means, whatever its shape, and never an exception of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import socket
import ssl
from typing import Any

import aiohttp
import httpx
import pytest
import ray.exceptions as rex
from aiohttp import ClientResponseError, RequestInfo
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from faults import Action, Blame, Fault, Kind, Outcome, classify, decide, name_of
from faults.classify import MAX_HOPS, MAX_LEAVES
from faults.http_faults import MAX_RETRY_AFTER
from protocol import CodedError, Trust, catalogue, mint
from tests.protocol.badly_written import HOSTILE

KEY = b"the run's key"


def through_ray(exc: Exception, hops: int = 1) -> Exception:
    """``exc`` as Ray's driver would raise it."""
    for _ in range(hops):
        exc = rex.RayTaskError("f", "traceback text", exc).as_instanceof_cause()
    return exc


# -- coded


def test_a_coded_error_is_its_own_code() -> None:
    error = CodedError("BACKPRESSURE.RATE_LIMITED", "full", {"status": 429, "retry_after": 7})
    assert classify(error) == Fault(
        Kind.BACKPRESSURE,
        error.code,
        Blame.UPSTREAM,
        Outcome.NOT_RUN,
        Trust.STRUCTURED,
        retry_after=7.0,
        status=429,
        evidence="full",
        id=error.id,
    )


def test_a_coded_error_through_ray_is_the_same() -> None:
    error = CodedError("BACKPRESSURE.RATE_LIMITED", "full", {"status": 429, "retry_after": 7})
    for hops in (1, 2, 5):
        assert classify(through_ray(error, hops)) == classify(error)


@pytest.mark.parametrize(
    ("given_", "seconds"),
    [
        (5, 5.0),
        (0.5, 0.5),
        (-3, 0.0),
        (1e12, MAX_RETRY_AFTER),
        (True, None),
        ("5", None),
        (None, None),
        ([], None),
    ],
)
def test_what_a_coded_error_says_of_retry_after_is_bounded(given_: object, seconds: float | None) -> None:
    assert (
        classify(CodedError("BACKPRESSURE.OVERLOADED", data={"retry_after": given_})).retry_after == seconds
    )


@pytest.mark.parametrize("status", ["503", True, None, 5.0])
def test_a_status_that_is_none_is_left_out(status: object) -> None:
    assert classify(CodedError("UPSTREAM.SERVER_ERROR", data={"status": status})).status is None


def test_a_code_of_another_release_falls_to_its_family() -> None:
    fault = classify(CodedError("ENGINE.NEVER_SEEN"))
    assert (fault.kind, fault.blame, fault.outcome) == (Kind.DIED, Blame.UPSTREAM, Outcome.UNKNOWN)
    assert decide(fault).action is Action.RECREATE


def test_a_code_below_a_plain_exception_is_found() -> None:
    exc = ValueError("x")
    exc.__cause__ = CodedError("CONFIG.MISSING", "no file")
    assert classify(exc).code == "CONFIG.MISSING"


# -- builtin exceptions; the order of the checks matters

BUILTIN: list[tuple[BaseException, str]] = [
    (asyncio.CancelledError(), "CANCEL.CALLER"),
    (concurrent.futures.CancelledError(), "CANCEL.CALLER"),
    (KeyboardInterrupt(), "CANCEL.CALLER"),
    (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "TRANSPORT.CONNECT"),
    (OSError(errno.EHOSTUNREACH, "x"), "TRANSPORT.CONNECT"),
    (OSError(errno.ENETUNREACH, "x"), "TRANSPORT.CONNECT"),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "TRANSPORT.CONNECT"),
    (socket.herror(1, "x"), "TRANSPORT.CONNECT"),
    (ConnectionResetError(errno.ECONNRESET, "x"), "TRANSPORT.DISCONNECTED"),
    (BrokenPipeError(), "TRANSPORT.DISCONNECTED"),
    (ConnectionAbortedError(), "TRANSPORT.DISCONNECTED"),
    (EOFError(), "TRANSPORT.DISCONNECTED"),
    (asyncio.IncompleteReadError(b"", 5), "TRANSPORT.DISCONNECTED"),
    (ssl.SSLError(1, "wrong version number"), "TRANSPORT.TLS"),
    (ssl.SSLCertVerificationError(1, "certificate verify failed"), "TRANSPORT.TLS"),
    (TimeoutError(), "TIMEOUT.DEADLINE"),
    (concurrent.futures.TimeoutError(), "TIMEOUT.DEADLINE"),
    (TimeoutError(errno.ETIMEDOUT, "x"), "TIMEOUT.DEADLINE"),
    (MemoryError(), "NODE.OUT_OF_MEMORY"),
    (OSError(errno.ENOSPC, "x"), "NODE.DISK_FULL"),
    (OSError(errno.EDQUOT, "x"), "NODE.DISK_FULL"),
    (PermissionError(errno.EACCES, "x"), "NODE.IO"),
    (FileNotFoundError(errno.ENOENT, "x"), "NODE.IO"),
    (OSError("of no number"), "UNKNOWN.EXCEPTION"),
    (ValueError("x"), "UNKNOWN.EXCEPTION"),
    (SystemExit(3), "UNKNOWN.EXCEPTION"),
    (Exception(), "UNKNOWN.EXCEPTION"),
    (rex.GetTimeoutError("x"), "TIMEOUT.RAY_GET"),  # a TimeoutError and so an OSError
    (aiohttp.ServerDisconnectedError(), "TRANSPORT.DISCONNECTED"),
    (aiohttp.ClientOSError(errno.ECONNRESET, "x"), "TRANSPORT.DISCONNECTED"),  # an OSError
    (aiohttp.ServerTimeoutError(), "TIMEOUT.READ"),  # a TimeoutError
    (aiohttp.ConnectionTimeoutError(), "TIMEOUT.CONNECT"),
    (httpx.ReadTimeout("x"), "TIMEOUT.READ"),
    (httpx.PoolTimeout("x"), "TIMEOUT.POOL"),
    (httpx.InvalidURL("x"), "REQUEST.INVALID"),
]


@pytest.mark.parametrize(
    ("exc", "code"), BUILTIN, ids=lambda v: v if isinstance(v, str) else type(v).__name__
)
def test_by_type(exc: BaseException, code: str) -> None:
    fault = classify(exc)
    assert fault.code == code
    assert fault.trust is Trust.STRUCTURED
    assert type(exc).__qualname__ in fault.evidence
    assert fault.outcome == catalogue.entry(code).outcome


def test_a_subclass_of_a_known_class_means_the_same() -> None:
    class Mine(httpx.ConnectTimeout):
        pass

    assert classify(Mine("x")).code == "TIMEOUT.CONNECT"


def test_a_class_of_the_same_name_elsewhere_does_not() -> None:
    class ReadTimeout(Exception):
        pass

    assert classify(ReadTimeout("x")).code == "UNKNOWN.EXCEPTION"


def test_name_of_is_the_code() -> None:
    assert name_of(ConnectionRefusedError()) == "TRANSPORT.CONNECT"


# -- HTTP


def httpx_error(status: int, **headers: str) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://h/")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.HTTPStatusError("said", request=request, response=httpx.Response(status, headers=named))


def aiohttp_error(
    status: int, cls: type[ClientResponseError] = ClientResponseError, **headers: str
) -> Exception:
    made = CIMultiDictProxy(CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}))
    return cls(RequestInfo(URL("http://h/"), "POST", made), (), status=status, message="said", headers=made)


@pytest.mark.parametrize("make", [httpx_error, aiohttp_error])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (302, "UPSTREAM.REDIRECT"),
        (400, "REQUEST.REJECTED"),
        (413, "REQUEST.TOO_LARGE"),
        (429, "BACKPRESSURE.RATE_LIMITED"),
        (500, "UPSTREAM.SERVER_ERROR"),
        (502, "UPSTREAM.BAD_GATEWAY"),
        (503, "BACKPRESSURE.OVERLOADED"),
    ],
)
def test_a_status_is_read(make: Any, status: int, code: str) -> None:
    fault = classify(make(status, retry_after="7"))
    assert (fault.code, fault.status, fault.retry_after, fault.trust) == (code, status, 7.0, Trust.STRUCTURED)


def test_a_status_error_of_no_status_is_the_servers() -> None:
    assert classify(aiohttp_error(0)).code == "UPSTREAM.SERVER_ERROR"


def test_a_reply_of_the_wrong_type_is_a_bad_body_whatever_its_status() -> None:
    assert classify(aiohttp_error(200, aiohttp.ContentTypeError)).code == "UPSTREAM.BAD_BODY"


async def test_a_reply_that_is_no_http_is_not_the_requests_fault() -> None:
    """aiohttp raises a ClientResponseError of status 400 for a reply that it cannot parse."""

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"this is no HTTP\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    url = "http://{}:{}/".format(*server.sockets[0].getsockname())
    async with server, aiohttp.ClientSession() as session:
        with pytest.raises(ClientResponseError) as caught:
            await session.get(url)
    assert caught.value.status == 400
    fault = classify(caught.value)
    assert fault.code == "TRANSPORT.PROTOCOL"
    assert decide(fault).action is Action.RETRY_ELSEWHERE


# -- Ray, without a cluster (tests/ray_table holds the same on a running one)


def test_what_died_inside_our_callee_is_nested() -> None:
    for died in (rex.ActorDiedError(), rex.RayActorError()):
        assert classify(died).code == "ACTOR.DIED"
        fault = classify(through_ray(died))
        assert (fault.code, fault.blame) == ("ACTOR.NESTED_DIED", Blame.NESTED)
        assert decide(fault).action is Action.RETRY_ELSEWHERE


def test_what_cannot_be_reached_from_our_callee_is_nested() -> None:
    unavailable = rex.ActorUnavailableError("x", b"0" * 16)
    assert classify(unavailable).blame is Blame.CALLEE
    fault = classify(through_ray(unavailable))
    assert (fault.code, fault.kind, fault.blame) == ("ACTOR.UNAVAILABLE", Kind.UNAVAILABLE, Blame.NESTED)


@pytest.mark.parametrize("exc", [rex.GetTimeoutError("x"), TimeoutError()])
def test_a_timeout_inside_our_callee_is_nested(exc: Exception) -> None:
    assert classify(through_ray(exc)).code == "TIMEOUT.NESTED"
    assert classify(through_ray(exc)).blame is Blame.NESTED


def test_a_coded_death_inside_our_callee_is_nested() -> None:
    fault = classify(through_ray(CodedError("ACTOR.DIED", "the inner one")))
    assert (fault.code, fault.blame) == ("ACTOR.DIED", Blame.NESTED)
    assert decide(fault).action is Action.RETRY_ELSEWHERE


def test_user_code_that_raised_is_named_so() -> None:
    assert classify(through_ray(ValueError("x"))).code == "TASK.FAILED"
    assert classify(ValueError("x")).code == "UNKNOWN.EXCEPTION"


def test_hops_without_end_end() -> None:
    assert classify(through_ray(ValueError("x"), 2 * MAX_HOPS)).code == "TASK.FAILED"
    loop = through_ray(ValueError("x"))
    loop.cause = loop  # type: ignore[attr-defined]
    assert classify(loop).code == "TASK.FAILED"


# -- groups: the leaf that allows the least


def group(*leaves: BaseException) -> BaseExceptionGroup[BaseException]:
    return BaseExceptionGroup("g", list(leaves))


REFUSED = httpx.ConnectError("refused")  # retry elsewhere, did not run
CUT = httpx.ReadError("cut")  # retry elsewhere, may have run


@pytest.mark.parametrize(
    ("leaves", "code", "outcome"),
    [
        ([REFUSED], "TRANSPORT.CONNECT", Outcome.NOT_RUN),
        ([REFUSED, REFUSED], "TRANSPORT.CONNECT", Outcome.NOT_RUN),
        ([REFUSED, CUT], "TRANSPORT.CONNECT", Outcome.UNKNOWN),
        ([CUT, httpx_error(503)], "BACKPRESSURE.OVERLOADED", Outcome.UNKNOWN),
        ([REFUSED, httpx_error(400)], "REQUEST.REJECTED", Outcome.NOT_RUN),
        ([REFUSED, ValueError("x")], "UNKNOWN.EXCEPTION", Outcome.UNKNOWN),
        ([REFUSED, group(REFUSED, group(ValueError("x")))], "UNKNOWN.EXCEPTION", Outcome.UNKNOWN),
        ([REFUSED, asyncio.CancelledError()], "CANCEL.CALLER", Outcome.UNKNOWN),
        ([through_ray(rex.ActorDiedError()), REFUSED], "ACTOR.NESTED_DIED", Outcome.UNKNOWN),
    ],
)
def test_a_group_is_its_strictest_leaf(leaves: list[BaseException], code: str, outcome: Outcome) -> None:
    for order in (leaves, leaves[::-1]):
        fault = classify(group(*order))
        assert fault.outcome is outcome
        if code in ("TRANSPORT.CONNECT", "ACTOR.NESTED_DIED") and len({classify(e).code for e in leaves}) > 1:
            assert fault.code in {classify(e).code for e in leaves}
        else:
            assert fault.code == code


def test_a_cause_of_a_leaf_is_no_leaf() -> None:
    leaf = CodedError("TRANSPORT.CONNECT", "refused")
    leaf.__cause__ = ValueError("what lay below")
    assert classify(group(leaf)).code == "TRANSPORT.CONNECT"


def test_a_group_waits_for_the_longest_retry_after() -> None:
    assert (
        classify(group(httpx_error(429, retry_after="3"), httpx_error(503, retry_after="9"))).retry_after
        == 9.0
    )


def test_a_group_is_believed_no_further_than_its_least_believable_leaf() -> None:
    leaves = [REFUSED, ValueError(mint("TRANSPORT.CONNECT"))]
    assert classify(group(*leaves)).trust is Trust.CHECKSUMMED
    assert classify(ValueError(mint("TRANSPORT.CONNECT"))).code == "TRANSPORT.CONNECT"


def test_a_group_of_very_many_leaves_is_not_retried_unseen() -> None:
    assert classify(group(*[REFUSED] * MAX_LEAVES)).code == "TRANSPORT.CONNECT"
    assert classify(group(*[REFUSED] * MAX_LEAVES, REFUSED)).code == "UNKNOWN.EXCEPTION"
    assert classify(group(*[REFUSED] * 100, ValueError("x"))).code == "UNKNOWN.EXCEPTION"


def test_a_group_through_ray_is_nested() -> None:
    exc = through_ray(ExceptionGroup("g", [rex.ActorDiedError()]))
    assert classify(exc).code == "ACTOR.NESTED_DIED"


# -- text: by a token, and by its trust


def test_a_token_in_an_unknown_exception_is_read_with_its_trust() -> None:
    assert classify(Exception(f"Call failed: {mint('WEIGHTS.REFIT_ABORTED')}")).trust is Trust.CHECKSUMMED
    signed = Exception(f"Call failed: {mint('WEIGHTS.REFIT_ABORTED', key=KEY)}")
    fault = classify(signed, key=KEY)
    assert (fault.code, fault.trust) == ("WEIGHTS.REFIT_ABORTED", Trust.SIGNED)
    assert classify(signed).code == "UNKNOWN.EXCEPTION"


def test_a_known_type_beats_a_token_in_its_text() -> None:
    """What a server wrote into an error must not turn a refusal into a free retry."""
    forged = mint("BACKPRESSURE.OVERLOADED")
    assert classify(httpx.ReadTimeout(forged)).code == "TIMEOUT.READ"
    assert (
        classify(httpx.HTTPStatusError(forged, request=None, response=httpx.Response(400))).code
        == "REQUEST.REJECTED"
    )  # type: ignore[arg-type]


# -- hostile


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_exception_is_classified(name: str) -> None:
    exc = HOSTILE[name]
    for thing in (exc, through_ray(exc) if name != "class raises" else exc, group(exc, REFUSED)):
        fault = classify(thing)
        assert decide(fault).action is Action.GIVE_UP
        assert fault.code in ("UNKNOWN.EXCEPTION", "TASK.FAILED")
        assert len(fault.evidence) <= 2048


PARTS: dict[str, Any] = {
    "__str__": lambda self: 5,
    "__repr__": lambda self: [],
    "__cause__": property(lambda self: 1 / 0),
    "__context__": property(lambda self: 1 / 0),
    "__suppress_context__": property(lambda self: 1 / 0),
    "__dict__": property(lambda self: 1 / 0),
    "__class__": property(lambda self: 1 / 0),
    "__getattribute__": lambda self, name: 1 / 0,
    "__eq__": lambda self, other: 1 / 0,
    "__hash__": None,
    "__bool__": lambda self: 1 / 0,
    "__len__": lambda self: 1 / 0,
    "response": property(lambda self: 1 / 0),
    "status": "503",
    "cause": property(lambda self: self),
    "exceptions": property(lambda self: 1 / 0),
    "actor_init_failed": property(lambda self: 1 / 0),
    "preempted": property(lambda self: 1 / 0),
    "headers": {"retry-after": object()},
    "__module__": "ray.exceptions",
    "__qualname__": "ActorDiedError",
}
BASES: list[type[Exception]] = [
    Exception, OSError, TimeoutError, KeyError, httpx.ReadTimeout, rex.ActorDiedError, rex.GetTimeoutError,
    rex.RayTaskError, aiohttp.ClientError, CodedError,
]  # fmt: skip


@given(
    st.sampled_from(BASES),
    st.lists(st.sampled_from(sorted(PARTS)), max_size=6, unique=True),
    st.dictionaries(
        st.sampled_from(["cause", "response", "status", "headers", "data"]), st.integers() | st.text()
    ),
    st.booleans(),
)
def test_no_exception_makes_classify_raise(
    base: type[Exception], parts: list[str], held: dict[str, object], in_a_group: bool
) -> None:
    cls = type("Made", (base,), {part: PARTS[part] for part in parts})
    exc = cls.__new__(cls)
    if not {"__dict__", "__getattribute__"} & set(parts):
        object.__getattribute__(exc, "__dict__").update(held)
    fault = classify(group(exc, REFUSED) if in_a_group else exc)
    assert isinstance(fault, Fault)
    assert fault.code in catalogue
