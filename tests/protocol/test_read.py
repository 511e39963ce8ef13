"""`read` and `code_of`: a code is read back from anything, and reading never fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayTaskError

from protocol import Code, CodedError, Reading, Trust, code_of, mint, read
from protocol.boundary import named
from protocol.carriers.http_reply import HEADER, PROBLEM
from protocol.reading import MAX_READ
from tests.protocol.badly_written import HOSTILE

KEY = b"the run's key"
CODE = Code("WEIGHTS.REFIT_ABORTED")


def token(code: str = CODE, key: bytes | None = None) -> str:
    return mint(code, key=key)


# -- exceptions


def test_a_coded_error_speaks_for_itself() -> None:
    error = CodedError(CODE, "the watchdog", {"step": 7})
    assert read(error) == Reading(CODE, error.id, "the watchdog", {"step": 7}, Trust.STRUCTURED, error.token)


def test_a_plain_exception_has_no_code() -> None:
    assert code_of(ValueError("x")) is None
    assert read(ValueError("x")) == Reading()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda e: _from(ValueError("x"), e),
        lambda e: _from(_from(ValueError("x"), KeyError("y")), ValueError("z")) and _deep(e, 50),
        lambda e: ExceptionGroup("g", [ValueError("x"), e]),
        lambda e: ExceptionGroup("g", [ExceptionGroup("h", [KeyError("y"), _from(ValueError("x"), e)])]),
        lambda e: BaseExceptionGroup("g", [KeyboardInterrupt(), e]),
        lambda e: _carrying(e),
    ],
)
def test_found_below(wrap: Any) -> None:
    error = CodedError(CODE, "d")
    assert read(wrap(error)) == read(error)


def _from(exc: Exception, cause: BaseException) -> Exception:
    exc.__cause__ = cause
    return exc


def _deep(exc: Exception, depth: int) -> Exception:
    for n in range(depth):
        exc = _from(RuntimeError(str(n)), exc)
    return exc


def _carrying(exc: Exception) -> Exception:
    outer = RuntimeError("as Ray's RayTaskError does")
    outer.cause = exc  # type: ignore[attr-defined]
    return outer


def test_what_was_being_handled_does_not_lend_its_name() -> None:
    try:
        raise CodedError(CODE)
    except CodedError:
        with pytest.raises(ValueError, match="another") as caught:
            raise ValueError("another failure")  # noqa: B904 - the context is what this is about
    assert isinstance(caught.value.__context__, CodedError)
    assert code_of(caught.value) is None


def test_structure_beats_text_and_the_outermost_beats_what_is_below() -> None:
    inner = CodedError("NODE.IO", "below")
    outer = _from(ValueError(token("TASK.FAILED")), inner)
    assert code_of(outer) == "NODE.IO"
    assert code_of(_from(CodedError(CODE), inner)) == CODE


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "Call to 10.0.0.1:30000/update_weights failed: {} the watchdog",
        "(Trainer pid=123, ip=10.0.0.1) {} x",
        "\x1b[36m(Trainer pid=123)\x1b[0m protocol.errors.CodedError: {} x",
        "ray.exceptions.RayTaskError(CodedError): \x1b[36mray::A.f()\x1b[39m (pid=1)\nCodedError: {}",
        '500 Server Error: b\'{{"error": "{}"}}\'',
        "2026-01-01 00:00:00,000 ERROR engine.py:10 -- {}",
    ],
)
def test_found_in_text(text: str) -> None:
    raw = token()
    line = text.format(raw)
    for thing in (line, line.encode(), bytearray(line.encode()), Exception(line), {"msg": line}):
        found = read(thing)
        assert (found.code, found.trust, found.raw) == (CODE, Trust.CHECKSUMMED, raw)


def test_a_signed_token_is_believed_with_the_key_alone() -> None:
    text = f"failed: {token(key=KEY)}"
    assert read(text, key=KEY).trust is Trust.SIGNED
    assert read(Exception(text), key=KEY).trust is Trust.SIGNED
    assert read({"msg": text}, key=KEY).trust is Trust.SIGNED
    assert read(text).code is None
    assert read(text, key=b"another").code is None


def test_the_first_token_is_the_first_failure() -> None:
    assert code_of(f"{token('NODE.IO')}\nduring which {token('TASK.FAILED')}") == "NODE.IO"


def test_a_token_of_a_later_release_is_unknown_and_carried_on() -> None:
    from protocol.token import _mac

    body = "FS1.GPU.ECC.ABCDEFGH"
    raw = f"{body}.{_mac(body, b'')}"
    found = read(f"it said {raw}")
    assert (found.code, found.raw) == ("UNKNOWN.FOREIGN", raw)


@pytest.mark.parametrize("size", [MAX_READ - 200, MAX_READ * 3])
def test_the_head_and_the_tail_of_long_text_are_read(size: int) -> None:
    for text in (f"{token()} {'x' * size}", f"{'x' * size} {token()}"):
        assert code_of(text) == CODE
        assert code_of(text.encode()) == CODE
        assert code_of(Exception(text)) == CODE


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_exceptions_are_read_and_what_is_above_and_below_them(name: str) -> None:
    exc = HOSTILE[name]
    assert read(exc) == Reading()
    assert code_of(_from(CodedError(CODE), exc)) == CODE
    assert code_of(ExceptionGroup("g", [exc, CodedError(CODE)])) == CODE


# -- mappings: events, problems, log lines as data


def test_an_event_is_read() -> None:
    event = {
        "ts": 1.0,
        "event": "engine.exited",
        "code": CODE,
        "id": "ABCDEFGH",
        "detail": "d",
        "data": {"a": 1},
    }
    assert read(event) == Reading(CODE, "ABCDEFGH", "d", {"a": 1}, Trust.STRUCTURED, "")


def test_a_problem_is_read() -> None:
    problem = {"type": "about:blank", "status": 500, "code": CODE, "instance": "ABCDEFGH", "detail": "d"}
    assert read(problem) == Reading(CODE, "ABCDEFGH", "d", {}, Trust.STRUCTURED, "")


@pytest.mark.parametrize("code", ["ERR_42", "task.failed", "", "GPU.ECC"])
def test_some_other_programs_code_is_no_code_but_its_text_may_hold_one(code: str) -> None:
    assert read({"code": code}) == Reading()
    assert code_of({"code": code, "message": f"x {token()}"}) == CODE


@pytest.mark.parametrize("code", [None, 5, [], {}, b"TASK.FAILED"])
def test_a_code_that_is_no_text_is_none(code: object) -> None:
    assert read({"code": code, "id": 5, "data": 5}).code is None


def test_found_in_mappings_in_mappings() -> None:
    assert code_of({"error": {"message": {"inner": {"text": token()}}}}) == CODE
    assert code_of({"error": {"code": "NODE.IO", "detail": "x"}}) == "NODE.IO"


def test_a_mapping_that_holds_itself_ends() -> None:
    loop: dict[str, Any] = {"a": "b"}
    loop["self"] = {"again": loop}
    assert read(loop) == Reading()
    deep: dict[str, Any] = {"text": token()}
    for _ in range(5000):
        deep = {"a": deep}
    assert read(deep) == Reading()


def test_a_hostile_mapping_is_read() -> None:
    class Hostile(Mapping[str, object]):
        def __getitem__(self, key: str) -> object:
            raise RuntimeError("no")

        def __iter__(self) -> Iterator[str]:
            raise RuntimeError("no")

        def __len__(self) -> int:
            raise RuntimeError("no")

    assert read(Hostile()) == Reading()
    assert read({"code": HOSTILE["str raises"], "id": HOSTILE["str raises"]}) == Reading()


# -- HTTP responses


def response(status: int = 500, body: bytes = b"", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, content=body, headers=named, request=httpx.Request("POST", "http://h/"))


def test_the_header_is_read_first() -> None:
    found = read(response(body=f"x {token('NODE.IO')}".encode(), **{HEADER: token()}))
    assert (found.code, found.trust) == (CODE, Trust.CHECKSUMMED)
    assert read(response(**{HEADER: token(key=KEY)}), key=KEY).trust is Trust.SIGNED


def test_a_problem_body_is_structured() -> None:
    body = json.dumps({"code": CODE, "detail": "d", "instance": "ABCDEFGH"}).encode()
    for media in (PROBLEM, f"{PROBLEM}; charset=utf-8"):
        assert read(response(body=body, content_type=media)) == Reading(
            CODE, "ABCDEFGH", "d", {}, Trust.STRUCTURED, ""
        )
    assert read(response(body=body, content_type="application/json")).code is None


def test_a_plain_body_is_text() -> None:
    found = read(response(body=f"Internal error: {token()}".encode()))
    assert (found.code, found.trust) == (CODE, Trust.CHECKSUMMED)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'{"a": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe" * 100]
)
def test_a_body_of_nonsense_is_no_code(body: bytes) -> None:
    assert read(response(body=body, content_type=PROBLEM)) == Reading()
    found = read(response(body=body + b" " + token().encode(), content_type=PROBLEM))
    assert found.code == CODE


def test_a_header_of_nonsense_leaves_the_body() -> None:
    assert code_of(response(body=token().encode(), **{HEADER: "nonsense"})) == CODE


async def test_an_unread_stream_is_read_by_its_header() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500, headers={HEADER: token()}, stream=httpx.ByteStream(b"body"))

    client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    async with client, client.stream("GET", "http://h/") as streamed:
        assert code_of(streamed) == CODE
        del streamed.headers[HEADER]
        assert read(streamed) == Reading()


def test_a_response_of_requests_is_read() -> None:
    made = requests.Response()
    made.status_code = 500
    made._content = token().encode()
    assert code_of(made) == CODE
    made.headers[HEADER.title()] = token("NODE.IO")
    assert code_of(made) == "NODE.IO"


def test_a_hostile_response_is_read() -> None:
    class Hostile:
        @property
        def headers(self) -> object:
            raise RuntimeError("no headers")

    class Unreadable:
        headers: Mapping[str, str] = {}

        @property
        def content(self) -> bytes:
            raise RuntimeError("no content")

    assert read(Hostile()) == read(Unreadable()) == Reading()


# -- anything


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_anything_can_be_read(thing: object) -> None:
    assert isinstance(read(thing), Reading)


def test_what_holds_no_text_has_no_code() -> None:
    for thing in (None, 5, object(), [token()], read, type):
        assert read(thing) == Reading()


def test_a_cause_of_a_leaf_is_no_leaf() -> None:
    """A group of one failure is called what that failure is called alone, though its cause allows less."""
    leaf = _from(CodedError("TRANSPORT.CONNECT", "refused"), CodedError("REQUEST.INVALID", "below"))
    wrapped = _from(RuntimeError("wrapped"), leaf)
    for one in (leaf, wrapped):
        group = ExceptionGroup("outer", [ExceptionGroup("inner", [one])])
        assert code_of(one) == code_of(group) == named(group).code == "TRANSPORT.CONNECT"
    raised_from = _from(ExceptionGroup("g", [ValueError("no name")]), leaf)
    assert code_of(raised_from) == "TRANSPORT.CONNECT"
    assert named(_from(ExceptionGroup("g", [ValueError("x")]), CodedError("REQUEST.INVALID"))).id != ""


@pytest.mark.parametrize(
    "through", [lambda e: _from(RuntimeError("x"), e), lambda e: RayTaskError("f", "t", e)]
)
def test_a_group_below_a_leaf_of_a_group_is_its_strictest_leaf(
    through: Callable[[Exception], Exception],
) -> None:
    """As it is alone: that it stands in another group allows no more."""
    below = through(ExceptionGroup("below", [CodedError("ACTOR.DIED"), CodedError("CONFIG.INVALID")]))
    group = ExceptionGroup("outer", [CodedError("ACTOR.DIED"), below])
    assert code_of(below) == code_of(group) == named(group).code == "CONFIG.INVALID"


def test_groups_below_leaves_of_groups_end() -> None:
    """Two of the next one in each of a thousand, and one that lies below itself."""
    exc: Exception = CodedError("NODE.IO")
    for _ in range(1000):
        exc = _from(RuntimeError("x"), ExceptionGroup("g", [_from(ValueError("x"), exc), ValueError("y")]))
    assert code_of(exc) is None  # too deep to be found
    loop = RuntimeError("x")
    loop.__cause__ = ExceptionGroup("g", [loop, _from(ValueError("x"), CodedError("NODE.IO"))])
    assert code_of(loop) == "NODE.IO"


def test_a_groups_leaves_are_its_own_whatever_it_claims() -> None:
    """A group whose ``exceptions`` never end is not followed, and what only claims to be one is none."""

    class Endless(ExceptionGroup[Exception]):
        @property
        def exceptions(self) -> object:  # type: ignore[override]
            return iter(lambda: ValueError("again"), None)

    class Claims(Exception):
        __class__ = ExceptionGroup  # type: ignore[assignment]
        exceptions = (CodedError("WEIGHTS.REFIT_ABORTED"),)

    outer = RuntimeError("outer")
    outer.__cause__ = Endless("group", [CodedError("NODE.IO")])
    assert code_of(outer) == "NODE.IO"
    outer.__cause__ = Claims("no group")
    assert code_of(outer) is None
