"""Strategies for tokens, noise and values. They draw few choices: a property runs them 200,000 times."""

from __future__ import annotations

import re
from typing import Final

from hypothesis import strategies as st

from protocol import Code, Family, mint

CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ALPHABET: Final = re.compile(r"[A-Za-z0-9_.]")
"""What glues itself to a token."""
UNSIGNED: Final = b""

_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_REASON: Final = f"{_LETTERS}0123456789_"


def _reason(text: str) -> str:
    first = text[0] if text[0] in _LETTERS else "R"
    return (first + text[1:]).rstrip("_")


families = st.sampled_from(list(Family))
reasons = st.text(_REASON, min_size=1, max_size=40).map(_reason)
codes = st.builds(lambda family, reason: Code(f"{family}.{reason}"), families, reasons)
ids = st.text(CROCKFORD, min_size=8, max_size=8)
keys = st.binary(min_size=1, max_size=32)
some_key = st.just(UNSIGNED) | keys
"""A key, or none (which signs nothing, whatever the process holds)."""
tokens = st.builds(lambda code, id: mint(code, id, key=UNSIGNED), codes, ids)

PIECES: Final = (
    *("FS1.", "fs1", ".FS1.", "FS1.TASK.", "FS1.TASK.FAILED.", "FS1.TASK.FAILED.ABCDEFGH.", "FS1_"),
    *("ABCDEFGH", ".ABCDEFGH", "0", "_", ".", "..", ":", "-", "=", "(", "[", "]", "{", "}", "%", "\\", "'"),
    *(
        '"',
        "\n",
        "\r\n",
        "\t",
        "\0",
        "\x1b",
        "\x1b[31m",
        "\x1b[0m",
        "[0;0;0",
        "[/red]",
        "[bold]",
        "%0A",
        "\\n",
    ),
    *("\\x1b", "&#x27;", "&", "é", "İ", "ſ", "\u212a", "\u0130", "\u0661", "\u2028", "\U000e0001", " ", "x"),
)
"""What makes trouble next to a token: pieces of one, escapes, letters that change their length or their
script with their case."""

noise = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
"""Any text without lone surrogates' special role: they are drawn too."""


def glues(before: str, after: str) -> bool:
    """Whether the text around a token belongs to a longer run of its alphabet."""
    return bool(ALPHABET.match(before[-1:]) or ALPHABET.match(after[:1]))


SHAPE: Final = re.compile(
    r"fs[0-9]{1,3}\.[a-z]{1,16}\.[a-z][a-z0-9_]{0,39}(?:\.[0-9a-hjkmnp-tv-z]{8}){2}", re.IGNORECASE | re.ASCII
)
"""Anything that looks like a token, whatever stands around it and whether its check holds."""
