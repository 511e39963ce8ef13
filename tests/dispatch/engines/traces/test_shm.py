"""Whose a segment is, by inode: the looks without a guard, on a directory of the test's own."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatch.engines.traces import shm

ME = os.getpid()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a tmpfs, as /dev/shm is: it does not give an inode's number out again at once."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[shm.Watch]:
    (tmp_path / "before").touch()
    one = shm.Watch(str(tmp_path))
    yield one
    os.close(one.descriptor)


def readable(watch: shm.Watch) -> bool:
    return bool(select.select([watch.descriptor], [], [], 0)[0])


def test_what_is_open_and_what_is_mapped(watch: shm.Watch, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w"), (tmp_path / "mapped").open("w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            file.close()
            assert readable(watch)
            watch.drain()
            assert not readable(watch)
            found, _ = watch.look([ME])
            assert found.keys() == {"open", "mapped"}
            assert watch.held == found
            assert watch.look([ME]) == ({}, {}), "told once"


def test_what_was_there_before_is_not_the_trees(watch: shm.Watch, tmp_path: Path) -> None:
    with (tmp_path / "before").open("w"):
        assert watch.look([ME], last=True) == ({}, {})
    (tmp_path / "before").unlink()
    with (tmp_path / "before").open("w"):
        assert watch.look([ME])[0].keys() == {"before"}, "the same name, but another file"


def test_nobody_has_it_or_somebody_else(watch: shm.Watch, tmp_path: Path) -> None:
    (tmp_path / "nobodys").touch()
    with (tmp_path / "ours").open("w"):
        assert watch.look([1]) == ({}, {})


def test_an_unlinked_one_does_not_count(watch: shm.Watch, tmp_path: Path) -> None:
    with (tmp_path / "gone").open("w"):
        (tmp_path / "gone").unlink()
        (tmp_path / "gone").touch()  # somebody else's by now
        assert watch.look([ME]) == ({}, {})


def test_a_name_that_came_after_the_file(watch: shm.Watch, tmp_path: Path) -> None:
    """As sem_open(3) does it: a file of a passing name is linked to the one that stays."""
    with (tmp_path / "passing").open("w"):
        os.link(tmp_path / "passing", tmp_path / "sem.name")
        (tmp_path / "passing").unlink()
        assert watch.look([ME])[0].keys() == {"sem.name"}
        os.rename(tmp_path / "sem.name", tmp_path / "moved")
        assert watch.look([ME])[0].keys() == {"moved"}
        assert watch.held.keys() == {"moved"}


def test_somebody_elses_is_not_asked_about_for_ever(watch: shm.Watch, tmp_path: Path) -> None:
    (tmp_path / "late").touch()
    for _ in range(shm.LOOKS):
        watch.look([ME])
    with (tmp_path / "late").open("w"):
        assert watch.look([ME]) == ({}, {})
        assert watch.look([ME], last=True)[0].keys() == {"late"}, "but at the end once more"


def test_links_and_folders_are_no_segments(watch: shm.Watch, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    handle = os.open(tmp_path / "folder", os.O_RDONLY)
    (tmp_path / "link").symlink_to("/dev/null")
    assert watch.look([ME]) == ({}, {})
    os.close(handle)


def test_removal_leaves_what_somebody_has(watch: shm.Watch, tmp_path: Path) -> None:
    with (tmp_path / "kept").open("w") as kept, (tmp_path / "let go").open("w") as let_go:
        watch.look([ME])
        let_go.close()
        assert shm.remove(watch.held, {}, str(tmp_path)) == (["let go"], [])
        assert not kept.closed
    assert sorted(os.listdir(tmp_path)) == ["before", "kept"]


def test_removal_never_takes_another_file_of_the_name(watch: shm.Watch, tmp_path: Path) -> None:
    with (tmp_path / "name").open("w"):
        watch.look([ME])
    (tmp_path / "name").unlink()
    (tmp_path / "name").touch()
    assert shm.remove(watch.held, {}, str(tmp_path)) == ([], [])
    assert (tmp_path / "name").exists()


def test_removal_that_is_refused(watch: shm.Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with (tmp_path / "name").open("w"):
        watch.look([ME])
    monkeypatch.setattr(os, "unlink", refuse)
    assert shm.remove(watch.held, {}, str(tmp_path)) == ([], [f"{tmp_path}/name: Permission denied"])


def test_without_inotify_or_the_directory(tmp_path: Path) -> None:
    one = shm.Watch(str(tmp_path / "none"))
    assert one.descriptor == -1
    assert one.look([ME], last=True) == ({}, {})
    (tmp_path / "none").mkdir()
    with (tmp_path / "none" / "name").open("w"):
        assert one.look([ME])[0].keys() == {"name"}, "the looks alone do"


SYSV = "import ctypes, sys; print(ctypes.CDLL(None).shmget(0, 4096, 0o1600), flush=True); sys.stdin.read()"


def test_system_v_segments(watch: shm.Watch) -> None:
    libc = ctypes.CDLL(None)
    ours = libc.shmget(0, 4096, 0o1600)
    process = subprocess.Popen(
        [sys.executable, "-c", SYSV], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        theirs = int(process.stdout.readline())
        assert watch.look([process.pid]) == ({}, {theirs: process.pid})
        assert shm.remove({}, {theirs: process.pid + 1, ours: ME + 1}) == ([], []), "made by others"
        libc.shmat.restype = ctypes.c_void_p
        address = libc.shmat(theirs, None, 0)
        assert shm.remove({}, watch.sysv) == ([], []), "attached by somebody"
        libc.shmdt(ctypes.c_void_p(address))
        assert shm.remove({}, watch.sysv) == ([f"System V segment {theirs}"], [])
        assert theirs not in shm.sysv_table()
        assert ours in shm.sysv_table()
    finally:
        libc.shmctl(ours, shm.IPC_RMID, None)
        process.communicate()


def test_a_creator_that_ended_between_two_looks(watch: shm.Watch) -> None:
    late = f"import sys; sys.stdin.read(); {SYSV}"
    process = subprocess.Popen(
        [sys.executable, "-c", late], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    watch.look([process.pid])
    segment = int(process.communicate("")[0])
    assert watch.look([]) == ({}, {segment: process.pid})
    assert shm.remove({}, watch.sysv)[0] == [f"System V segment {segment}"]
