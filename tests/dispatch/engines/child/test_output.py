"""What an engine prints: drained, its end readable, its files bounded, whatever it is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dispatch.engines.child.output import MAX_BYTES, MAX_LINE, MAX_LINES, Output
from dispatch.engines.child.process import EngineProcess
from tests.dispatch.engines.processes import Tag, files_in
from tests.support.wait import until


def kept(*pieces: bytes) -> tuple[str, ...]:
    one = Output(None)
    for piece in pieces:
        one._keep(piece)
    return one.last_lines()


# -- the last lines


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((), ()),
        ((b"one\ntwo\n",), ("one", "two")),
        ((b"on", b"e\ntw", b"o"), ("one", "two")),
        ((b"dos\r\nline\r\n",), ("dos", "line")),
        ((b"\n\n",), ("", "")),
        ((b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07text \x1b[2K\x1b(B",), ("red text ",)),
        ((b"\x1b[", b"0"), ("0",)),
        ((b"a\0b\x08c\x1f\tT\xc2\x85\xe2\x80\xa8",), ("a\ufffdb\ufffdc\ufffd\tT\ufffd\ufffd",)),
        ((b"\xff\xfe caf\xc3\xa9 \xf0\x9f\x98",), ("\ufffd\ufffd café \ufffd",)),
        ((b"form\x0cfeed\x1cis one line",), ("form\ufffdfeed\ufffdis one line",)),
    ],
)
def test_last_lines_can_be_read(pieces: tuple[bytes, ...], lines: tuple[str, ...]) -> None:
    assert kept(*pieces) == lines


@pytest.mark.parametrize("ended", [b"\r", b"\r\n", b"\n", b""])
def test_of_a_progress_bar_the_last_state(ended: bytes) -> None:
    states = [f"\r{n:5d}/5000 [{'#' * 80}]".encode() for n in range(5001)]
    assert len(b"".join(states)) > 4 * MAX_BYTES
    for pieces in ([b"loading\n", *states, ended], [b"loading\n" + b"".join(states) + ended]):
        assert kept(*pieces) == ("loading", " 5000/5000 [" + "#" * 80 + "]"), "nothing before it is lost"
        after = kept(*pieces, b"\nTraceback\n")
        assert [line for line in after if line][-1] == "Traceback"
        assert after[0] == "loading"


def test_a_bar_that_returns_in_the_middle_of_a_read() -> None:
    assert kept(b"10%\r", b"20%", b"\r30%\r", b"done\nnext") == ("done", "next")
    assert kept(b"10%", b"\r") == ("10%",)


def test_a_line_without_end() -> None:
    one = Output(None)
    for _ in range(20):
        one._keep(b"x" * (1 << 20))
    (line,) = one.last_lines()
    assert MAX_LINE < len(line) < MAX_LINE + 100
    assert "characters cut" in line
    one._keep(b"\nend\n")
    assert one.last_lines() == ("end",), "of a line whose beginning is lost nothing is given out"


def test_what_is_kept_is_bounded() -> None:
    one = Output(None)
    for n in range(10_000):
        one._keep(f"{n} {'y' * 200}\n".encode())
    assert len(one._tail) <= MAX_BYTES
    assert len(one.last_lines()) == MAX_LINES
    assert one.last_lines()[-1].startswith("9999 ")
    assert one.last_lines()[0].startswith("9800 ")


@pytest.mark.parametrize(
    "text", [b"\x1b", b"\x1b[", b"\x1b]", b"\r", b"\0", b"FS1.", b"\n", b"\x1b[0", b"\xc2", b"\r\n"]
)
def test_nothing_costs_more_than_its_length(text: bytes) -> None:
    """A model may print what it likes: no pattern here backtracks. The test's time limit is the check."""
    one = Output(None)
    for _ in range(8):
        one._keep(text * (1 << 18))
        one.last_lines()


# -- of a process


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_a_full_file_system_stops_nothing(tmp_path: Path) -> None:
    """A tmpfs of 1 MiB: the engine's 4 MB are read to their end, the trouble is in its last lines."""
    script = f"""
import asyncio, sys
from dispatch.engines.child.process import EngineProcess
async def main():
    engine = await EngineProcess.spawn(
        (sys.executable, "-c", "for n in range(40000): print('x' * 99)\\nprint('the end')"),
        log_path={str(tmp_path / "log")!r},
    )
    report = await engine.wait(30)
    print(report.status, "|".join(line for line in report.last_lines if "x" * 99 not in line))
    await engine.stop()
asyncio.run(main())
"""
    mount = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")
    assert done.stdout.startswith("0 "), done.stderr
    assert done.stdout.endswith("the end\n")


# -- a real engine


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("for _ in range(100): sys.stdout.write('x' * 1_000_000)", "characters cut"),
        ("for n in range(1_000_000): sys.stdout.write(f'\\r{n:99}')", f"{999_999:99}"),
        ("for _ in range(100): sys.stdout.buffer.write(bytes(range(256)) * 4000)", "\ufffd"),
    ],
)
async def test_hundred_megabytes_of_anything(tag: Tag, tmp_path: Path, script: str, last: str) -> None:
    engine = await EngineProcess.spawn(
        (sys.executable, "-c", f"import sys\n{script}"),
        env=tag.env,
        log_path=tmp_path / "log",
        log_bytes=1 << 20,
        log_files=2,
    )
    report = await engine.wait(50)
    assert report.status == 0
    assert last in report.last_lines[-1]
    assert len(report.last_lines) <= MAX_LINES
    assert all(len(line) < MAX_LINE + 100 for line in report.last_lines)
    assert 1 << 20 < sum(one.stat().st_size for one in files_in(tmp_path)) <= 2 << 20
    await engine.stop()


async def test_a_log_on_a_full_device_stops_nothing(tag: Tag) -> None:
    engine = await EngineProcess.spawn(("echo", "still here"), env=tag.env, log_path="/dev/full")
    report = await engine.wait(10)
    assert report.status == 0
    assert report.last_lines[0] == "still here"
    assert "/dev/full cannot be written: No space left on device" in report.last_lines[-1]
    await engine.stop()


async def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    one = Output(tmp_path / "log", 100, 2)
    write_end = one.attach(asyncio.get_running_loop())
    os.write(write_end, b"text\n" * 1000)
    os.close(write_end)
    await asyncio.wait_for(one.ended.wait(), 5)
    one.close()
    # Others of this process, Ray for one, may just have some open.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
