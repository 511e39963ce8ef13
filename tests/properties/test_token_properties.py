"""Tokens: found wherever they stand, never read as what they are not, and dead once defused."""

from __future__ import annotations

import re

from hypothesis import assume
from hypothesis import strategies as st

from protocol import Code, Trust, defuse, mint, scan
from protocol.keys import Keyring
from protocol.token import MAX_TOKEN, Token
from tests.properties.examples import prop
from tests.properties.strategies import (
    PIECES,
    SHAPE,
    UNSIGNED,
    codes,
    glues,
    ids,
    keys,
    noise,
    some_key,
    tokens,
)

cases = st.sampled_from([str, str.lower, str.title, str.swapcase, str.capitalize])


def flipped(text: str, bits: int) -> str:
    return "".join(c.lower() if bits >> n & 1 else c for n, c in enumerate(text))


# -- the round trip


@prop(codes, ids, some_key)
def test_minted_is_read_as_it_was(code: Code, id: str, key: bytes) -> None:
    raw = mint(code, id.lower(), key=key)
    assert len(raw.encode()) <= MAX_TOKEN
    assert re.fullmatch(r"[A-Z0-9_.]+", raw)
    assert scan(raw, key=key) == [Token(code, id, Trust.SIGNED if key else Trust.CHECKSUMMED, raw)]


@prop(codes, ids, some_key, st.integers(0, 2**MAX_TOKEN - 1))
def test_case_is_nothing(code: Code, id: str, key: bytes, bits: int) -> None:
    raw = mint(code, id, key=key)
    assert scan(flipped(raw, bits), key=key) == scan(raw, key=key) != []


# -- finding


@prop(codes, ids, some_key, noise, noise, cases)
def test_found_in_noise(code: Code, id: str, key: bytes, before: str, after: str, case: object) -> None:
    assume(not glues(before, after))
    raw = mint(code, id, key=key)
    found = scan(f"{before}{case(raw)}{after}", key=key)  # type: ignore[operator]
    assert [t.raw for t in found] == [raw]


@prop(st.lists(tokens, min_size=1, max_size=5), st.lists(st.sampled_from(PIECES), min_size=8, max_size=8))
def test_several_are_found_in_order_and_each_once(raws: list[str], pieces: list[str]) -> None:
    text = "".join(f" {piece} {raw}" for piece, raw in zip(pieces, [*raws, *raws[:3]], strict=False))
    assert [t.raw for t in scan(text, key=UNSIGNED)] == list(dict.fromkeys(raws))


# -- never another: whatever is done to a token, it reads as itself or as nothing


def only(raw: str, text: str, key: bytes = UNSIGNED) -> None:
    found = scan(text, key=key)
    assert all((t.raw, f"FS1.{t.code}.{t.id}") == (raw, raw[:-9]) for t in found), (raw, text, found)


@prop(codes, ids, some_key, st.integers(0, 75), st.integers(0, 75))
def test_a_slice_is_nothing(code: Code, id: str, key: bytes, start: int, end: int) -> None:
    raw = mint(code, id, key=key)
    piece = raw[start:end]
    assert len(scan(piece, key=key)) == (piece == raw)


@prop(tokens, st.integers(0, 74), st.text(max_size=3) | st.sampled_from(PIECES), st.integers(0, 4))
def test_a_piece_put_in_the_place_of_some_characters(raw: str, at: int, piece: str, gone: int) -> None:
    only(raw, raw[:at] + piece + raw[at + gone :])  # replaces, inserts (gone=0), deletes (piece="")


@prop(
    codes,
    ids,
    keys,
    st.lists(
        st.tuples(st.integers(0, 74), st.sampled_from("ABCDEFGHJKMNPQRSTVWXYZ0123456789_.")),
        min_size=1,
        max_size=4,
    ),
)
def test_characters_of_its_alphabet_replaced(
    code: Code, id: str, key: bytes, changes: list[tuple[int, str]]
) -> None:
    raw = mint(code, id, key=key)
    characters = list(raw)
    for at, to in changes:
        characters[at % len(raw)] = to
    text = "".join(characters)
    assert [t.raw for t in scan(text, key=key)] == ([raw] if text == raw else [])


@prop(tokens, st.integers(0, 74), st.integers(0, 74))
def test_two_characters_swapped(raw: str, i: int, j: int) -> None:
    characters = list(raw)
    i, j = i % len(raw), j % len(raw)
    characters[i], characters[j] = characters[j], characters[i]
    text = "".join(characters)
    assert [t.raw for t in scan(text, key=UNSIGNED)] == ([raw] if text == raw else [])


@prop(tokens, tokens, st.integers(0, 75), st.integers(0, 75), st.sampled_from(["", ".", "\n", " ", "FS1."]))
def test_halves_of_two_tokens(first: str, second: str, head: int, tail: int, glue: str) -> None:
    for found in scan(first[:head] + glue + second[tail:], key=UNSIGNED):
        assert found.raw in (first, second)
        assert f"FS1.{found.code}.{found.id}" == found.raw[:-9]


@prop(tokens, tokens, st.permutations(range(5)), st.integers(0, 31))
def test_fields_of_two_tokens_in_any_order(first: str, second: str, order: list[int], which: int) -> None:
    fields = (first.split("."), second.split("."))
    text = ".".join(fields[which >> n & 1][field] for n, field in enumerate(order))
    assert {t.raw for t in scan(text, key=UNSIGNED)} <= {first, second}


@prop(tokens, st.sampled_from(PIECES), st.integers(1, 74))
def test_cut_by_something_in_its_middle(raw: str, piece: str, at: int) -> None:
    assume(at < len(raw) and piece not in ("FS1.", "fs1", ".FS1."))
    assert scan(raw[:at] + piece + raw[at:], key=UNSIGNED) == []


_GLUE = "ABCXYZabfnrtvxumFS0189_"


@prop(tokens, st.text(_GLUE + ".", max_size=4), st.text(_GLUE, max_size=3), st.sampled_from(["", "."]))
def test_glued_to_more_of_its_alphabet_is_nothing(raw: str, before: str, after: str, dot: str) -> None:
    assume(before or after)
    assert scan(before + raw + (dot + after if after else ""), key=UNSIGNED) == []


# -- keys


@prop(codes, ids, keys, some_key)
def test_another_key_reads_nothing(code: Code, id: str, key: bytes, other: bytes) -> None:
    assume(key != other)
    assert scan(mint(code, id, key=key), key=other) == []


@prop(codes, ids, keys)
def test_unsigned_is_never_signed(code: Code, id: str, key: bytes) -> None:
    assert [t.trust for t in scan(mint(code, id, key=UNSIGNED), key=key)] == [Trust.CHECKSUMMED]


@prop(codes, ids, st.lists(keys, min_size=1, max_size=4), st.integers(0, 4), keys)
def test_a_ring_believes_its_own_and_no_other(
    code: Code, id: str, held: list[bytes], which: int, other: bytes
) -> None:
    ring = Keyring(held[0], tuple(held[1:]))
    signer = [*held, other][which % (len(held) + 1)]
    found = scan(mint(code, id, key=signer), key=ring)
    assert [t.trust for t in found] == ([Trust.SIGNED] if signer in held else [])


# -- defusing


suspects = st.lists(
    st.one_of(tokens, tokens.map(str.lower), st.sampled_from(PIECES), st.text(max_size=6)), max_size=6
).map("".join)


@prop(suspects)
def test_defused_is_dead_and_otherwise_unchanged(text: str) -> None:
    safe = defuse(text)
    assert scan(safe, key=UNSIGNED) == []
    assert SHAPE.search(safe) is None
    assert defuse(safe) == safe
    assert len(safe) == len(text)
    changed = [n for n, (a, b) in enumerate(zip(text, safe, strict=True)) if a != b]
    assert all(text[n] == "." and safe[n] == ":" for n in changed)
    assert "".join("." if n in changed else c for n, c in enumerate(safe)) == text
    assert len(changed) <= len(re.findall("fs[0-9]", text, re.IGNORECASE | re.ASCII))
    if SHAPE.search(text) is None:
        assert safe == text


@prop(codes, ids, keys, noise, noise)
def test_defused_is_dead_whatever_its_key_and_neighbours(
    code: Code, id: str, key: bytes, before: str, after: str
) -> None:
    text = f"{before}{mint(code, id, key=key)}{after}"
    assert scan(defuse(text), key=key) == []
    assert scan(f"{before}{defuse(mint(code, id, key=key))}{after}", key=key) == []
