"""`problem` writes a reply, `read_reply` reads it: pure, and within budgets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import requests
from aiohttp import ClientResponseError, RequestInfo
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from faults import name_of
from protocol import Code, CodedError, Family, Reading, Trust, catalogue, code_of, coded, mint, read, scan
from protocol.carriers.http_problem import MAX_BODY, MIN_BODY, Problem, problem, status_of
from protocol.carriers.http_reply import (
    HEADER,
    PROBLEM,
    error_from_reply,
    facts_of,
    read_exception,
    read_reply,
)
from protocol.errors import CARRIED, CODE_TRUST
from protocol.keys import Keyring, hold
from protocol.safe import set_prompt_budget
from protocol.token import _mac
from tests.protocol.badly_written import HOSTILE

RING = Keyring(b"the run's key")
CODE = Code("WEIGHTS.REFIT_ABORTED")
ERROR = CodedError(CODE, "the watchdog", {"step": 7})
INNER = CodedError("NODE.IO", "inner")


@pytest.fixture
def keyed() -> Iterator[None]:
    hold(RING)
    yield
    hold(None)


def reread(made: Problem, **how: Any) -> Reading:
    return read_reply(made.status, made.headers, made.body, **how)


def document(made: Problem) -> dict[str, Any]:
    return dict(json.loads(made.body))


# -- writing


def test_the_members_and_headers() -> None:
    made = problem(ERROR)
    assert document(made) == {
        "type": f"urn:failsoft:code:{CODE}",
        "title": catalogue.entry(CODE).meaning,
        "status": 500,
        "code": CODE,
        "instance": ERROR.id,
        "token": ERROR.token,
        "detail": "the watchdog",
        "data": {"step": 7},
    }
    assert made.status == 500
    assert made.headers == {"content-type": PROBLEM, HEADER: ERROR.token, "cache-control": "no-store"}
    assert reread(made) == Reading(CODE, ERROR.id, "the watchdog", {"step": 7}, Trust.STRUCTURED, ERROR.token)


@pytest.mark.parametrize(
    ("code", "data", "status"),
    [
        ("REQUEST.REJECTED", {}, 400),
        ("REQUEST.REJECTED", {"status": 422}, 422),
        ("REQUEST.REJECTED", {"status": 200}, 400),
        ("REQUEST.REJECTED", {"status": "422"}, 400),
        ("REQUEST.REJECTED", {"status": 500}, 400),
        ("REQUEST.UNAUTHORIZED", {}, 401),
        ("REQUEST.UNAUTHORIZED", {"status": 403}, 403),
        ("REQUEST.NOT_FOUND", {}, 404),
        ("REQUEST.TOO_LARGE", {}, 413),
        ("REQUEST.OUTCOME_UNKNOWN", {}, 500),
        ("BACKPRESSURE.RATE_LIMITED", {}, 429),
        ("BACKPRESSURE.OVERLOADED", {}, 503),
        ("BACKPRESSURE.OVERLOADED", {"status": 529}, 529),
        ("BACKPRESSURE.OVERLOADED", {"status": 200}, 503),
        ("BACKPRESSURE.MY_OWN", {}, 503),
        ("TIMEOUT.READ", {}, 504),
        ("TRANSPORT.CONNECT", {}, 502),
        ("UPSTREAM.SERVER_ERROR", {"status": 500}, 502),
        ("UPSTREAM.NO_ENGINE", {}, 503),
        ("ENGINE.EXITED", {}, 503),
        ("POOL.CLOSED", {}, 503),
        ("QUEUE.FULL", {}, 503),
        ("CANCEL.CALLER", {}, 499),
        ("CONFIG.INVALID", {}, 500),
        ("INTERNAL.BUG", {}, 500),
        ("UNKNOWN.FOREIGN", {}, 500),
    ],
)
def test_the_status_follows_from_the_code(code: str, data: dict[str, Any], status: int) -> None:
    error = CodedError(code, "", data)
    assert problem(error).status == status_of(error) == document(problem(error))["status"] == status


@pytest.mark.parametrize("family", Family)
def test_every_family_has_a_status_that_is_a_failure(family: Family) -> None:
    assert 400 <= problem(CodedError(f"{family}.SOMETHING")).status <= 599


def test_a_status_may_be_given() -> None:
    made = problem(ERROR, status=418)
    assert (made.status, document(made)["status"]) == (418, 418)
    for status in (0, 200, 399, 600):
        with pytest.raises(ValueError, match=f"status={status} is no failure"):
            problem(ERROR, status=status)
    with pytest.raises(ValueError, match="give at least 2048"):
        problem(ERROR, budget=MIN_BODY - 1)


@pytest.mark.parametrize(
    ("code", "after", "header"),
    [
        ("BACKPRESSURE.RATE_LIMITED", 1.2, "2"),
        ("BACKPRESSURE.OVERLOADED", 7, "7"),
        ("ENGINE.UNHEALTHY", 7, "7"),
        ("BACKPRESSURE.OVERLOADED", -5, "0"),
        ("BACKPRESSURE.OVERLOADED", 1e9, "300"),
        ("BACKPRESSURE.OVERLOADED", float("inf"), None),
        ("BACKPRESSURE.OVERLOADED", float("nan"), None),
        ("BACKPRESSURE.OVERLOADED", "7\r\nX-Evil: 1", None),
        ("BACKPRESSURE.OVERLOADED", None, None),
        ("REQUEST.REJECTED", 7, None),
    ],
)
def test_retry_after(code: str, after: object, header: str | None) -> None:
    error = CodedError(code)
    error.data["retry_after"] = after  # as it is, which the constructor would make safe
    assert problem(error).headers.get("retry-after") == header


def test_a_foreign_exception_is_named_first() -> None:
    cause = ValueError("no such model")
    assert reread(problem(cause)).code == "TASK.FAILED"
    assert reread(problem(cause)).detail == "ValueError: no such model"
    assert reread(problem(TimeoutError(), name=name_of)).code == "TIMEOUT.DEADLINE"
    assert problem(asyncio.CancelledError()).status == 499
    outer = RuntimeError("outer")
    outer.__cause__ = ERROR
    for exc in (outer, ExceptionGroup("group", [ERROR])):
        found = reread(problem(exc))
        assert (found.code, found.id, found.trust) == (CODE, ERROR.id, Trust.STRUCTURED)
    # Nothing retries a ValueError: with one among its leaves, the group is named by that.
    assert reread(problem(ExceptionGroup("group", [ValueError("x"), ERROR]))).code == "TASK.FAILED"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_exceptions_are_carried(name: str) -> None:
    made = problem(HOSTILE[name])
    assert (made.status, reread(made).code) == (500, "TASK.FAILED")


def test_a_code_read_in_text_is_believed_no_further_over_http(keyed: None) -> None:
    """A model's text reaches an exception, the exception a reply, and the reply a reader with the key: the
    server signs nothing that it only read."""
    forged = mint(CODE, key=b"")
    made = problem(RuntimeError(f"the model said {forged}"))
    assert made.headers[HEADER] == forged
    for how in ({}, {"headers": {"content-type": PROBLEM}}):
        found = read_reply(made.status, how.get("headers", made.headers), made.body)
        assert (found.code, found.trust) == (CODE, Trust.CHECKSUMMED)
    with pytest.raises(CodedError) as caught:
        coded(lambda: _raise(error_from_reply(made.status, made.headers, made.body)))()
    assert (caught.value.trust, caught.value.token) == (Trust.CHECKSUMMED, forged)


def _raise(exc: Exception) -> None:
    raise exc


def test_a_token_of_a_later_release_is_carried_on_byte_for_byte() -> None:
    body = "FS1.GPU.ECC.ABCDEFGH"
    raw = f"{body}.{_mac(body, b'')}"
    made = problem(RuntimeError(f"it said {raw}"))
    assert made.headers[HEADER] == raw
    found = read_reply(made.status, {HEADER: raw}, b"")
    assert (found.code, found.raw) == ("UNKNOWN.FOREIGN", raw)
    assert problem(error_from_reply(made.status, made.headers, b"")).headers[HEADER] == raw


BIG: dict[str, Mapping[str, Any]] = {
    "texts": {f"k{n}": "x" * 5000 for n in range(60)},
    "control characters": {f"k{n}": "\x00" * 2000 for n in range(60)},
    "wide": {f"{n}": "日本" * 500 for n in range(64)},
    "deep": {"a": {f"b{n}": {f"c{m}": "d" * 500 for m in range(60)} for n in range(60)}},
    "none": {},
}
DETAILS = {
    "none": "",
    "long": "d" * 8000,
    "control characters": "\x01" * 8000,
    "wide": "日" * 8000,
    "surrogates": "\ud800" * 100,
    "ends of lines": "\x00\r\n" * 2000,
}


@pytest.mark.parametrize("budget", [MIN_BODY, 3000, MAX_BODY, 10**7], ids=str)
@pytest.mark.parametrize("data", BIG)
@pytest.mark.parametrize("detail", DETAILS)
def test_the_body_keeps_its_budget_and_its_shape(detail: str, data: str, budget: int) -> None:
    error = CodedError("ENGINE." + "R" * 40, DETAILS[detail], BIG[data])
    made = problem(error, budget=budget)
    assert len(made.body) <= budget
    assert document(made)["code"] == error.code
    assert (reread(made).code, reread(made).id) == (error.code, error.id)
    if budget == 10**7:
        assert (document(made)["detail"], document(made)["data"]) == (error.detail, error.data)
    elif BIG[data] and len(json.dumps(error.data)) > budget:
        assert re.fullmatch(r"[0-9]+ left out", document(made)["data"]["…"])


def test_a_catalogues_long_title_keeps_the_budget() -> None:
    code = catalogue.register("LONG_TITLE", family="TASK", meaning="\x01" * 10_000)
    made = problem(CodedError(code, "d" * 8000, {"a": "b" * 2000}), budget=MIN_BODY)
    assert len(made.body) <= MIN_BODY
    assert reread(made).code == code


def test_small_data_is_kept_beside_what_is_left_out() -> None:
    made = problem(CodedError(CODE, "", {"first": 1, "huge": ["x" * 2000] * 60, "last": 2}))
    assert document(made)["data"] == {"first": 1, "last": 2, "…": "1 left out"}


@pytest.mark.parametrize("id", ["", "x", "no token\r\nX-Evil: 1", "ABCDEFG\n", "é" * 8, "ABCDEFGHI"])
@pytest.mark.parametrize(
    "carried", [None, "evil\r\nX-Evil: 1", "FS1.é.A.ABCDEFGH.ABCDEFGH", "A.B.C." + "D" * 99, 5]
)
def test_headers_are_safe_whatever_an_error_holds(id: str, carried: object) -> None:
    error = CodedError(CODE, "x\r\ny", {CARRIED: carried, "retry_after": "1\r\n"})
    error.id = id
    made = problem(error)
    for value in made.headers.values():
        assert re.fullmatch(r"[\x20-\x7e]+", value)
    assert reread(made).code == CODE


def test_an_error_read_in_text_is_not_signed_where_its_id_fits_no_token(keyed: None) -> None:
    for trust, signed in (("checksummed", Trust.CHECKSUMMED), ("signed", Trust.SIGNED)):
        error = CodedError(CODE, "", {CODE_TRUST: trust})
        error.id = "no id"
        made = problem(error)
        assert scan(made.headers[HEADER])[0].trust is signed


def test_what_a_detail_and_data_quote_is_defused() -> None:
    """The reply names one failure, also where its body is cut or read as text."""
    made = problem(
        CodedError(CODE, f"quotes {INNER}", {"seen": [str(INNER)], INNER.token: {"x": INNER.token}})
    )
    assert {token.code for token in scan(made.body.decode())} == {CODE}


def test_secrets_that_were_put_into_data_later_are_redacted() -> None:
    error = CodedError(CODE, "x")
    error.data["headers"] = {"authorization": "Bearer abcdefghijkl"}
    error.data["x"] = float("nan")
    assert document(problem(error))["data"] == {"headers": {"authorization": "[redacted]"}, "x": "nan"}


# -- reading


PROBLEMS = {"content-type": PROBLEM}


@pytest.mark.parametrize(
    "headers",
    [
        {HEADER: ERROR.token},
        {HEADER.upper(): ERROR.token.lower()},
        {HEADER.encode(): ERROR.token.encode()},
        [(HEADER.encode(), ERROR.token.encode())],
        [("x", "y"), (HEADER.title(), "nonsense"), (HEADER, ERROR.token)],
        {HEADER: f"nonsense, {ERROR.token}"},
        CIMultiDictProxy(CIMultiDict([(HEADER, ERROR.token), (HEADER, INNER.token)])),
        httpx.Headers([(HEADER, ERROR.token), (HEADER, INNER.token)]),
    ],
)
def test_the_header_in_any_form_at_any_status(headers: Any) -> None:
    for status in (None, 100, 200, 302, 404, 500):
        found = read_reply(status, headers, b"")
        assert found == Reading(CODE, ERROR.id, "", {}, Trust.CHECKSUMMED, ERROR.token)


@pytest.mark.parametrize(
    "value", ["", "x", f"said {ERROR.token}", f"{ERROR.token}!", ERROR.token[:-1], "x" * 10**6]
)
def test_a_header_that_is_more_than_a_token_is_none(value: str) -> None:
    assert read_reply(500, {HEADER: value}, b"") == Reading()
    assert read_reply(500, {HEADER: value}, INNER.token.encode()).code == INNER.code


def test_a_signed_header_beats_one_that_anybody_could_write() -> None:
    signed = mint(CODE, ERROR.id, key=RING.current)
    for pair in ([INNER.token, signed], [signed, INNER.token]):
        found = read_reply(500, [(HEADER, value) for value in pair], b"", key=RING)
        assert (found.code, found.trust) == (CODE, Trust.SIGNED)


def test_a_flood_of_headers_ends() -> None:
    def endless() -> Iterator[tuple[str, str]]:
        while True:
            yield ("x", "y")

    assert read_reply(None, endless(), b"") == Reading()


def body(**members: Any) -> bytes:
    return json.dumps(members).encode()


def test_header_before_document_before_text() -> None:
    told = body(code="NODE.IO", instance=INNER.id, detail="d")
    assert read_reply(500, {**PROBLEMS, HEADER: ERROR.token}, told) == Reading(
        CODE, ERROR.id, "", {}, Trust.CHECKSUMMED, ERROR.token
    )
    assert read_reply(500, PROBLEMS, told) == Reading("NODE.IO", INNER.id, "d", {}, Trust.STRUCTURED, "")  # type: ignore[arg-type]  # a str equals its Code
    texted = body(code="NODE.IO", detail=str(ERROR))
    assert read_reply(500, PROBLEMS, texted).code == "NODE.IO"
    assert read_reply(500, {"content-type": "application/json"}, texted).code == CODE
    same = body(code=CODE, instance=ERROR.id, detail="d")
    assert read_reply(500, {**PROBLEMS, HEADER: ERROR.token}, same).detail == "d"
    another = body(code=CODE, instance=INNER.id, detail="d")
    assert read_reply(500, {**PROBLEMS, HEADER: ERROR.token}, another).detail == ""


@pytest.mark.parametrize("status", [None, 200, 204, 302, 399])
def test_a_body_that_is_no_failures_is_not_looked_at(status: int | None) -> None:
    for media in ("", "application/json", "text/plain", "text/event-stream", "x/problem+json"):
        for text in (problem(ERROR).body, ERROR.token.encode()):
            assert read_reply(status, {"content-type": media}, text) == Reading()
    assert read_reply(status, PROBLEMS, problem(ERROR).body).code == CODE


def test_the_type_names_it_where_the_code_was_taken_out() -> None:
    kept = {k: v for k, v in document(problem(ERROR)).items() if k in ("type", "title", "status", "detail")}
    assert read_reply(500, PROBLEMS, body(**kept)) == Reading(
        CODE, "", "the watchdog", {}, Trust.STRUCTURED, ""
    )


@pytest.mark.parametrize(
    "members",
    [
        {"code": "ERR_42"},
        {"code": 500},
        {"code": None, "type": "about:blank"},
        {"type": "urn:failsoft:code:"},
        {"type": "urn:failsoft:code:GPU.ECC"},
        {"type": ["urn:failsoft:code:NODE.IO"]},
        {"data": {"code": "NODE.IO"}},
        {"errors": [{"code": "NODE.IO"}]},
        {},
    ],
)
def test_another_programs_problem_has_no_code_of_ours_but_may_hold_a_token(members: dict[str, Any]) -> None:
    assert read_reply(500, PROBLEMS, body(**members)) == Reading()
    found = read_reply(500, PROBLEMS, body(**members, detail=str(ERROR)))
    assert (found.code, found.trust) == (CODE, Trust.CHECKSUMMED)


def test_members_of_other_types_are_left_out() -> None:
    odd = body(code=CODE, instance=["x"], detail={"a": 1}, data=[1], token=5)
    assert read_reply(500, PROBLEMS, odd) == Reading(CODE, "", "", {}, Trust.STRUCTURED, "")
    long = body(code=CODE, instance="x" * 10**5, detail="d" * 10**5, data={"a": "b" * 10**5})
    found = read_reply(500, PROBLEMS, long)
    assert (found.id, len(found.detail) <= 8192, len(found.data["a"]) <= 2048) == ("", True, True)


@pytest.mark.parametrize(
    "wire",
    [
        b"\xef\xbb\xbf" + body(code=CODE, detail="d"),
        json.dumps({"code": CODE, "detail": "naïve"}, ensure_ascii=False).encode("latin-1"),
    ],
)
def test_a_document_in_another_charset_is_one_all_the_same(wire: bytes) -> None:
    found = read_reply(500, PROBLEMS, wire)
    assert (found.code, found.trust) == (CODE, Trust.STRUCTURED)


# -- trust


def test_with_a_key_a_document_is_believed_as_far_as_its_token(keyed: None) -> None:
    made = problem(ERROR)
    assert reread(made).trust is Trust.SIGNED
    assert read_reply(500, PROBLEMS, made.body).trust is Trust.SIGNED
    assert reread(made, key=b"another").code == CODE  # named, by the document, but no more than that
    assert reread(made, key=b"another").trust is Trust.CHECKSUMMED
    for members in (
        {},
        {"token": mint(CODE, ERROR.id, key=b"")},
        {"token": mint(CODE, INNER.id)},  # signed, for another occurrence: replayed
        {"token": mint("NODE.IO", ERROR.id)},
        {"token": f"{ERROR.token} x"},
        {"data": {CODE_TRUST: "signed"}},
        {"data": {CODE_TRUST: "structured"}},
    ):
        forged = body(code=CODE, instance=ERROR.id, **members)
        found = read_reply(500, PROBLEMS, forged)
        assert (found.code, found.trust) == (CODE, Trust.CHECKSUMMED)
        raised = error_from_reply(500, PROBLEMS, forged)
        assert raised.trust is Trust.CHECKSUMMED
        assert scan(raised.token, key=RING)[0].trust is Trust.CHECKSUMMED


@pytest.mark.parametrize("said", ["checksummed", "heuristic", "none"])
def test_a_server_may_believe_itself_less(keyed: None, said: str) -> None:
    members = {"code": CODE, "instance": ERROR.id, "token": mint(CODE, ERROR.id), "data": {CODE_TRUST: said}}
    trust = Trust[said.upper()]
    for headers in (PROBLEMS, {**PROBLEMS, HEADER: members["token"]}):
        assert read_reply(500, headers, body(**members)).trust is trust


def test_without_a_key_a_document_is_the_servers_own_word() -> None:
    assert read_reply(500, PROBLEMS, body(code=CODE)).trust is Trust.STRUCTURED
    assert (
        read_reply(500, PROBLEMS, body(code=CODE, data={CODE_TRUST: "checksummed"})).trust
        is Trust.CHECKSUMMED
    )
    assert read_reply(500, PROBLEMS, body(code=CODE, data={CODE_TRUST: "nonsense"})).trust is Trust.STRUCTURED


# -- errors made of replies, and clients' exceptions


def test_a_reply_becomes_the_error_again() -> None:
    made = problem(CodedError("BACKPRESSURE.OVERLOADED", "full", {"retry_after": 3, "queue": 9}))
    error = error_from_reply(made.status, made.headers, made.body)
    assert (error.code, error.detail) == ("BACKPRESSURE.OVERLOADED", "full")
    assert error.data == {"retry_after": 3, "queue": 9, "status": 503}
    assert error.token == made.headers[HEADER]
    assert error.trust is Trust.STRUCTURED


def test_a_reply_without_a_name_is_named_by_the_caller() -> None:
    error = error_from_reply(
        502, {"Retry-After": "9"}, b"<html>Bad \xff Gateway", code="UPSTREAM.BAD_GATEWAY"
    )
    assert (error.code, error.data) == ("UPSTREAM.BAD_GATEWAY", {"status": 502, "retry_after": 9})
    assert error.detail == "<html>Bad � Gateway"
    assert error.trust is Trust.STRUCTURED
    assert error_from_reply(500, {}, b"").code == "UPSTREAM.SERVER_ERROR"


def test_a_server_does_not_choose_the_errors_token() -> None:
    told = body(code=CODE, instance=ERROR.id, data={CARRIED: INNER.token, CODE_TRUST: "structured"})
    error = error_from_reply(500, PROBLEMS, told)
    assert (error.token, error.data) == (ERROR.token, {"status": 500})


def test_what_a_server_wrote_is_defused_in_the_error() -> None:
    told = body(code=CODE, detail=f"x {INNER}", data={"a": [INNER.token], "status": 200, INNER.token: 1})
    for headers, wire in ((PROBLEMS, told), ({}, f"{ERROR.token} {INNER}".encode())):
        error = error_from_reply(500, headers, wire)
        assert (error.code, error.data["status"]) == (CODE, 500)
        assert scan(f"{error.detail} {json.dumps(error.data)}") == []


@pytest.fixture
def no_prompts() -> Iterator[None]:
    set_prompt_budget(0)
    yield
    set_prompt_budget(2048)


def test_a_body_that_is_no_problem_keeps_the_prompt_budget(no_prompts: None) -> None:
    error = error_from_reply(400, {}, b"prompt too long: my secret prompt")
    assert "my secret" not in str(error)


def responses(made: Problem) -> Iterator[Exception]:
    request = httpx.Request("POST", "http://h/")
    held = httpx.Response(made.status, headers=made.headers, content=made.body, request=request)
    yield httpx.HTTPStatusError("x", request=request, response=held)
    kept = requests.Response()
    kept.status_code, kept._content = made.status, made.body
    kept.headers.update(made.headers)
    yield requests.HTTPError("x", response=kept)
    headers = CIMultiDictProxy(CIMultiDict(made.headers))
    yield ClientResponseError(
        RequestInfo(URL("http://h/"), "POST", headers, URL("http://h/")),
        (),
        status=made.status,
        headers=headers,
    )


def test_a_clients_exception_names_the_reply_that_it_holds() -> None:
    for exc in responses(problem(ERROR)):
        found = read_exception(exc)
        assert (found.code, found.id) == (CODE, ERROR.id)
        assert facts_of(exc)["status"] == 500
        again = reread(problem(exc))
        assert (again.code, again.id) == (CODE, ERROR.id)
    assert read_exception(ValueError("x")) == Reading()
    fake = ValueError("x")
    fake.headers = {HEADER: ERROR.token}  # type: ignore[attr-defined]  # not an HTTP client's
    fake.status = 500  # type: ignore[attr-defined]  # likewise
    assert read_exception(fake) == Reading()
    assert facts_of(fake) == {}


def test_a_response_that_was_not_read_is_not_read_from_the_network() -> None:
    touched: list[str] = []

    class Network:
        def __getattr__(self, name: str) -> Any:
            touched.append(name)
            raise AttributeError(name)

    unread = requests.Response()
    unread.status_code, unread.raw = 500, Network()
    assert read(unread) == Reading()
    assert facts_of(requests.HTTPError("x", response=unread)) == {"status": 500}
    assert touched == []
    unread.headers[HEADER] = ERROR.token
    assert code_of(unread) == CODE


@given(
    st.none() | st.integers(0, 999),
    st.dictionaries(st.sampled_from([HEADER, "content-type", "x"]) | st.text(), st.text() | st.just(PROBLEM)),
    st.binary()
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.just("NODE.IO"),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["code", "data", "detail", "token", "type"]) | st.text(), inner)
        ),
    ).map(lambda value: json.dumps(value).encode()),
)
def test_anything_is_read(status: int | None, headers: dict[str, str], wire: bytes) -> None:
    found = read_reply(status, headers, wire)
    assert found.code in (None, "NODE.IO")
    error_from_reply(status or 500, headers, wire)


@pytest.mark.parametrize(
    "wire", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff" * 100, b"{", b"5" * 5000, b'"\\ud800"']
)
def test_nonsense_is_read(wire: bytes) -> None:
    assert read_reply(500, PROBLEMS, wire) == Reading()
    assert read_reply(500, PROBLEMS, wire + b" " + ERROR.token.encode()).code == CODE
