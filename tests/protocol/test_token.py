"""A token is found wherever a text goes, and never says anything but what it was minted for."""

from __future__ import annotations

import ast
import html
import io
import json
import re
import time
from urllib.parse import quote, quote_plus, unquote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.markup import render
from rich.text import Text

from protocol import Code, Family, Trust, catalogue, defuse, mint, scan
from protocol.codes import MAX_REASON
from protocol.token import MAX_TOKEN, Token, new_id

KEY = b"k" * 32
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

reasons = st.from_regex(r"[A-Z](?:[A-Z0-9_]{0,38}[A-Z0-9])?", fullmatch=True)
codes = st.builds(lambda f, r: Code(f"{f}.{r}"), st.sampled_from(list(Family)), reasons)
ids = st.text(CROCKFORD, min_size=8, max_size=8)
keys = st.none() | st.binary(min_size=1, max_size=32)
tokens = st.builds(mint, codes, ids)
# Noise that neither glues itself to a token nor is one.
noise = st.text(max_size=80)
ALPHABET = re.compile(r"[A-Za-z0-9_.]")


def one(text: str, key: bytes | None = None) -> Token:
    found = scan(text, key=key)
    assert len(found) == 1, (text, found)
    return found[0]


@given(codes, ids, keys)
def test_round_trip(code: Code, id: str, key: bytes | None) -> None:
    raw = mint(code, id, key=key)
    assert len(raw.encode()) <= MAX_TOKEN
    assert re.fullmatch(r"[A-Z0-9_.]+", raw)
    found = one(raw, key)
    assert found == Token(code, id, Trust.SIGNED if key else Trust.CHECKSUMMED, raw)


@given(codes, keys.filter(bool), keys)
def test_another_key_never_says_signed(code: Code, key: bytes, other: bytes | None) -> None:
    # BLAKE2s pads a key with zero bytes, so two keys that differ in those alone are one key.
    assume((other or b"").ljust(32, b"\0") != key.ljust(32, b"\0"))
    assert scan(mint(code, key=key), key=other) == []


@given(codes, st.binary(min_size=1, max_size=32))
def test_a_checksum_never_says_signed(code: Code, key: bytes) -> None:
    assume(key.strip(b"\0"))
    assert one(mint(code), key).trust is Trust.CHECKSUMMED


@pytest.mark.parametrize("wrong", ["", "ABC", "ABCDEFGHI", "ABCDEFGI", "ABCDEFG.", "ÄBCDEFGH"])
def test_an_id_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="occurrence id"):
        mint("TASK.FAILED", wrong)


def test_a_malformed_code_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a code"):
        mint("TASK")


def test_ids_are_fresh() -> None:
    made = {new_id() for _ in range(2000)}
    assert len(made) == 2000
    assert all(len(id) == 8 and set(id) <= set(CROCKFORD) for id in made)


@given(noise, tokens, noise)
def test_found_in_arbitrary_noise(before: str, raw: str, after: str) -> None:
    assume(not ALPHABET.match(before[-1:]) and not ALPHABET.match(after[:1]))
    assert one(f"{before}{raw}{after}").raw == raw


@given(st.lists(tokens, max_size=6), noise)
def test_every_token_is_found_in_order_and_each_once(raws: list[str], between: str) -> None:
    text = f"\n{between} ".join([*raws, *raws])
    assume(not scan(between))
    assert [t.raw for t in scan(text)] == list(dict.fromkeys(raws))


@given(tokens, st.data())
def test_any_slice_is_the_token_or_nothing(raw: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, len(raw)))
    assert scan(raw[start:end]) == ([one(raw)] if end - start == len(raw) else [])


@given(tokens, st.data())
def test_any_mutation_is_the_same_code_or_nothing(raw: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(raw) - 1))
    to = data.draw(st.characters() | st.sampled_from(CROCKFORD + "._"))
    text = raw[:at] + to + raw[at + 1 :]
    same = text.upper() == raw and text.isascii()
    assert [t.raw for t in scan(text)] == ([raw] if same else [])


@given(tokens, st.text(min_size=1, max_size=6), st.data())
def test_any_insertion_is_the_same_code_or_nothing(raw: str, piece: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(raw)))
    for found in scan(raw[:at] + piece + raw[at:]):
        assert found.raw == raw


@given(tokens, st.data())
def test_any_deletion_is_nothing(raw: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(raw) - 1))
    assert scan(raw[:at] + raw[at + 1 :]) == []


@given(tokens, tokens)
def test_pieces_of_two_tokens_make_no_third(first: str, second: str) -> None:
    a, b = first.split("."), second.split(".")
    for n in range(1, 5):
        for found in scan(".".join(a[:n] + b[n:])):
            assert found.raw in (first, second)


@given(tokens, st.data())
def test_any_change_of_case_is_the_same_token(raw: str, data: st.DataObject) -> None:
    flips = data.draw(st.lists(st.booleans(), min_size=len(raw), max_size=len(raw)))
    text = "".join(c.lower() if flip else c for c, flip in zip(raw, flips, strict=True))
    assert one(text) == one(raw)


@pytest.mark.parametrize(
    "glued", ["x{}", "{}x", "9{}", "_{}", ".{}", "{}.x", "{}_", "{}0", "a.{}", "FS1.{}", "{0}{0}", "{0}.{0}"]
)
def test_a_glued_token_is_none(glued: str) -> None:
    assert scan(glued.format(mint("TASK.FAILED"))) == []


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "({})",
        "[{}]",
        "'{}'",
        '"{}"',
        "<{}>",
        "{}.",
        "{},",
        "{}:",
        "{}-x",
        "x-{}",
        "={}",
        "/{}/",
        "é{}é",
    ],
)
def test_punctuation_does_not_glue(around: str) -> None:
    assert one(around.format(mint("TASK.FAILED"))).code == "TASK.FAILED"


BEFORE = [
    "",
    "\n",
    "\t",
    "\r\n",
    "\0",
    "\x07",
    "\x1b[31m",
    "\x7f",
    "\u2028",
    "\ud800",
    "é",
    "\U000e0001",
    "'",
    '"',
    "<",
    "&",
    "%",
    "\\",
]


@pytest.mark.parametrize("before", BEFORE, ids=ascii)
@pytest.mark.parametrize("after", ["", "\n", "\x1b[0m", "'", "\\", " said no.", "\U000e0001"], ids=ascii)
@pytest.mark.parametrize(
    "through",
    [
        str.lower,
        str.upper,
        repr,
        lambda t: repr(repr(t)),
        lambda t: repr(t.encode("utf-8", "replace")),
        ascii,
        json.dumps,
        lambda t: json.dumps(json.dumps({"error": {"message": t}})),
        lambda t: json.dumps(t, ensure_ascii=False),
        html.escape,
        lambda t: quote(t, errors="replace"),
        lambda t: quote_plus(t, errors="replace"),
        lambda t: quote(t, errors="replace").lower(),
        lambda t: t.encode("utf-8", "replace").decode("latin-1"),
        lambda t: t.encode("ascii", "backslashreplace").decode(),
        lambda t: t.encode("ascii", "xmlcharrefreplace").decode(),
        lambda t: t.replace("\n", " "),
    ],
)
def test_survives(before: str, after: str, through: object) -> None:
    raw = mint("WEIGHTS.REFIT_ABORTED", "ABCDEFGH")
    found = one(through(f"{before}{raw}{after}"))  # type: ignore[operator]
    assert (found.code, found.raw) == ("WEIGHTS.REFIT_ABORTED", raw)


def test_survives_a_repr_that_is_read_back() -> None:
    raw = mint("TASK.FAILED")
    assert one(ast.literal_eval(repr(f"\n{raw}\t"))).raw == raw
    assert one(unquote(quote(f"\n{raw}\t"))).raw == raw


@pytest.mark.parametrize("system", ["standard", "256", "truecolor"])
@pytest.mark.parametrize(
    "style",
    ["bold red", "rgb(255,128,0)", "bold rgb(255,128,0) on rgb(10,20,30)", "underline italic color(200)"],
)
def test_survives_colours(system: str, style: str) -> None:
    raw = mint("ENGINE.EXITED")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=system, width=200)  # type: ignore[arg-type]
    console.print(Text.assemble(("said ", "green"), (raw, style), (" then", "blue")))
    assert "\x1b[" in out.getvalue()
    assert one(out.getvalue()).raw == raw
    assert one(repr(out.getvalue())).raw == raw
    assert one(json.dumps(out.getvalue())).raw == raw


@pytest.mark.parametrize("before", ["\x1b[K", "\x1b[m\x1b[K", "\x1b[2J", "\x1b[1;31m\x1b[K"], ids=ascii)
def test_survives_other_terminal_sequences(before: str) -> None:
    raw = mint("ENGINE.EXITED")
    assert one(f"{before}{raw}\x1b[K").raw == raw


@given(tokens)
def test_rich_markup_does_not_eat_it(raw: str) -> None:
    assert render(f"a {raw} b").plain == f"a {raw} b"
    assert one(render(f"[bold]{raw}[/bold] [red]x[/red]").plain).raw == raw


@given(tokens)
def test_formats_do_not_eat_it(raw: str) -> None:
    assert one("{} %s".format(raw)).raw == raw  # noqa: UP032
    assert raw % () == raw
    assert raw.format() == raw


def test_an_unknown_reason_is_itself_and_falls_to_its_family() -> None:
    found = one(mint("ENGINE.NEVER_SEEN_BEFORE"))
    assert found.code == "ENGINE.NEVER_SEEN_BEFORE"
    assert found.code not in catalogue


@pytest.mark.parametrize("body", ["FS2.TASK.FAILED.ABCDEFGH", "FS1.GPU.ECC.ABCDEFGH", "FS999.X.Y.ABCDEFGH"])
def test_an_unknown_family_or_version_is_carried_on(body: str) -> None:
    from protocol.token import _mac

    raw = f"{body}.{_mac(body, b'')}"
    assert one(f"x: {raw}!") == Token(None, "ABCDEFGH", Trust.CHECKSUMMED, raw)
    signed = f"{body}.{_mac(body, KEY)}"
    assert one(signed, KEY) == Token(None, "ABCDEFGH", Trust.SIGNED, signed)


def test_a_reason_that_this_release_would_refuse_falls_to_its_family() -> None:
    from protocol.token import _mac

    body = "FS1.ENGINE.ENDS_.ABCDEFGH"
    assert one(f"{body}.{_mac(body, b'')}").code == "ENGINE.UNKNOWN"


@given(st.lists(st.one_of(tokens, noise, st.just("FS1."), st.just(".FS1")), max_size=12).map("".join))
@example(f"{mint('TASK.FAILED')}.{mint('TASK.FAILED')}")
@example("FS1." * 20 + mint("TASK.FAILED"))
def test_defuse_kills_every_token_and_nothing_else(text: str) -> None:
    safe = defuse(text)
    assert scan(safe) == []
    assert len(safe) == len(text)
    assert all(a == b or (a, b) == (".", ":") for a, b in zip(text, safe, strict=True))
    assert defuse(safe) == safe
    if not re.search(r"[Ff][Ss][0-9]", text):
        assert safe == text


@given(tokens, keys, st.sampled_from([str, str.lower, repr, json.dumps, quote, html.escape]))
def test_defuse_kills_it_whatever_its_key_and_case(raw: str, key: bytes | None, through: object) -> None:
    code = one(raw).code
    assert code is not None
    text = through(f"\n{mint(code, key=key)}\n")  # type: ignore[operator]
    assert scan(text, key=key)
    assert scan(defuse(text), key=key) == []


@given(tokens, st.text(max_size=10), st.text(max_size=10))
def test_what_was_defused_cannot_be_armed_by_what_is_put_around_it(raw: str, before: str, after: str) -> None:
    assume(not scan(before + after))
    assert scan(f"{before}{defuse(raw)}{after}") == []


@pytest.mark.parametrize(
    "unit",
    [
        "FS1.TASK.FAILED.ABCDEFGH.ABCDEFGH ",
        "FS1.TASK.FAILED.ABCDEFGH.ABCDEFG",
        "FS1.",
        "FS1.A.",
        f"FS1.{'A' * 16}.{'A' * 40}.ABCDEFGH.ABCDEFGHX",
        f"FS999.{'A' * 17}.",
        "[0;0;0;0;0;0;0;0;0;0;0;0;0;0FS1.TASK.FAILED.ABCDEFGH.ABCDEFGH",
        "\\\\\\\\\\\\\\\\",
    ],
)
def test_ten_megabytes_of_near_tokens_take_seconds_at_most(unit: str) -> None:
    text = (unit * (10 * 1024 * 1024 // len(unit)))[: 10 * 1024 * 1024] + " " + mint("TASK.FAILED")
    began = time.perf_counter()
    found = scan(text)
    safe = defuse(text)
    took = time.perf_counter() - began
    assert [t.code for t in found] == ["TASK.FAILED"]
    assert len(safe) == len(text)
    assert took < 20, f"{took:.1f} s for 10 MB"


def test_the_longest_token_fits() -> None:
    longest = max(Family, key=len)
    assert len(mint(f"{longest}.{'A' * MAX_REASON}")) == 75 <= MAX_TOKEN
