"""Every way in which a prompt file can be wrong ends in one line that says where and what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.rollout import prompts as module
from dispatch.rollout.prompts import Prompt, load_prompts
from protocol import CodedError, mint, scan

EXAMPLES = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


def written(folder: Path, content: bytes | str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path: Path, code: str = "CONFIG.INVALID") -> CodedError:
    with pytest.raises(CodedError) as caught:
        load_prompts(path)
    error = caught.value
    assert error.code == code
    assert len(error.detail.splitlines()) == 1
    assert len(error.detail) < 600
    assert error.data["file"] == str(path)
    return error


# What is accepted


def test_the_example_file_loads() -> None:
    prompts = load_prompts(EXAMPLES)
    assert len(prompts) == 240
    sources = {prompt.metadata["source"] for prompt in prompts}
    assert len(sources) >= 8
    assert {prompt.metadata["level"] for prompt in prompts} == {"easy", "medium", "hard"}
    assert all(prompt.answer and len(prompt.text) <= 1500 for prompt in prompts)


def test_a_record_keeps_everything_it_had(tmp_path: Path) -> None:
    record = {"id": "a", "prompt": "1+1", "answer": "2", "source": "s", "metadata": {"level": 1}}
    (prompt,) = load_prompts(written(tmp_path, json.dumps(record)))
    assert prompt == Prompt("a", "1+1", "2", {"source": "s", "level": 1})


def test_a_prompt_cannot_be_changed(tmp_path: Path) -> None:
    (prompt,) = load_prompts(written(tmp_path, '{"prompt": "x"}'))
    with pytest.raises(AttributeError):
        prompt.text = "y"  # type: ignore[misc]


def test_metadata_wins_over_a_field_of_the_same_name(tmp_path: Path) -> None:
    (prompt,) = load_prompts(written(tmp_path, '{"prompt": "x", "k": 1, "metadata": {"k": 2}}'))
    assert prompt.metadata == {"k": 2}


@pytest.mark.parametrize(
    ("record", "text", "metadata"),
    [
        ({"text": "x"}, "x", {}),
        ({"prompt": "x", "text": "other"}, "x", {"text": "other"}),
        ({"prompt": None, "text": "x"}, "x", {}),
        ({"prompt": " x \n", "id": None, "answer": None, "metadata": None}, " x \n", {}),
        ({"prompt": "x", "messages": [1]}, "x", {"messages": [1]}),
    ],
)
def test_which_field_is_the_prompt(
    tmp_path: Path, record: dict[str, Any], text: str, metadata: dict[str, Any]
) -> None:
    (prompt,) = load_prompts(written(tmp_path, json.dumps(record)))
    assert prompt.text == text
    assert prompt.metadata == metadata


def test_missing_ids_are_made_from_line_numbers(tmp_path: Path) -> None:
    path = written(
        tmp_path, '\n{"prompt": "a"}\n\r\n  \n{"prompt": "b", "id": 7}\n{"prompt": "c", "id": "x"}'
    )
    assert [prompt.id for prompt in load_prompts(path)] == ["line-000002", "7", "x"]


def test_a_number_as_answer_becomes_text(tmp_path: Path) -> None:
    (prompt,) = load_prompts(written(tmp_path, '{"prompt": "x", "answer": -42}'))
    assert prompt.answer == "-42"


@pytest.mark.parametrize("content", ['{"prompt": "é"}', '\n{"prompt": "é"}\n', '{"prompt": "é"}\r\n'])
def test_a_byte_order_mark_is_accepted(tmp_path: Path, content: str) -> None:
    (prompt,) = load_prompts(written(tmp_path, "\ufeff" + content))
    assert prompt.text == "é"


def test_a_pair_of_surrogates_is_one_character(tmp_path: Path) -> None:
    (prompt,) = load_prompts(written(tmp_path, rb'{"prompt": "\ud83d\ude00"}'))
    assert prompt.text == "😀"


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    try:
        os.write(writable, b'{"prompt": "x"}\n')
        os.close(writable)
        assert load_prompts(Path(f"/dev/fd/{readable}"))[0].text == "x"
    finally:
        os.close(readable)


# Files that cannot be read


def test_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no such file; check the path" in refused(tmp_path / "no", "CONFIG.MISSING").detail
    monkeypatch.chdir(tmp_path)
    assert "relative to the current folder" in refused(Path("no"), "CONFIG.MISSING").detail


def test_a_directory(tmp_path: Path) -> None:
    assert "this is a directory" in refused(tmp_path).detail


def test_a_path_through_a_file(tmp_path: Path) -> None:
    assert "Not a directory" in refused(written(tmp_path, "{}") / "x").detail


def test_a_file_that_fails_while_it_is_read() -> None:
    assert "cannot be read (Input/output error)" in refused(Path("/proc/self/mem")).detail


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_someone_else(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "x"}')
    path.chmod(0)
    assert "let this user read it" in refused(path).detail


def test_a_name_with_line_breaks_stays_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a\nb"
    path.write_bytes(b"")
    assert "a\\nb" in refused(path).detail


def test_an_endless_line_is_not_read_whole() -> None:
    assert "at most 8 MiB" in refused(Path("/dev/zero")).detail


# Files that are something else


@pytest.mark.parametrize("content", ["", "\n", " \r\n\t\n", "\ufeff", "\ufeff\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    detail = refused(written(tmp_path, content)).detail
    assert "no prompt in this file" in detail
    assert '{"id": "a-1", "prompt": "…"}' in detail


@pytest.mark.parametrize(
    ("magic", "found"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
        (b"\xfe\xff\x00{", "UTF-16"),
    ],
)
def test_another_format_is_named(tmp_path: Path, magic: bytes, found: str) -> None:
    detail = refused(written(tmp_path, magic)).detail
    assert found in detail
    assert "; " in detail


@pytest.mark.parametrize("content", ['[{"prompt": "x"}]', '\n[\n  {"prompt": "x"}\n]\n', "[]", " [1, 2"])
def test_an_array_gets_its_own_hint(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content)
    detail = refused(path).detail
    assert "found a JSON array" in detail
    assert f"jq -c '.[]' {path} > fixed.jsonl" in detail


def test_an_array_on_one_very_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    assert "jq -c '.[]'" in refused(written(tmp_path, json.dumps(["x" * 200]))).detail


@pytest.mark.parametrize("indent", [0, 2])
def test_a_pretty_printed_object_gets_its_own_hint(tmp_path: Path, indent: int) -> None:
    path = written(tmp_path, json.dumps({"id": 1, "prompt": "x"}, indent=indent))
    detail = refused(path).detail
    assert "line 1" in detail
    assert "spread over several lines" in detail
    assert f"jq -c . {path}" in detail


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "x"}\n{"prompt": "an unfini')
    detail = refused(path).detail
    assert "line 2" in detail
    assert "the file ends in the middle of it; copy it again" in detail


# Lines that are wrong


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("id,prompt", ["one JSON object a line", "'id,prompt'", "invalid character (byte 0)"]),
        ("{'prompt': 'x'}", ["object keys must be strings"]),
        ('{"prompt": "x"} {"prompt": "y"}', ["trailing characters"]),
        ('{"prompt": NaN}', ["invalid character"]),
        ('{"prompt": "x", "n": 1e999}', ["out of range"]),
        ('{"prompt": "x"', ["it ends too early"]),
        ('"x"', ["one JSON object a line", "found '\"x\"'", "write it as an object"]),
        ("[1]", ["one JSON object a line", "'[1]'"]),
        ("null", ["'null'"]),
        ("[" * 100_000, ["recursion"]),
        ('{"question": "x", "id": 1}', ["'prompt' or 'text'", "'question', 'id'", "rename"]),
        ("{}", ["'prompt' or 'text'", "found none"]),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            ["chat messages in 'messages'", "chat template"],
        ),
        ('{"prompt": [{"role": "user", "content": "x"}]}', ["chat messages in 'prompt'", "chat template"]),
        ('{"prompt": []}', ["chat messages in 'prompt'"]),
        ('{"prompt": 3}', ["'prompt' to be a string", "a number"]),
        ('{"prompt": true}', ["true or false"]),
        ('{"text": {"a": 1}}', ["'text' to be a string", "an object"]),
        ('{"prompt": ""}', ["text in 'prompt'", "found ''", "fill it in"]),
        ('{"prompt": " \\n"}', ["text in 'prompt'"]),
        ('{"prompt": "x", "id": 1.5}', ["'id' to be a string or an integer", "a number"]),
        ('{"prompt": "x", "id": 123456789012345678901}', ["'id' to be a string or an integer"]),
        ('{"prompt": "x", "id": false}', ["'id'", "true or false"]),
        ('{"prompt": "x", "id": ["a"]}', ["'id'", "a list"]),
        ('{"prompt": "x", "id": " "}', ["text in 'id'"]),
        ('{"prompt": "x", "answer": ["a"]}', ["'answer' to be a string", "a list"]),
        ('{"prompt": "x", "answer": 0.5}', ["'answer' to be a string", "a number"]),
        ('{"prompt": "x", "metadata": "a"}', ["'metadata' to be an object", "a string"]),
        ('{"prompt": "a\\ud800b"}', ["half of a surrogate pair", "in 'prompt'"]),
        ('{"prompt": "a\\udc00"}', ["half of a surrogate pair", "in 'prompt'"]),
        ('{"prompt": "x", "metadata": {"k": "\\ud800"}}', ["half of a surrogate pair", "in 'metadata'"]),
        ('["\\ud800"]', ["one JSON object a line"]),
    ],
)
def test_a_wrong_line_is_named_and_explained(tmp_path: Path, line: str, words: list[str]) -> None:
    path = written(tmp_path, f'{{"prompt": "fine"}}\n\n{line}\n{{"prompt": "fine too"}}\n')
    error = refused(path)
    assert error.detail.startswith(f"{path}, line 3: ")
    assert error.data["line"] == 3
    assert "; " in error.detail or ": " in error.detail.removeprefix(f"{path}, line 3: ")
    for word in words:
        assert word in error.detail


@pytest.mark.parametrize(
    ("ids", "lines"),
    [(("a", "b", "a"), (1, 3)), ((1, "1"), (1, 2)), ((None, "line-000001"), (1, 2)), ((7, 8, 7), (1, 3))],
)
def test_an_id_that_is_there_twice(tmp_path: Path, ids: tuple[object, ...], lines: tuple[int, int]) -> None:
    content = "".join(json.dumps({"prompt": "x", "id": given}) + "\n" for given in ids)
    detail = refused(written(tmp_path, content)).detail
    assert f"line {lines[1]}: " in detail
    assert f"which line {lines[0]} has too" in detail


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_no_utf8(tmp_path: Path, mark: bytes) -> None:
    content = mark + b'{"prompt": "x"}\n{"prompt": "caf\xe9"}\n'
    detail = refused(written(tmp_path, content)).detail
    offset = content.index(b"\xe9")
    assert f"line 2: expected UTF-8, found the byte 0xe9 at byte {offset} of the file" in detail
    assert f"byte {offset - len(mark) - 16} of the line" in detail
    assert "iconv" in detail


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_nul_byte(tmp_path: Path, mark: bytes) -> None:
    content = mark + b'{"prompt": "a\0b"}\n'
    detail = refused(written(tmp_path, content)).detail
    assert f"line 1: expected text, found a NUL byte at byte {content.index(0)} of the file" in detail


@pytest.mark.parametrize("over", [0, 1])
def test_the_longest_line(tmp_path: Path, over: int) -> None:
    frame = len('{"prompt": ""}\n')
    content = f'{{"prompt": "{"x" * (module.MAX_LINE_BYTES - frame + over)}"}}\n'
    path = written(tmp_path, '{"prompt": "fine"}\n' + content)
    if over:
        assert "line 2: expected at most 8 MiB a line" in refused(path).detail
    else:
        assert len(load_prompts(path)) == 2


def test_foreign_text_is_cut_and_cannot_pass_for_a_code(tmp_path: Path) -> None:
    path = written(tmp_path, f"{mint('NODE.DIED')} {'y' * 10_000}")
    error = refused(path)
    assert "and more" in error.detail
    assert [token.code for token in scan(str(error))] == ["CONFIG.INVALID"]


# Whatever the bytes


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_prompts_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = written(tmp_path_factory.mktemp("any"), content)
    try:
        outcome = load_prompts(path)
    except CodedError:
        refused(path)
    else:
        assert outcome


records = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1).filter(str.strip)},
    optional={"answer": st.none() | st.text(), "metadata": st.dictionaries(st.text(), st.integers())},
)


@given(st.lists(records, min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, given_records: list[dict[str, Any]]
) -> None:
    content = b"\n".join(msgspec.json.encode(record) for record in given_records)
    prompts = load_prompts(written(tmp_path_factory.mktemp("same"), content))
    assert [prompt.text for prompt in prompts] == [record["prompt"] for record in given_records]
    assert [prompt.answer for prompt in prompts] == [record.get("answer") for record in given_records]
    assert [prompt.metadata for prompt in prompts] == [record.get("metadata", {}) for record in given_records]
