"""Log files: rotated, bounded, of the last starts only; and no disk stops an engine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dispatch.engines.child import log_files
from dispatch.engines.child.log_files import LogFiles, for_start
from tests.dispatch.engines.processes import files_in
from tests.support.full_disk import file_size_limit


def numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def in_order(path: Path, files: int) -> bytes:
    """The whole log, oldest file first."""
    parts = [numbered(path, number) for number in reversed(range(files))]
    return b"".join(part.read_bytes() for part in parts if part.exists())


# -- one start


def test_rotation_loses_and_reorders_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFiles(path, 1000, 4)
    log.open()
    written = b""
    for n in range(200):
        line = f"{n} {'z' * (n % 50)}\n".encode()
        written += line
        assert log.write(line) == ""
    log.close()
    files = files_in(tmp_path)
    assert [one.name for one in files] == ["log", "log.1", "log.2", "log.3"]
    assert all(one.stat().st_size <= 1000 for one in files)
    assert all(one.read_bytes().endswith(b"\n") for one in files), "each ends with a whole line"
    assert written.endswith(in_order(path, 4))


def test_all_files_together_are_bounded(tmp_path: Path) -> None:
    """One write of many files' size, lines longer than a file, no newline at all."""
    path = tmp_path / "log"
    log = LogFiles(path, 1000, 3)
    log.open()
    for data in (b"a" * 5500, b"b\n" * 4000, b"c" * 999 + b"\n" + b"d" * 2000, b"e"):
        assert log.write(data) == ""
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 3000
    assert in_order(path, 3).endswith(b"d" * 1000 + b"e")
    log.close()


def test_one_file(tmp_path: Path) -> None:
    log = LogFiles(tmp_path / "log", 100, 1)
    log.open()
    for n in range(30):
        log.write(f"line {n:4}\n".encode())
    log.close()
    assert [one.name for one in tmp_path.iterdir()] == ["log"]
    assert (tmp_path / "log").read_text().splitlines()[-1] == "line   29"
    assert (tmp_path / "log").stat().st_size <= 100


def test_what_is_there_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n" * 100)
    log = LogFiles(path, 1000, 2)
    log.open()
    log.write(b"after\n" * 100)
    log.close()
    assert numbered(path, 1).read_bytes().startswith(b"before\n" * 100 + b"after\n")
    assert in_order(path, 2) == b"before\n" * 100 + b"after\n" * 100


def test_somebody_clears_up(tmp_path: Path) -> None:
    log = LogFiles(tmp_path / "sub" / "log", 100, 3)
    log.open()
    for n in range(50):
        if n == 25:
            for one in (tmp_path / "sub").iterdir():
                one.unlink()
            (tmp_path / "sub").rmdir()
        assert log.write(b"x" * 49 + b"\n") == ""
    log.close()
    assert (tmp_path / "sub" / "log").exists()


# -- a disk that is full


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(log_files.time, "monotonic", lambda: now)
    path = tmp_path / "log"
    log = LogFiles(path, 1 << 20, 3)
    log.open()
    assert log.write(b"first\n") == ""
    with file_size_limit(10):
        trouble = log.write(b"second\n")
        assert str(path) in trouble
        assert os.strerror(errno.EFBIG) in trouble
        assert path.read_bytes() == b"first\nseco", "the disk took a part"
        assert log.write(b"third\n") == "", "said once"
        now += log_files.RETRY
        assert log.write(b"fourth\n") == "", "tried again, still full, not said again"
    assert log.write(b"fifth\n") == ""
    assert path.read_bytes() == b"first\nseco", "not tried again yet"
    now += log_files.RETRY
    assert log.write(b"sixth\n") == ""
    assert log.write(b"seventh\n") == ""
    missing = len(b"nd\nthird\nfourth\nfifth\n")
    note = f"\n[failsoft: {missing} bytes of output are missing here]\n"
    assert path.read_text() == f"first\nseco{note}sixth\nseventh\n"
    with file_size_limit(1):
        assert log.write(b"eighth\n") != "", "a new trouble is said"
    log.close()


def test_a_full_device() -> None:
    log = LogFiles("/dev/full", 1 << 20, 3)
    log.open()
    assert os.strerror(errno.ENOSPC) in log.write(b"text\n")
    log.close()


# -- many starts


def start(folder: Path, number: int, keep: int = 3, rotated: bool = False) -> Path:
    path = for_start(folder, "engine/0", number, keep)
    path.write_text(f"start {number}")
    if rotated:
        numbered(path, 1).write_text("older")
    return path


def test_a_log_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert (
        for_start(tmp_path / "logs", "engine/0", 1, 3) == tmp_path / "logs" / f"engine-0.{os.getpid()}.1.log"
    )


def test_an_engine_that_dies_each_time_keeps_its_last_starts(tmp_path: Path) -> None:
    paths = [start(tmp_path, number, rotated=True) for number in range(1, 101)]
    left = [one for path in paths[-3:] for one in (path, numbered(path, 1))]
    assert sorted(files_in(tmp_path)) == sorted(left)


def test_starts_of_a_supervisor_that_is_gone_count(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    old = [tmp_path / f"engine-0.{gone.pid}.{number}.log" for number in (1, 2, 3)]
    for age, path in enumerate(old):
        path.write_text("old")
        os.utime(path, (1e9 + age, 1e9 + age))
    newest = start(tmp_path, 1)
    assert sorted(files_in(tmp_path)) == sorted([*old[1:], newest])


def test_nothing_of_anyone_else_is_removed(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        strange = [
            tmp_path / f"engine-0.{other.pid}.1.log",  # another supervisor's, which lives
            tmp_path / f"engine-01.{os.getpid()}.1.log",
            tmp_path / f"my-engine-0.{os.getpid()}.1.log",
            tmp_path / f"engine-0.{os.getpid()}.1.log.gz",
            tmp_path / f"engine-0.{os.getpid()}.log",
            tmp_path / "notes.txt",
        ]
        for path in strange:
            path.write_text("mine")
            os.utime(path, (1e9, 1e9))
        paths = [start(tmp_path, number, keep=1) for number in range(1, 5)]
        assert sorted(files_in(tmp_path)) == sorted([*strange, paths[-1]])
    finally:
        other.communicate(b"\n", timeout=10)


def test_what_cannot_be_removed_stops_nothing(tmp_path: Path) -> None:
    stuck = tmp_path / f"engine-0.{os.getpid()}.1.log"
    stuck.mkdir()
    paths = [start(tmp_path, number, keep=1) for number in range(2, 6)]
    assert stuck.is_dir()
    assert paths[-1].exists()
