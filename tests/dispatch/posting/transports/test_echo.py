"""A server's words without the request's: the reason stays, the prompt goes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.posting.transports.echo import GONE, without_echo

PROMPT = (
    'Let \\(x_1\\) be "the first" root of\n\t$x^2 - \\frac{5}{3}x = 0$; où est-il? 数学の問題です。 Say why.'
)
BODY = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "messages": [{"role": "user", "content": PROMPT}, {"role": "user", "content": "Be brief"}],
    "max_completion_tokens": 4096,
}
SENT = json.dumps(BODY).encode()
FASTAPI = {"type": "missing", "loc": ["body", "prompt"], "msg": "Field required", "input": BODY}
REPLIES = {
    "FastAPI": json.dumps({"detail": [FASTAPI]}),
    "FastAPI, not in ASCII": msgspec.json.encode({"detail": [FASTAPI]}).decode(),
    "a repr in a message": json.dumps({"error": {"message": str([FASTAPI]), "code": 400}}),
    "an ascii() of a repr": json.dumps({"error": {"message": ascii(str([FASTAPI]))}}),
    "plain": f"Field required: {PROMPT} / Be brief",
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
@pytest.mark.parametrize("sent", [SENT, msgspec.json.encode(BODY)], ids=["ASCII", "UTF-8"])
def test_the_reason_stays_and_the_prompt_goes(reply: str, sent: bytes) -> None:
    left = without_echo(reply, sent)
    assert "Field required" in left
    assert GONE in left
    for word in ("first", "root", "frac", "Say why", "Be brief", "数学", "est-il", "\\u6570"):
        assert word not in left


@pytest.mark.parametrize(
    "reason",
    [
        "The model `meta-llama/Llama-3.1-8B-Instruct` does not exist.",
        "max_completion_tokens is too large: 4096",
        "This model's maximum context length is 2048 tokens, however you requested 9000 tokens",
        "",
    ],
)
def test_a_reason_that_repeats_no_prompt_is_left_alone(reason: str) -> None:
    assert without_echo(reason, SENT) == reason


def test_token_ids_go_too() -> None:
    ids = list(range(1000, 1200))
    left = without_echo(f'{{"message": "bad ids {ids}"}}', msgspec.json.encode({"input_ids": ids}))
    assert left.count("1") == 0
    assert "bad ids" in left


@pytest.mark.parametrize("sent", [b"", b"{", b"null", b"[" * 100_000, b'"text"', b'{"text": 5}'])
def test_any_request(sent: bytes) -> None:
    assert without_echo("Field required", sent) == "Field required"


LONG_WORDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789éß数学", min_size=24, max_size=60)
BETWEEN = st.sampled_from(["\\", "\\frac{1}", "\n", '"', "'", "\\n", "\\\\u00e9", " - ", "\u2028", "😀"])
TELLERS = {
    "str": str,
    "repr": repr,
    "JSON": json.dumps,
    "JSON in UTF-8": lambda text: msgspec.json.encode(text).decode(),
    "ascii": ascii,
    "a repr in JSON": lambda text: json.dumps(repr(text)),
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)),
}


@pytest.mark.parametrize("tell", TELLERS.values(), ids=TELLERS)
@given(words=st.lists(LONG_WORDS, min_size=1, max_size=5), between=BETWEEN, around=st.text(max_size=20))
def test_no_long_word_of_a_prompt_is_left(
    tell: Callable[[str], str], words: list[str], between: str, around: str
) -> None:
    prompt = between.join(words)
    left = without_echo(f"{around} {tell(prompt)} {around}", msgspec.json.encode({"prompt": prompt}))
    assert not [word for word in words if tell(word).strip("\"'\\") in left]


def test_a_large_request_takes_a_moment() -> None:
    sent = msgspec.json.encode({"prompt": " ".join(f"{n * 7919:x}" for n in range(500_000))})
    reply = " ".join(f"{n * 104729:x}" for n in range(1000))[:4096]
    began = time.process_time()
    without_echo(reply, sent)
    assert time.process_time() - began < 5, "4 kB against 256 k letters"
