"""Carriers: a CodedError that goes as JSON arrives as the same failure, whatever its texts and data hold."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from protocol import CodedError, Events, Trust
from protocol.carriers.error_file import read as read_file
from protocol.carriers.error_file import write
from protocol.carriers.http_problem import problem
from protocol.carriers.http_reply import error_from_reply, read_reply
from protocol.carriers.log_line import read_line
from tests.properties.examples import prop
from tests.properties.strategies import PIECES
from tests.properties.test_hostile_properties import answered, whole
from tests.properties.test_transport_properties import errors


@prop(errors)
def test_an_error_file_gives_it_back_equal(error: CodedError) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "error.json")
        assert write(path, error)
        got = read_file(path)
    assert got is not None
    assert (got.code, got.id, got.detail, got.data) == (error.code, error.id, error.detail, error.data)
    assert (got.origin, got.chain, got.token) == (error.origin, error.chain, error.token)
    assert got == error


@prop(errors)
def test_a_problem_gives_it_back(error: CodedError) -> None:
    reply = problem(error)
    assert all(value.isascii() and value.isprintable() for value in reply.headers.values())
    for headers in (
        reply.headers,
        {k.title(): v for k, v in reply.headers.items()},
        list(reply.headers.items()),
    ):
        found = read_reply(reply.status, headers, reply.body)
        assert (found.code, found.id) == (error.code, error.id)
    without = {k: v for k, v in reply.headers.items() if k != "x-failsoft-code"}
    found = read_reply(reply.status, without, reply.body)
    assert (found.code, found.id) == (error.code, error.id)
    named = error_from_reply(reply.status, reply.headers, reply.body)
    assert (named.code, named.id) == (error.code, error.id)


@prop(errors)
def test_an_event_gives_it_back(error: CodedError) -> None:
    lines: list[str] = []
    sink = type("Sink", (), {"error": lambda self, line: lines.append(line)})()
    Events(sink, run="run", role="test").emit("engine.exited", level="error", error=error, key="engine/0")
    found = read_line(lines[0])
    assert json.loads(lines[0])["code"] == error.code
    assert (found.code, found.id) == (error.code, error.id)


foreign = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*PIECES, '{"code":', '"TASK.FAILED"', "}", ",", '"token":']), max_size=8).map(
        "".join
    ),
)


@prop(
    foreign,
    st.sampled_from([None, 200, 500, 503, -1]),
    st.sampled_from(["text/plain", "application/problem+json"]),
)
def test_foreign_replies_and_lines_name_nothing(text: str, status: int | None, media: str) -> None:
    for found in (
        answered(read_line, text),
        answered(read_reply, status, {"content-type": media}, text.encode("utf-8", "replace")),
        answered(read_reply, status, {"x-failsoft-code": text}, b""),
    ):
        whole(found)
        assert found.trust in (Trust.NONE, Trust.HEURISTIC)


@prop(st.binary(max_size=200), errors, st.integers(0, 2000), st.integers(0, 255))
def test_a_damaged_error_file_is_read_or_refused_and_never_raises(
    noise: bytes, error: CodedError, at: int, byte: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "error.json")
        write(path, error)
        whole_file = bytearray(path.read_bytes())
        whole_file[at % len(whole_file)] = byte
        for body in (bytes(whole_file), bytes(whole_file[: at % len(whole_file)]), noise):
            path.write_bytes(body)
            got = answered(read_file, path)
            assert got is None or type(got) is CodedError
