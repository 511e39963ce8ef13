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
import requests
from aiohttp import ClientResponseError, RequestInfo
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from faults import Action, Blame, Fault, Kind, Outcome, classify, decide, name_of
from faults.classify import MAX_HOPS, MAX_LEAVES
from faults.http_faults import MAX_RETRY_AFTER
from protocol import CodedError, Trust, catalogue, code_of, mint
from protocol.boundary import named
from protocol.safe import MAX_DETAIL
from tests.protocol.badly_written import HOSTILE

KEY = b"the run's key"


def through_ray(exc: Exception, hops: int = 1) -> Exception:
    """``exc`` as Ray's driver would raise it."""
    for _ in range(hops):
        exc = rex.RayTaskError("f", "traceback text", exc).as_instanceof_cause()
    return exc


def of_class(name: str, base: type[Exception], *args: object) -> Exception:
    """An exception of the class that is called ``name`` in full, of a package that tests do without."""
    module, _, short = name.rpartition(".")
    return type(short, (base,), {"__module__": module})(*args)


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


# -- PyTorch and vLLM


@pytest.mark.parametrize(
    ("name", "code", "action"),
    [
        ("torch.OutOfMemoryError", "TASK.GPU_OUT_OF_MEMORY", Action.GIVE_UP),
        ("torch.AcceleratorError", "TASK.GPU_FAILED", Action.RECREATE),
        ("torch.distributed.DistBackendError", "TASK.COLLECTIVE_FAILED", Action.GIVE_UP),
        ("vllm.v1.engine.exceptions.EngineDeadError", "ENGINE.EXITED", Action.RECREATE),
    ],
)
def test_what_a_gpu_and_the_ranks_raise(name: str, code: str, action: Action) -> None:
    raised = of_class(name, RuntimeError, "CUDA out of memory")
    below = type("OfOurs", (type(raised),), {"__module__": "ours"})("CUDA out of memory")
    for exc in (raised, below, through_ray(raised), through_ray(raised, 2)):
        fault = classify(exc)
        assert (str(fault.code), fault.trust) == (code, Trust.STRUCTURED)
        assert "CUDA out of memory" in fault.evidence
        assert decide(fault).action is action


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


def test_a_reply_names_the_failure_of_whoever_carries_it() -> None:
    """Also below a plain exception, and for a client that has no table: as `code_of` reads it."""
    below = RuntimeError("the engine said no")
    below.__cause__ = httpx_error(503, **{"x-failsoft-code": mint("ENGINE.UNHEALTHY")})
    reply = requests.Response()
    reply.status_code = 503
    reply.headers["x-failsoft-code"] = mint("ENGINE.UNHEALTHY")
    for exc in (below, requests.HTTPError("503", response=reply)):
        fault = classify(exc)
        assert fault.code == code_of(exc) == "ENGINE.UNHEALTHY"
        assert (fault.status, fault.trust) == (503, Trust.CHECKSUMMED)


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


# What the caller gets (the table of docs: what Ray 2.60 really does), each built by hand.
def unserializable(text: str) -> Exception:
    return rex.UnserializableException(text)


def unpicklable(text: str) -> Exception:
    """An attribute that cannot be pickled: the cause is a bare RayError, of which only text is left."""
    return rex.RayTaskError("f", text, rex.RayError(text)).as_instanceof_cause()


def init_failed(text: str) -> Exception:
    return rex.ActorDiedError(rex.RayTaskError("Actor.__init__", text, ValueError(text)))


def preempted() -> Exception:
    died = rex.ActorDiedError()
    died._preempted = True
    return died


RAISED = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{}\n'
HAND_MADE: dict[str, tuple[BaseException, str, Blame, Outcome]] = {
    "an ordinary exception": (through_ray(ValueError("x")), "TASK.FAILED", Blame.CALLEE, Outcome.RAN),
    "an inner actor died": (
        through_ray(rex.ActorDiedError()), "ACTOR.NESTED_DIED", Blame.NESTED, Outcome.UNKNOWN,
    ),
    "an inner call timed out": (
        through_ray(rex.GetTimeoutError("x")), "TIMEOUT.NESTED", Blame.NESTED, Outcome.UNKNOWN,
    ),
    "keyword-only arguments": (
        unserializable(RAISED.format("mine.Wrong: it broke")), "TASK.UNSERIALIZABLE", Blame.CALLEE,
        Outcome.RAN,
    ),
    "keyword-only arguments, of a known type": (
        unserializable(RAISED.format("httpx.ConnectError: refused")),
        "TRANSPORT.CONNECT", Blame.UPSTREAM, Outcome.NOT_RUN,
    ),
    "an attribute that cannot be pickled": (
        unpicklable(RAISED.format("aiohttp.client_exceptions.ClientResponseError: 400, message='no'")),
        "REQUEST.REJECTED", Blame.REQUEST, Outcome.NOT_RUN,
    ),
    "a group with a bad leaf": (
        unpicklable(RAISED.format("ExceptionGroup: g (2 sub-exceptions)")), "TASK.UNSERIALIZABLE",
        Blame.CALLEE, Outcome.RAN,
    ),
    "anything in __init__": (init_failed("x"), "ACTOR.INIT_FAILED", Blame.CALLEE, Outcome.NOT_RUN),
    "anything in an inner __init__": (
        through_ray(init_failed("x")), "ACTOR.INIT_FAILED", Blame.NESTED, Outcome.NOT_RUN,
    ),
    "killed": (rex.ActorDiedError(), "ACTOR.DIED", Blame.CALLEE, Outcome.UNKNOWN),
    "killed, restarts left": (
        rex.ActorUnavailableError("x", b"0" * 16), "ACTOR.UNAVAILABLE", Blame.CALLEE, Outcome.UNKNOWN,
    ),
    "preempted": (preempted(), "NODE.PREEMPTED", Blame.NODE, Outcome.UNKNOWN),
    "cancelled while queued": (rex.TaskCancelledError(), "CANCEL.REMOTE", Blame.CALLER, Outcome.UNKNOWN),
    "cancelled while running": (
        through_ray(rex.TaskCancelledError()), "CANCEL.REMOTE", Blame.CALLER, Outcome.UNKNOWN,
    ),
    "no answer in time": (rex.GetTimeoutError("x"), "TIMEOUT.RAY_GET", Blame.CALLEE, Outcome.UNKNOWN),
    "the node is gone": (rex.NodeDiedError("x"), "NODE.DIED", Blame.NODE, Outcome.UNKNOWN),
    "the worker is gone": (rex.WorkerCrashedError(), "TASK.WORKER_CRASHED", Blame.CALLEE, Outcome.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_MADE)
def test_what_the_caller_gets(name: str) -> None:
    exc, code, blame, outcome = HAND_MADE[name]
    fault = classify(exc)
    assert (str(fault.code), fault.blame, fault.outcome) == (code, blame, outcome)


def test_a_dual_is_what_its_cause_was_and_still_nested() -> None:
    """`RayTaskError(ActorDiedError)` is an instance of both: asking for either says the wrong thing."""
    dual = through_ray(rex.ActorDiedError())
    assert isinstance(dual, rex.RayTaskError)
    assert isinstance(dual, rex.RayActorError)
    assert decide(classify(dual)).action is Action.RETRY_ELSEWHERE
    assert decide(classify(rex.ActorDiedError())).action is Action.RECREATE
    timeout = through_ray(rex.GetTimeoutError("x"))
    assert isinstance(timeout, TimeoutError | OSError)
    assert classify(timeout).blame is Blame.NESTED
    both = through_ray(CodedError("WEIGHTS.REFIT_ABORTED", "d"))
    assert isinstance(both, rex.RayTaskError)
    assert isinstance(both, CodedError)
    assert classify(both).trust is Trust.STRUCTURED


@pytest.mark.parametrize("make", [init_failed, unserializable, unpicklable])
def test_a_token_is_read_where_only_text_survives(make: Any) -> None:
    error = CodedError("ENGINE.PORT_TAKEN", "30000")
    fault = classify(make(RAISED.format(f"protocol.errors.CodedError: {error}")))
    assert (fault.code, fault.id, fault.trust) == ("ENGINE.PORT_TAKEN", error.id, Trust.CHECKSUMMED)
    signed = RAISED.format(mint("ENGINE.PORT_TAKEN", key=KEY))
    assert classify(make(signed), key=KEY).trust is Trust.SIGNED


def test_what_failed_in_an_init_did_not_run_whatever_its_code_says() -> None:
    token = mint("TASK.FAILED")
    direct, inner = classify(init_failed(token)), classify(through_ray(init_failed(token)))
    assert (direct.code, direct.blame, direct.outcome) == ("TASK.FAILED", Blame.CALLEE, Outcome.NOT_RUN)
    assert (inner.code, inner.blame, inner.outcome) == ("TASK.FAILED", Blame.NESTED, Outcome.NOT_RUN)


def test_a_token_in_the_text_of_a_death_that_is_no_failed_init_is_not_believed() -> None:
    died = rex.ActorDiedError()
    died.error_msg = f"it printed {mint('BACKPRESSURE.OVERLOADED')}"
    assert classify(died).code == "ACTOR.DIED"


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


def test_groups_that_came_through_ray_in_groups_end() -> None:
    """Two of the next one in each of forty: a trillion leaves, of a pickle of a few hundred bytes."""
    exc: Exception = ValueError("x")
    for _ in range(40):
        exc = rex.RayTaskError("f", "text", ExceptionGroup("g", [exc, exc]))
    fault = classify(exc)
    assert (fault.code, fault.trust) == ("TASK.FAILED", Trust.NONE)  # what none of the other leaves may lift
    two = rex.RayTaskError("f", "text", ExceptionGroup("g", [rex.ActorDiedError(), REFUSED]))
    assert classify(group(two)).code == "ACTOR.NESTED_DIED"


def test_a_group_below_itself_ends() -> None:
    """A pickle can say so: it holds what came through Ray, whose cause it is."""
    for leaves in ([], [REFUSED]):
        through = rex.RayTaskError("f", "text", ValueError("x"))
        through.cause = ExceptionGroup("g", [*leaves, through])
        assert classify(through.cause).code == classify(through).code == "UNKNOWN.EXCEPTION"


def test_a_group_that_another_was_raised_from_is_its_strictest_leaf() -> None:
    """As `read` has it, whichever leaf comes first."""
    leaves = [CodedError("ACTOR.DIED"), CodedError("CONFIG.INVALID")]
    for order in (leaves, leaves[::-1]):
        exc = RuntimeError("the pool could not start")
        exc.__cause__ = ExceptionGroup("posters", order)
        assert classify(exc).code == code_of(exc) == "CONFIG.INVALID"


def test_a_group_through_ray_is_nested() -> None:
    exc = through_ray(ExceptionGroup("g", [rex.ActorDiedError()]))
    assert classify(exc).code == "ACTOR.NESTED_DIED"


@pytest.mark.parametrize("make", [unserializable, rex.RaySystemError])
def test_a_guess_from_text_gains_no_trust_by_its_name(make: Any) -> None:
    """A model that prints the name of a failure must not turn it into one that is forgiven."""
    exc = make("the model said:\nConnectionResetError: peer")
    assert (classify(exc).code, classify(exc).trust) == ("TRANSPORT.DISCONNECTED", Trust.HEURISTIC)
    error = named(exc, name=name_of)
    assert error.code in ("TASK.UNSERIALIZABLE", "INTERNAL.RAY")
    assert name_of(ValueError(mint("TRANSPORT.CONNECT"))) is None
    assert named(ValueError(mint("TRANSPORT.CONNECT")), name=name_of).trust is Trust.CHECKSUMMED


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (init_failed(mint("TRANSPORT.CONNECT")), "ACTOR.INIT_FAILED"),
        (through_ray(init_failed(mint("TRANSPORT.CONNECT"))), "ACTOR.INIT_FAILED"),
        (unpicklable("the model said:\nConnectionResetError: peer"), "TASK.UNSERIALIZABLE"),
    ],
)
def test_without_its_text_it_has_the_name_that_is_known_besides(exc: BaseException, code: str) -> None:
    assert name_of(exc) == code


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


# -- what happened to be handled when it arose

CONTEXTS: list[BaseException] = [
    CodedError("BACKPRESSURE.OVERLOADED", "another failure"),
    httpx.ConnectError("refused"),
    ConnectionRefusedError(),
    ValueError(mint("BACKPRESSURE.OVERLOADED")),
    rex.ActorDiedError(),
]


def raise_while_handling(context: BaseException, exc: Exception) -> None:
    try:
        raise context
    finally:
        raise exc


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda e: type(e).__name__)
def test_an_implicit_context_never_lends_its_name(context: BaseException) -> None:
    def raised(exc: Exception) -> Exception:
        with pytest.raises(type(exc)) as caught:
            raise_while_handling(context, exc)
        return caught.value

    bare = raised(ValueError("x"))
    assert bare.__context__ is context
    assert classify(bare).code == "UNKNOWN.EXCEPTION"
    assert classify(through_ray(raised(ValueError("x")))).code == "TASK.FAILED"
    assert classify(group(raised(ValueError("x")))).code == "UNKNOWN.EXCEPTION"
    assert classify(raised(CodedError("NODE.IO", "d"))).code == "NODE.IO"


# -- hostile


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_exception_is_classified(name: str) -> None:
    exc = HOSTILE[name]
    for thing in (exc, through_ray(exc) if name != "class raises" else exc, group(exc, REFUSED)):
        fault = classify(thing)
        assert decide(fault).action is Action.GIVE_UP
        assert fault.code in ("UNKNOWN.EXCEPTION", "TASK.FAILED")
        assert len(fault.evidence) <= 2048


@pytest.mark.parametrize(
    "claimed", [CodedError, ConnectionRefusedError, ExceptionGroup, OSError, TimeoutError, KeyboardInterrupt]
)
def test_a_class_that_an_exception_claims_is_not_believed(claimed: type[BaseException]) -> None:
    class Liar(Exception):
        __class__ = property(lambda self: claimed)  # type: ignore[assignment]
        code = CodedError("BACKPRESSURE.OVERLOADED").code
        detail, data, id, errno = "", {}, "0" * 8, errno.ENOSPC
        exceptions = (REFUSED,)

    assert isinstance(Liar("x"), claimed)
    for exc in (Liar("x"), through_ray(Liar("x")), group(Liar("x"), REFUSED)):
        assert classify(exc).code in ("UNKNOWN.EXCEPTION", "TASK.FAILED")


def test_a_group_that_lists_itself_ends_and_is_what_it_really_holds() -> None:
    class Ouroboros(ExceptionGroup[Exception]):
        @property
        def exceptions(self) -> tuple[Any, ...]:
            return (self,)

    assert classify(Ouroboros("g", [httpx_error(400)])).code == "REQUEST.REJECTED"
    assert classify(group(Ouroboros("g", [ValueError("x")]), REFUSED)).code == "UNKNOWN.EXCEPTION"


def test_a_metaclass_that_hides_the_name_of_a_class() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:
            raise RuntimeError("no name")

    class Nameless(Exception, metaclass=Meta):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    for exc in (Nameless("x"), group(Nameless("x"), REFUSED)):
        assert classify(exc).code == "UNKNOWN.EXCEPTION"


@pytest.mark.parametrize("replaced", [(), (1, 2, 3), (object(),), ("BACKPRESSURE.OVERLOADED",)])
def test_replaced_args_change_nothing(replaced: tuple[object, ...]) -> None:
    for exc, code in (
        (CodedError("NODE.IO", "d"), "NODE.IO"),
        (rex.GetTimeoutError("x"), "TIMEOUT.RAY_GET"),
        (httpx.ReadTimeout("x"), "TIMEOUT.READ"),
        (OSError(errno.ENOSPC, "x"), "NODE.DISK_FULL"),
        (httpx_error(429), "BACKPRESSURE.RATE_LIMITED"),
    ):
        exc.args = replaced
        assert classify(exc).code == code
        assert classify(through_ray(exc)).code == code.replace("RAY_GET", "NESTED")


@pytest.mark.parametrize(
    "after", [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)], ids=lambda n: str(n)[:5]
)
def test_a_retry_after_beyond_every_number_is_bounded(after: float) -> None:
    error = CodedError("BACKPRESSURE.OVERLOADED", "full")
    error.data = {"retry_after": after}  # past what the constructor lets through
    fault = classify(error)
    assert fault.code == "BACKPRESSURE.OVERLOADED"
    assert fault.retry_after is not None
    assert 0.0 <= fault.retry_after <= MAX_RETRY_AFTER


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


# -- trees of everything above, drawn as data: some of these exceptions cannot even be shown

HARMLESS: dict[str, Exception] = {
    "refused": REFUSED,
    "cut": CUT,
    "429": httpx_error(429, retry_after="3"),
    "coded": CodedError("TRANSPORT.CONNECT"),
    "died": rex.ActorDiedError(),
}
FORBIDS: dict[str, Exception] = {
    "unknown": ValueError("x"),
    "400": httpx_error(400),
    "coded, invalid": CodedError("CONFIG.INVALID"),
    # Without what is slow by the hundred, and what Ray itself stumbles over when it is made.
    **{name: exc for name, exc in HOSTILE.items() if name not in ("20 MB", "class raises")},
}


def trees(leaves: dict[str, Exception]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.sampled_from(sorted(leaves)),
        lambda below: st.one_of(
            st.tuples(st.just("group"), st.lists(below, min_size=1, max_size=4)),
            st.tuples(st.sampled_from(["cause", "ray"]), below),
        ),
        max_leaves=12,
    )


def built(tree: Any) -> Exception:
    if isinstance(tree, str):
        return {**HARMLESS, **FORBIDS}[tree]
    how, below = tree
    if how == "group":
        return ExceptionGroup("g", [built(one) for one in below])
    exc = built(below)
    if how == "ray":
        return through_ray(exc)
    above = RuntimeError("above")
    above.__cause__, above.__context__ = exc, CodedError("BACKPRESSURE.OVERLOADED")
    return above


@given(trees({**HARMLESS, **FORBIDS}))
def test_any_tree_has_a_fault_of_the_catalogue(tree: Any) -> None:
    exc = built(tree)
    fault = classify(exc)
    assert fault.code in catalogue
    assert fault.code != "BACKPRESSURE.OVERLOADED", "only an implicit context holds that"
    assert len(fault.evidence) <= MAX_DETAIL
    assert classify(exc) == fault


@given(st.lists(trees(HARMLESS), max_size=3), trees(FORBIDS), st.integers(0, 3))
def test_a_group_with_a_leaf_that_forbids_it_is_never_sent_again(
    others: list[Any], forbids: Any, place: int
) -> None:
    others.insert(place, forbids)
    exc = built(("group", others))
    for one in (exc, through_ray(exc)):
        assert decide(classify(one)).action is Action.GIVE_UP
