"""The model alone: encoding loses nothing, drawing is a distribution, training takes what it is given."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.engines.embedded.ngram import (
    CONTEXT,
    EOS,
    MAX_TEXT_BYTES,
    BadModel,
    NGram,
    Vocabulary,
    packaged_corpus,
    read_text,
)

CORPUS = read_text(packaged_corpus())
VOCABULARY = Vocabulary(CORPUS)
MODEL = NGram(VOCABULARY, CORPUS)


def continued(model: NGram, prompt: str, temperature: float, seed: int = 0, top_p: float = 1.0) -> str:
    context = (EOS, *VOCABULARY.encode(prompt))
    drawn: list[int] = []
    rng = random.Random(seed)
    while len(drawn) < 60:
        token = model.next_id(context, temperature, top_p, rng)
        if token == EOS:
            break
        drawn.append(token)
        context = (*context, token)
    return VOCABULARY.decode(drawn)


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_encoding_loses_nothing(text: str) -> None:
    ids = VOCABULARY.encode(text)
    assert VOCABULARY.decode(ids) == text
    assert all(0 <= token < len(VOCABULARY) and token != EOS for token in ids)


def test_the_whole_corpus_round_trips_in_few_tokens() -> None:
    ids = VOCABULARY.encode(CORPUS)
    assert VOCABULARY.decode(ids) == CORPUS
    assert len(ids) < len(CORPUS) / 3


def test_a_lone_surrogate_is_encoded_and_does_not_raise() -> None:
    assert VOCABULARY.decode(VOCABULARY.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize(("left", "right"), [(3, 4), (9, 9), (0, 5), (8, 7)])
def test_sums_are_right_at_temperature_zero(left: int, right: int) -> None:
    prompt = f"Question: What is {left} plus {right}? Answer:"
    assert continued(MODEL, prompt, 0) == f" {left} plus {right} is {left + right}."


def test_sums_are_sometimes_right_and_sometimes_wrong_at_temperature_one() -> None:
    said = [continued(MODEL, "Question: What is 3 plus 4? Answer:", 1.0, seed) for seed in range(100)]
    right = sum(text.endswith(" is 7.") for text in said)
    assert 20 < right < 95


@given(
    prompt=st.text(max_size=30),
    temperature=st.floats(0, 5, allow_nan=False),
    top_p=st.floats(0.01, 1),
    seed=st.integers(),
)
def test_every_prompt_can_be_continued(prompt: str, temperature: float, top_p: float, seed: int) -> None:
    context = (EOS, *VOCABULARY.encode(prompt))
    token = MODEL.next_id(context, temperature, top_p, random.Random(seed))
    assert 0 <= token < len(VOCABULARY)


def test_a_tiny_top_p_is_the_same_as_temperature_zero() -> None:
    assert continued(MODEL, "The", 1.0, seed=5, top_p=1e-9) == continued(MODEL, "The", 0)


def test_a_tiny_temperature_neither_overflows_nor_divides_by_zero() -> None:
    prompt = "Question: What is 3 plus 4? Answer:"
    assert continued(MODEL, prompt, 1e-300, seed=5) == " 3 plus 4 is 7."


def test_only_the_last_tokens_count() -> None:
    near = VOCABULARY.encode(" is worth more than an apology")[-CONTEXT:]
    rng = random.Random(1)
    alone = MODEL.next_id(tuple(near), 0, 1.0, rng)
    assert MODEL.next_id((7, 8, 9, *near), 0, 1.0, rng) == alone


def test_words_outside_the_vocabulary_are_learned_in_bytes() -> None:
    model = NGram(VOCABULARY, "The xylophone zigzagged.")
    assert continued(model, "The", 0) == " xylophone zigzagged."


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("not a text")
    assert read_text(tmp_path) == "first\n\nsecond"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "can't read"),
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"\xff\xfe\xfd", "can't read"),
        (b"a" * (MAX_TEXT_BYTES + 1), "larger"),
    ],
)
def test_a_bad_text_is_named(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "model.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadModel, match=complaint):
        read_text(path)


def test_a_folder_without_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"no \*\.txt"):
        read_text(tmp_path)
