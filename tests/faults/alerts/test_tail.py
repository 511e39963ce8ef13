"""Following a file, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.alerts.tail import LineSplitter, Tail, decode_line
from protocol import CodedError
from tests.faults.alerts.helpers import until

Batches = AsyncGenerator[list[dict[str, Any]], None]


async def drained(batches: Batches) -> list[dict[str, Any]]:
    """What one pass to the end of the file yields."""
    events: list[dict[str, Any]] = []
    while batch := await anext(batches, None):
        events += batch
    return events


@contextlib.asynccontextmanager
async def following(path: Path, **options: Any) -> AsyncIterator[tuple[Tail, Batches]]:
    tail = Tail(path, poll_interval=0.001, **options)
    async with contextlib.aclosing(tail.batches()) as batches:
        yield tail, batches


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


async def test_a_file_that_appears_later_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with following(path) as (tail, batches):
        assert await drained(batches) == []
        assert "No such file" in tail.stats.open_error
        add(path, b'{"a": 1}\n{"a": ')
        assert await drained(batches) == [{"a": 1}]
        add(path, b"2}")
        assert await drained(batches) == [], "a line is whole with its newline"
        add(path, b"\n")
        assert await drained(batches) == [{"a": 2}]
        assert (tail.stats.events, tail.stats.bad_lines) == (2, 0)


async def test_stop_ends_after_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b'{"a": 1}\n')
    tail = Tail(path, poll_interval=3600.0)
    seen: list[dict[str, Any]] = []

    async def collect() -> None:
        async for event in tail:
            seen.append(event)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(collect())
        await until(lambda: seen)
        add(path, b'{"a": 2}\n{"a": 3}')
        tail.stop()
    assert seen == [{"a": 1}, {"a": 2}, {"a": 3}], "a whole object is an event even without its newline"


async def test_truncation(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with following(path) as (tail, batches):
        add(path, b'{"a": 1}\n{"a": 2}\n{"half')
        assert len(await drained(batches)) == 2
        path.write_bytes(b'{"b": 1}\n')
        await drained(batches)
        await drained(batches)
        assert tail.stats.truncations == 1
        add(path, b'{"b": 2}\n')
        await drained(batches)
        assert tail.stats.events == 4
        assert tail.stats.half_lines == 1


async def test_rotation_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b'{"a": 1}\n')
    seen: list[dict[str, Any]] = []
    async with following(path) as (tail, batches):
        seen += await drained(batches)
        with path.open("ab") as old:
            path.rename(tmp_path / "events.jsonl.1")
            seen += await drained(batches)  # no file has the name just now
            old.write(b'{"a": 2}\n')
        add(path, b'{"a": 3}\n')
        while len(seen) < 3:
            seen += await drained(batches)
        assert tail.stats.rotations == 1
    assert [event["a"] for event in seen] == [1, 2, 3]


async def test_rubbish_is_counted_and_followed_by_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b"\xff\xfe\x00binary\n[1]\nnull\nnot json\n{broken\n" + b"[" * 10_000 + b"\n\n  \n{}\n")
    tail = Tail(path, follow=False)
    assert [event async for event in tail] == [{}]
    assert tail.stats.bad_lines == 6
    assert len(caplog.records) == 1, "said once, counted always"


async def test_leading_nuls_a_bom_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b'\xef\xbb\xbf{"a": 1}\r\n\0\0\0\0{"a": 2}\n')
    assert [event async for event in Tail(path, follow=False)] == [{"a": 1}, {"a": 2}]


async def test_a_line_without_end_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b'{"a": "' + b"x" * 3_000_000 + b'"}\n{"b": 1}\n')
    tail = Tail(path, follow=False)
    assert [event async for event in tail] == [{"b": 1}]
    assert tail.stats.long_lines == 1


async def test_half_a_line_at_the_end_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b'{"a": 1}\n{"a": ')
    tail = Tail(path, follow=False)
    assert [event async for event in tail] == [{"a": 1}]
    assert (tail.stats.half_lines, tail.stats.bad_lines) == (1, 0)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
async def test_what_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(CodedError) as caught:
        _ = [event async for event in Tail(path, follow=False)]
    assert caught.value.code == "CONFIG.INVALID"
    async with following(path) as (tail, batches):  # live, it may yet become one
        assert await drained(batches) == []
        assert tail.stats.open_error


@pytest.mark.parametrize("line", [b'{"loss": NaN}', b'{"loss": Infinity}'])
def test_numbers_that_json_lacks_are_read(line: bytes) -> None:
    assert decode_line(line) is not None


async def test_no_descriptor_is_left(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b"{}\n")
    for _ in range(5):
        async with following(path) as (_tail, batches):
            await anext(batches)
    assert str(path) not in [file.path for file in psutil.Process().open_files()]


_LINES = st.one_of(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=8), max_size=3).map(
        lambda value: json.dumps(value).encode()
    ),
    st.binary(max_size=30).map(lambda value: value.replace(b"\n", b"")),
    st.integers(90, 130).map(lambda size: b'{"x": "' + b"x" * size + b'"}'),
)


def _cuts(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in at} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(st.lists(_LINES, max_size=8), st.lists(st.integers(0, 10_000), max_size=6))
def test_any_cuts_give_the_same_lines(lines: list[bytes], at: list[int]) -> None:
    data = b"\n".join(lines)
    whole, cut = LineSplitter(100), LineSplitter(100)
    expected = whole.feed(data)
    assert [line for piece in _cuts(data, at) for line in cut.feed(piece)] == expected
    assert cut.long_lines == whole.long_lines
    assert cut.reset() == whole.reset()


@settings(max_examples=50)
@given(st.lists(_LINES, max_size=6), st.lists(st.integers(0, 10_000), max_size=5))
def test_a_file_written_in_any_pieces_yields_the_same_events(lines: list[bytes], at: list[int]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    expected = [
        event
        for line in lines
        if len(line) <= 100
        and (event := decode_line(line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\0"))) is not None
    ]

    async def follow(path: Path) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        async with following(path, max_line=100) as (_tail, batches):
            for piece in _cuts(data, at):
                add(path, piece)
                seen += await drained(batches)
        return seen

    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(follow(Path(folder) / "events.jsonl")) == expected


async def test_a_read_that_fails_is_tried_again_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    add(path, b'{"a": 1}\n{"a"')
    read = os.read

    def fails(fd: int, size: int) -> bytes:
        raise OSError(116, "Stale file handle")

    async with following(path) as (tail, batches):
        seen = await drained(batches)
        with monkeypatch.context() as patch:
            patch.setattr(os, "read", fails)
            seen += await drained(batches)
        assert os.read is read
        assert tail.stats.open_error == "Stale file handle"
        add(path, b": 2}\n")
        seen += await drained(batches)
    assert seen == [{"a": 1}, {"a": 2}]
    monkeypatch.setattr(os, "read", fails)
    with pytest.raises(CodedError, match="Stale file handle"):
        _ = [event async for event in Tail(path, follow=False)]
