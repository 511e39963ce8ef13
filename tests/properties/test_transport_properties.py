"""Transport: whatever carries it, and however often it is escaped on the way, a token reads the same;
and a CodedError that is pickled or copied, or sent by a carrier, is the same one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from protocol import Code, CodedError, Trust, defuse, mint, read, scan
from protocol.errors import Origin
from tests.properties.examples import prop
from tests.properties.strategies import UNSIGNED, codes, ids, some_key
from tests.properties.transports import RAY, TRANSPORTS, VEHICLES, WRAPPINGS
from tests.protocol.badly_written import KeywordArguments, NoArguments, Plain, RequiredArguments

BEFORE = (
    *("", "\n", "\t", "\r\n", "\0", "\x07", "\x7f", "\x1b[31m", "\x1b[1;38;5;200m", "\x1b[K", "é", "\u2028"),
    *("\ud800", "\U000e0001", "\xa0", "'", '"', "<", "&", "%", "\\", "/", "=", "(", "{", "100% ", "{x} "),
)
AFTER = ("", "\n", "\r\n", "\0", "\x1b[0m", "'", '"', ">", "&", "\\", "%", ".", ", then", "}", "é", "\ud800")
ways = st.lists(st.sampled_from(sorted(TRANSPORTS)), min_size=1, max_size=4)


def carried(text: str, way: list[str]) -> str:
    for name in way:
        text = TRANSPORTS[name](text)
    return text


@prop(codes, ids, some_key, st.sampled_from(BEFORE), st.sampled_from(AFTER), ways)
def test_a_token_reads_the_same_through_four_of_them(
    code: Code, id: str, key: bytes, before: str, after: str, way: list[str]
) -> None:
    raw = mint(code, id, key=key)
    text = carried(f"{before}{raw}{after}", way)
    trust = Trust.SIGNED if key else Trust.CHECKSUMMED
    assert [(t.code, t.id, t.raw, t.trust) for t in scan(text, key=key)] == [(code, id, raw, trust)]


@prop(codes, ids, st.sampled_from(BEFORE), st.sampled_from(AFTER), ways)
def test_what_was_defused_stays_dead_on_the_way(
    code: Code, id: str, before: str, after: str, way: list[str]
) -> None:
    text = defuse(f"{before}{mint(code, id, key=UNSIGNED)}{after}")
    assert scan(carried(text, way), key=UNSIGNED) == []


# -- CodedErrors

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([[1, [2.5, {"a": None}]], {"b": {"c": [True]}}, (1, "x"), b"bytes", {"token": "secret"}]),
)
facts = st.dictionaries(
    st.sampled_from(["n", "status", "é", "a b", "", "instance", "code"]), values, max_size=3
)
kinds = st.sampled_from([CodedError, Plain, KeywordArguments, NoArguments, RequiredArguments])
surroundings = st.sampled_from(["alone", "cause", "coded cause", "context", "group", "notes", "attributes"])


def made(
    kind: type[CodedError], code: Code, id: str, detail: str, data: dict[str, Any], around: str
) -> CodedError:
    origin = Origin("node-7", 42, "a1b2", "builtins.ValueError", "x")
    error = kind.__new__(kind)
    CodedError.__init__(error, code, detail, data, id=id, origin=origin)
    if around == "cause":
        error.__cause__ = ValueError("below\ud800")
    elif around == "coded cause":
        error.__cause__ = CodedError("NODE.IO", "below")
    elif around == "context":
        error.__context__ = KeyError("before")
    elif around == "group":
        error.__cause__ = ExceptionGroup("g", [ValueError("a"), CodedError("NODE.IO", "b")])
    elif around == "notes":
        error.add_note("a note \ud800")
    elif around == "attributes":
        error.engine = {"port": 30000}  # type: ignore[attr-defined]
    return error


errors = st.builds(made, kinds, codes, ids, st.text(max_size=30), facts, surroundings)


def same(got: BaseException, error: CodedError) -> None:
    assert type(got) is type(error)
    assert isinstance(got, CodedError)
    assert (got.code, got.id, got.detail, got.data) == (error.code, error.id, error.detail, error.data)
    assert (got.origin, got.chain, got.token, str(got)) == (
        error.origin,
        error.chain,
        error.token,
        str(error),
    )
    assert got.args == error.args
    assert got == error
    assert hash(got) == hash(error)
    assert getattr(got, "__notes__", None) == getattr(error, "__notes__", None)
    assert getattr(got, "engine", None) == getattr(error, "engine", None)


@prop(errors, st.lists(st.sampled_from(sorted(VEHICLES)), min_size=1, max_size=4))
def test_a_coded_error_is_itself_after_four_pickles_and_copies(error: CodedError, way: list[str]) -> None:
    got: BaseException = error
    for name in way:
        got = VEHICLES[name](got)
    same(got, error)


@prop(errors, st.lists(st.sampled_from(sorted(WRAPPINGS)), max_size=3), st.sampled_from(sorted(VEHICLES)))
def test_a_coded_error_is_read_from_whatever_carries_it(
    error: CodedError, wrappings: list[str], vehicle: str
) -> None:
    got: BaseException = VEHICLES[vehicle](error)
    for n, name in enumerate(wrappings):
        if name != RAY or "cause" not in wrappings[:n]:  # Ray drops a __cause__
            got = WRAPPINGS[name](got)
    found = read(got)
    assert (found.code, found.id, found.detail, found.data) == (
        *(error.code, error.id, error.detail, error.data),
    )
    assert found.trust is Trust.STRUCTURED


@prop(errors, st.sampled_from(["str", *sorted(TRANSPORTS)]), ways)
def test_the_text_of_a_coded_error_names_it(error: CodedError, first: str, way: list[str]) -> None:
    text = carried(TRANSPORTS.get(first, str)(str(error)), way)
    assert [(t.code, t.id) for t in scan(text, key=UNSIGNED)][:1] == [(error.code, error.id)]
