"""Prompts: what a rollout is asked, read from a JSONL file.

The file is the first thing that a run reads and the likeliest to be wrong: an export in another
format, a copy that was cut short, an array where lines were meant. All of it is read and checked
before anything is started, and each way to be wrong ends in one line that names the file, the place,
what was found and what to do about it.
"""

from __future__ import annotations

import errno
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import msgspec

from dispatch.files import shown
from protocol import CodedError, defuse

MAX_LINE_BYTES: Final = 8 * 2**20
"""Longest line. No more than this is ever read at once, whatever the path turns out to be."""
MAX_EXCERPT: Final = 60

_OWN_FIELDS: Final = frozenset({"id", "prompt", "answer", "metadata"})
_BOM: Final = b"\xef\xbb\xbf"
SURROGATE = re.compile("[\ud800-\udfff]")
_WANTED: Final = 'expected one JSON object a line, for instance {"id": "a-1", "prompt": "…"}'
_MAGIC: Final = (
    (b"\x1f\x8b", "gzip data", "unpack it first: gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "unpack it first: unzstd"),
    (b"PK\x03\x04", "a zip archive", "unpack it first: unzip"),
    (b"PAR1", "a Parquet file", "export it as JSON lines (pandas: to_json(orient='records', lines=True))"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)


class Prompt(msgspec.Struct, frozen=True):
    """One task. ``answer`` is what a reward may compare with; ``metadata`` holds the record's own
    metadata and every field that is not ours, so that nothing of a data set is lost on the way."""

    id: str
    text: str
    answer: str | None
    metadata: dict[str, Any]


def load_prompts(path: Path) -> list[Prompt]:
    """Read every prompt of a JSONL file, in the file's order.

    A record has ``prompt`` (or else ``text``), and may have ``id`` (a string or an integer; else one
    is made from the line's number), ``answer`` and ``metadata``. Blank lines and a byte order mark
    are skipped. Raises CodedError: CONFIG.MISSING when there is no such file, CONFIG.INVALID for
    everything else that is wrong with it.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except FileNotFoundError as error:
        remedy = "check the path" + ("" if path.is_absolute() else ", relative to the current folder")
        raise _coded(path, f"there is no such file; {remedy}", code="CONFIG.MISSING") from error
    except IsADirectoryError as error:
        raise _coded(path, "this is a directory; name the JSONL file in it") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        remedy = "let this user read it" if error.errno == errno.EACCES else "check the path and its disk"
        raise _coded(path, f"cannot be read ({reason}); {remedy}") from error


def _read(file: BinaryIO, path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    lines_of: dict[str, int] = {}
    for number, offset, line in _lines(file, path):
        place = _Place(path, number)
        record = _record(line, offset, place, file, first=not prompts)
        prompt = _prompt(record, place)
        earlier = lines_of.setdefault(prompt.id, number)
        if earlier != number:
            place.refuse(
                f"expected an id that no other line has, found {excerpt(prompt.id)}, which line {earlier} "
                "has too; give each prompt its own id, or leave all ids out"
            )
        prompts.append(prompt)
    if not prompts:
        raise _coded(path, f"there is no prompt in this file; {_WANTED}")
    return prompts


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Each line that is not blank: its number, its offset in bytes, and what it holds."""
    number, offset = 0, 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        start, offset = offset, offset + len(line)
        if number == 1:
            for magic, what, remedy in _MAGIC:
                if line.startswith(magic):
                    raise _coded(path, f"expected JSON lines, found {what}; {remedy}")
            if line.startswith(_BOM):
                start, line = len(_BOM), line[len(_BOM) :]
        if len(line) > MAX_LINE_BYTES:
            hint = (
                _array_hint(path) if number == 1 and line.lstrip().startswith(b"[") else "shorten or drop it"
            )
            found = f"expected at most {MAX_LINE_BYTES >> 20} MiB a line, found more"
            _Place(path, number).refuse(f"{found}; {hint}")
        if line.strip():
            yield number, start, line


class _Place(msgspec.Struct, frozen=True):
    """A line of a file, for the messages about it."""

    path: Path
    number: int

    def refuse(self, what: str) -> NoReturn:
        raise _coded(self.path, what, line=self.number)


_ARRAY = re.compile(r"\s*\[\s*(?:[\[\]{\"\-0-9]|\Z)")


def _record(line: bytes, offset: int, place: _Place, file: BinaryIO, *, first: bool) -> dict[str, Any]:
    """Decode one line to an object, or say why it is none."""
    zero = line.find(b"\0")
    if zero >= 0:
        place.refuse(
            f"expected text, found a NUL byte at byte {offset + zero} of the file; it was damaged, or is no "
            "UTF-8 text: copy or export it again"
        )
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        at = error.start
        place.refuse(
            f"expected UTF-8, found the byte 0x{line[at]:02x} at byte {offset + at} of the file (byte {at} "
            "of the line); convert it, for instance: iconv -f LATIN1 -t UTF-8"
        )
    if first and _ARRAY.match(text):
        place.refuse(f"expected one JSON object a line, found a JSON array; {_array_hint(place.path)}")
    try:
        record = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        _refuse_json(text, str(error), place, file, first=first)
    if not isinstance(record, dict):
        place.refuse(f"{_WANTED}, found {excerpt(text)}; write it as an object")
    return record


def _refuse_json(text: str, problem: str, place: _Place, file: BinaryIO, *, first: bool) -> NoReturn:
    """Say what is wrong with a line that is no JSON, guessing at how it came about."""
    broken = _surrogate_field(text)
    if broken is not None:
        place.refuse(
            f"expected Unicode text, found half of a surrogate pair (\\ud800 to \\udfff) in "
            f"{excerpt(broken)}; no engine can be sent it: remove it, or export the data again"
        )
    rest = file.readline(MAX_LINE_BYTES)
    if problem == "Input data was truncated":
        if first and rest and text.lstrip().startswith("{"):
            command = f"jq -c . {shlex.quote(shown(place.path))} > fixed.jsonl"
            place.refuse(
                "expected one whole JSON object a line, found one spread over several lines; "
                f"put each on one line: {command}"
            )
        problem = "it ends too early"
        if not rest and not text.endswith("\n"):
            problem = "the file ends in the middle of it; copy it again, or remove this line"
    place.refuse(f"{_WANTED}, found {excerpt(text)}: {problem.removeprefix('JSON is malformed: ')}")


def _surrogate_field(text: str) -> str | None:
    """The field that holds half of a surrogate pair, when that is all that is wrong with a line."""
    try:
        record = json.loads(text)  # unlike msgspec's, this decoder lets them pass
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    for field, value in record.items():
        if SURROGATE.search(json.dumps({field: value}, ensure_ascii=False)):
            return str(field)
    return None


def _prompt(record: dict[str, Any], place: _Place) -> Prompt:
    field, text = _text(record, place)
    answer = record.get("answer")
    if type(answer) is int and abs(answer) < 2**63:
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        place.refuse(f"expected 'answer' to be a string, found {kind(answer)}; quote it or leave it out")
    own = record.get("metadata")
    if own is not None and not isinstance(own, dict):
        place.refuse(f"expected 'metadata' to be an object, found {kind(own)}; write {{\"key\": value}}")
    others = {key: value for key, value in record.items() if key != field and key not in _OWN_FIELDS}
    return Prompt(_id(record, place), text, answer, {**others, **(own or {})})


def _text(record: dict[str, Any], place: _Place) -> tuple[str, str]:
    field = "prompt" if record.get("prompt") is not None else "text"
    text = record.get(field)
    if text is None or isinstance(text, list):
        if isinstance(text, list) or "messages" in record:
            where = field if isinstance(text, list) else "messages"
            place.refuse(
                f"expected 'prompt' to be a string, found a list of chat messages in {where!r}; "
                "apply the model's chat template first and write its text as 'prompt'"
            )
        fields = ", ".join(excerpt(key, 20) for key in list(record)[:6]) or "none"
        place.refuse(f"expected a field 'prompt' or 'text', found {fields}; rename the one with the prompt")
    if not isinstance(text, str):
        place.refuse(f"expected {field!r} to be a string, found {kind(text)}; quote it")
    if not text.strip():
        place.refuse(f"expected text in {field!r}, found {excerpt(text)}; fill it in or remove the line")
    return field, text


def _id(record: dict[str, Any], place: _Place) -> str:
    given = record.get("id")
    if given is None:
        return f"line-{place.number:06d}"
    if type(given) is int and abs(given) < 2**63:
        return str(given)
    if not isinstance(given, str):
        place.refuse(f"expected 'id' to be a string or an integer, found {kind(given)}; write it as a string")
    if not given.strip():
        place.refuse(f"expected text in 'id', found {excerpt(given)}; fill it in or leave the field out")
    return given


def _array_hint(path: Path) -> str:
    return f"put each element on one line: jq -c '.[]' {shlex.quote(shown(path))} > fixed.jsonl"


def _coded(path: Path, what: str, *, line: int | None = None, code: str = "CONFIG.INVALID") -> CodedError:
    where = shown(path) if line is None else f"{shown(path)}, line {line}"
    data: dict[str, Any] = {"file": str(path)} if line is None else {"file": str(path), "line": line}
    return CodedError(code, f"{where}: {what}", data)


def excerpt(text: str, limit: int = MAX_EXCERPT) -> str:
    """The beginning of foreign text, quoted, on one line, and unable to pass for one of our codes."""
    text = text.strip()
    return defuse(repr(text)) if len(text) <= limit else f"{defuse(repr(text[:limit]))} and more"


def kind(value: object) -> str:
    """What a JSON value is, in JSON's own words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
