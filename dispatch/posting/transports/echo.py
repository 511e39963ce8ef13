"""What a server's refusal repeats of the request: FastAPI's 422 holds the rejected input, as JSON or as the
repr of it in a JSON string. The prompt in it belongs neither into a failure nor into a log; the rest, which
says why, does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

LONG: Final = 48
"""Characters from which on any text of a request is looked for; one that is called a prompt always is."""
RUN: Final = 16
"""Letters and digits of a request that count as repeated: fewer are anybody's words."""
LEAST: Final = 4
"""Letters and digits that a whole prompt must have to be looked for."""
MOST: Final = 1 << 18
"""Characters of a request's texts that are compared, from its beginning."""
PLACES: Final = 32
"""How many places of a request that begin alike are compared."""
GONE: Final = "[of the request]"

_PROMPT: Final = re.compile(
    r"prompt|message|content|input|text|query|question|solution|answer", re.IGNORECASE
)
# An escaped character, as JSON, a repr, and either of them in the other have it; or a letter, or a digit.
_ESCAPE: Final = r"\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[\s\S])"
_ESCAPED: Final = re.compile(_ESCAPE)
_LETTER: Final = re.compile(_ESCAPE + r"|[^\W_]")
_OTHERS: Final = re.compile(r"[\W_]+")
_STEP: Final = RUN // 2


def without_echo(text: str, sent: bytes) -> str:
    """``text`` without what it repeats of ``sent``, a request's JSON: prompts and other long texts, and lists
    of numbers, whatever is escaped, quoted or broken how. Linear in ``text`` times the request."""
    letters, spans = _letters(text)
    whole = [one for one in _texts(_decoded(sent)) if len(one) >= LEAST]
    held = "\0".join(whole)[:MOST]
    marks = bytearray(len(letters))
    for start in range(0, len(letters) - _STEP + 1, _STEP):
        if not marks[start]:
            begin, end = _run(letters, start, held)
            if end - begin >= RUN:
                marks[begin:end] = b"\1" * (end - begin)
    for one in whole:
        if len(one) < RUN:  # to be found as a whole or not at all
            for short in re.finditer(re.escape(one), letters):
                marks[short.start() : short.end()] = b"\1" * len(one)
    out, at = [], 0
    for found in re.finditer(b"\x01+", bytes(marks)):
        out += [text[at : spans[found.start()][0]], GONE]
        at = spans[found.end() - 1][1]
    return "".join(out) + text[at:]


def _run(letters: str, start: int, held: str) -> tuple[int, int]:
    """From where to where ``letters`` say around ``start`` what ``held`` says, at the best of some places."""
    best, place = (start, start), -1
    for _ in range(PLACES):
        place = held.find(letters[start : start + _STEP], place + 1)
        if place < 0:
            break
        begin, end = start, start + _STEP
        while (
            begin > 0 and place + begin - start > 0 and letters[begin - 1] == held[place + begin - start - 1]
        ):
            begin -= 1
        while (
            end < len(letters)
            and place + end - start < len(held)
            and letters[end] == held[place + end - start]
        ):
            end += 1
        best = max(best, (begin, end), key=lambda run: run[1] - run[0])
    return best


def _letters(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The letters and digits of ``text``, and where each stands in it."""
    letters, spans = [], []
    for found in _LETTER.finditer(text):
        letter = found.group() if len(found.group()) == 1 else _meant(found)
        if letter.isalnum():
            letters.append(letter)
            spans.append(found.span())
    return "".join(letters), spans


def _meant(escape: re.Match[str]) -> str:
    """The character that an escape is for; none for one of a letter, which ends a line or quotes."""
    code = escape.group(1) or escape.group(2)
    return chr(int(code, 16)) if code else ""


def _decoded(sent: bytes) -> Any:
    try:
        return msgspec.json.decode(sent)
    except (msgspec.DecodeError, RecursionError):
        return None


def _texts(value: Any, *, prompt: bool = False) -> Iterator[str]:
    """The letters and digits of what is to be looked for in a request, text by text."""
    if isinstance(value, dict):
        for name, held in value.items():
            yield from _texts(held, prompt=prompt or _PROMPT.search(name) is not None)
    elif isinstance(value, list):
        if len(value) >= RUN and all(isinstance(one, int | float) for one in value[:RUN]):
            yield _letters_of(value[:MOST])
        else:
            for held in value:
                yield from _texts(held, prompt=prompt)
    elif isinstance(value, str) and (prompt or len(value) >= LONG):
        yield _letters_of(value[:MOST])


def _letters_of(value: str | list[Any]) -> str:
    # Escaped first: what is a backslash in the text is one in whatever repeats it.
    return _OTHERS.sub("", _ESCAPED.sub(_meant, msgspec.json.encode(value).decode()))
