"""Whatever ends a run, its file of samples is whole, and a resumed run repeats only what is missing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.files import write_atomic
from dispatch.rollout import output
from dispatch.rollout.output import SAMPLES, SampleWriter
from protocol import CodedError

Mode = Literal["new", "resume", "overwrite"]


def sample(index: int = 0, prompt_id: str = "p", **more: Any) -> dict[str, Any]:
    return {"prompt_id": prompt_id, "index": index, "text": "é" * 20, **more}


def opened(folder: Path, mode: Mode = "new", **more: Any) -> SampleWriter:
    return SampleWriter(folder, mode=mode, run="r-1", **more)


def saved(folder: Path) -> list[dict[str, Any]]:
    content = (folder / SAMPLES).read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def refused(folder: Path, mode: Mode, code: str = "CONFIG.INVALID") -> CodedError:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CodedError) as caught:
        opened(folder, mode)
    assert len(os.listdir("/proc/self/fd")) == before, "a refused opening leaves nothing open"
    assert caught.value.code == code
    assert len(caught.value.detail.splitlines()) == 1
    return caught.value


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# Writing


def test_each_sample_is_a_line(tmp_path: Path) -> None:
    samples = [sample(0), sample(1, text="a\nb\0\u2028"), sample(0, "q", reward=0.5)]
    with opened(tmp_path / "deep" / "er") as writer:
        assert [writer.write(one) for one in samples] == [True] * 3
        assert saved(tmp_path / "deep" / "er") == samples, "it is in the file at once, not at close"
    assert writer.done == {("p", 0), ("p", 1), ("q", 0)}


def test_a_second_copy_is_refused_and_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        assert writer.write(sample(3))
        assert not writer.write(sample(3, text="another"))
        assert writer.duplicates == 1
    assert saved(tmp_path) == [sample(3)]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"prompt_id": "p"},
        {"prompt_id": 1, "index": 0},
        {"prompt_id": "p", "index": True},
        {"prompt_id": "p", "index": -1},
        {"prompt_id": "p", "index": "0"},
        {"prompt_id": "\ud800", "index": 0},
        {"prompt_id": "p", "index": 0, "n": 10**5000},
    ],
)
def test_what_is_no_sample_is_not_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with opened(tmp_path) as writer:
        with pytest.raises(ValueError, match=r"."):
            writer.write(wrong)
        with pytest.raises(TypeError):
            writer.write({**sample(), "x": object()})
        assert not writer.done
    assert saved(tmp_path) == []


def test_odd_output_of_a_model_does_not_cost_the_sample(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.write(sample(0, text="a\ud800b", logprob=float("nan"), deep=[{"\udfff": float("inf")}]))
        writer.write(sample(1, logprob=float("-inf")))
    first, second = saved(tmp_path)
    assert first == {**sample(), "text": "a\ufffdb", "logprob": None, "deep": [{"\ufffd": None}]}
    assert second["logprob"] is None
    with opened(tmp_path, "resume") as writer:
        assert len(writer.done) == 2


def test_a_sample_too_large_to_be_resumed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_SAMPLE_BYTES", 200)
    with opened(tmp_path) as writer:
        with pytest.raises(CodedError, match="200 bytes a sample") as caught:
            writer.write(sample(text="x" * 200))
        assert caught.value.code == "CONFIG.INVALID"
        assert writer.write(sample())
    with opened(tmp_path, "resume") as writer:
        assert len(writer.done) == 1


def test_a_closed_writer_stays_closed(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.close()
    writer.close()
    writer.sync()
    with pytest.raises(ValueError, match="closed"):
        writer.write(sample())


def test_it_syncs_every_so_often_and_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    writer = opened(tmp_path, sync_every=5.0, clock=clock)
    synced: list[float] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(clock.now))
    for moment in (0.0, 4.9, 5.0, 6.0, 9.9, 10.0):
        clock.now = moment
        writer.write(sample(int(moment * 10)))
    assert synced == [5.0, 10.0]
    clock.now = 11.0
    writer.close()
    assert synced == [5.0, 10.0], "nothing new, nothing to sync"
    with opened(tmp_path, "resume", clock=clock) as writer:
        synced.clear()
        writer.write(sample(999))
    assert synced == [11.0]


# Opening


def test_a_new_run_does_not_touch_an_old_one(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.write(sample())
    error = refused(tmp_path, "new")
    assert "--resume" in error.detail
    assert "--overwrite" in error.detail
    assert saved(tmp_path) == [sample()]


def test_a_mode_that_is_none_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.write(sample())
    refused(tmp_path, "append")  # type: ignore[arg-type]
    assert saved(tmp_path) == [sample()]


def test_resuming_continues(tmp_path: Path) -> None:
    with opened(tmp_path, "resume") as writer:  # nothing there yet
        writer.write(sample(0))
    with opened(tmp_path, "resume") as writer:
        assert writer.done == {("p", 0)}
        assert writer.torn == 0
        assert not writer.write(sample(0))
        assert writer.write(sample(1))
    assert saved(tmp_path) == [sample(0), sample(1)]


def test_overwriting_drops_what_the_old_run_left(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.write(sample(0))
    for name in ("failures.jsonl", "events.jsonl", "summary.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    with opened(tmp_path, "overwrite") as writer:
        assert not writer.done
        writer.write(sample(1))
    assert saved(tmp_path) == [sample(1)]
    assert sorted(os.listdir(tmp_path)) == [".lock", "notes.txt", "samples.jsonl"]


def test_a_torn_last_line_is_dropped_and_reported(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.write(sample(0))
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(b'{"prompt_id": "p", "index": 1}')  # whole but for its newline: the same rule
    with opened(tmp_path, "resume") as writer:
        assert writer.torn == 30
        assert writer.write(sample(1))
    assert saved(tmp_path) == [sample(0), sample(1)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt_id": "p", "ind\n', "invalid character"),
        (b"\0\0\0\n", "invalid character"),
        (b"\xff\n", "is no sample"),
        (b"\n", "is no sample"),
        (b"[]\n", "Expected `object`"),
        (b'{"index": 0}\n', "missing required field `prompt_id`"),
        (b'{"prompt_id": "p", "index": true}\n', "Expected `int`"),
        (b'{"prompt_id": "p", "index": 0, "x": ' + b"[" * 9999 + b"\n", "recursion"),
        (b'{"prompt_id": "p", "index": 0}\n', "it repeats sample 0 of 'p'"),
    ],
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    good = [json.dumps(sample(index)).encode() + b"\n" for index in range(2)]
    content = good[0] + line + good[1]
    (tmp_path / SAMPLES).write_bytes(content)
    error = refused(tmp_path, "resume")
    assert "line 2 is damaged" in error.detail
    assert words in error.detail
    assert "sed -i 2d" in error.detail
    assert error.data["line"] == 2
    assert (tmp_path / SAMPLES).read_bytes() == content, "a file that is not understood is not changed"


def test_resuming_holds_one_line_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_SAMPLE_BYTES", 200)
    whole = json.dumps(sample(0)).encode() + b"\n"
    (tmp_path / SAMPLES).write_bytes(whole + b"x" * 500 + b"\n")
    assert "more than 200 bytes" in refused(tmp_path, "resume").detail
    (tmp_path / SAMPLES).write_bytes(whole + b"x" * 500)
    with opened(tmp_path, "resume") as writer:
        assert writer.torn == 500
    assert (tmp_path / SAMPLES).read_bytes() == whole


@pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
def test_a_folder_that_is_a_file(tmp_path: Path, mode: Mode) -> None:
    (tmp_path / "file").write_text("")
    assert "name another folder" in refused(tmp_path / "file", mode).detail
    assert "name another folder" in refused(tmp_path / "file" / "below", mode).detail


@pytest.mark.parametrize("mode", ["resume", "overwrite"])
def test_results_that_are_no_file(tmp_path: Path, mode: Mode) -> None:
    (tmp_path / SAMPLES).symlink_to("/dev/full")
    assert "no regular file" in refused(tmp_path, mode).detail
    (tmp_path / SAMPLES).unlink()
    (tmp_path / SAMPLES).mkdir()
    assert "name another folder" in refused(tmp_path, mode).detail


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert "free some space" in refused(tmp_path, "new", "NODE.DISK_FULL").detail


# One run a folder


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path):
        for mode in ("new", "resume", "overwrite"):
            detail = refused(tmp_path, mode).detail
            assert f"is in use by 'run r-1, process {os.getpid()}'" in detail
    opened(tmp_path, "resume").close()


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        try:
            writer.close()
            opened(tmp_path, "resume").close()
        finally:
            child.kill()


FORKED = """
import os, sys
from pathlib import Path
from dispatch.rollout.output import SampleWriter

writer = SampleWriter(Path(sys.argv[1]), mode="new", run="forked")
writer.write({"prompt_id": "p", "index": 0})
child = os.fork()
if not child:
    try:
        writer.write({"prompt_id": "p", "index": 1})
    except ValueError as error:
        print(error, flush=True)
    sys.stdin.read()  # the child outlives its parent
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED)
"""


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert b"samples.jsonl is closed" in parent.stdout.readline()
        assert "run forked" in refused(tmp_path, "resume").detail, "the child did not unlock its parent's"
        parent.kill()
        parent.wait()
        with opened(tmp_path, "resume") as writer:
            assert writer.done == {("p", 0)}


def test_closing_lets_go_though_a_copy_is_open(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    copy = os.dup(writer._lock)
    writer.close()
    opened(tmp_path, "resume").close()
    os.close(copy)


# Disks that fail


def flaky_write(monkeypatch: pytest.MonkeyPatch, number: int | None, part: int) -> list[int]:
    """Have os.write take ``part`` bytes at a time, and fail at the second time when ``number`` is set."""
    real, calls = os.write, []

    def write(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        if number is not None and len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return real(fd, bytes(data[:part]))

    monkeypatch.setattr(os, "write", write)
    return calls


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as writer:
        calls = flaky_write(monkeypatch, None, 7)
        writer.write(sample())
    assert len(calls) > 5
    assert saved(tmp_path) == [sample()]


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.ENOSPC, "NODE.DISK_FULL", "free some space"),
        (errno.EDQUOT, "NODE.DISK_FULL", "raise the quota"),
        (errno.EFBIG, "NODE.DISK_FULL", "ulimit -f"),
        (errno.EIO, "NODE.IO", "check the disk"),
    ],
)
def test_half_a_line_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str, remedy: str
) -> None:
    with opened(tmp_path) as writer:
        writer.write(sample(0))
        size = (tmp_path / SAMPLES).stat().st_size
        with monkeypatch.context() as patch:
            flaky_write(patch, number, 10)
            with pytest.raises(CodedError) as caught:
                writer.write(sample(1))
        error = caught.value
        assert error.code == code
        assert str(tmp_path / SAMPLES) in error.detail
        assert f"1 whole samples ({size} bytes)" in error.detail
        assert remedy in error.detail
        assert "--resume" in error.detail
        assert isinstance(error.__cause__, OSError)
        assert saved(tmp_path) == [sample(0)]
        assert writer.write(sample(1)), "once there is space again, the same sample may be written"
    assert saved(tmp_path) == [sample(0), sample(1)]


def test_half_a_line_that_cannot_be_taken_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ftruncate(fd: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path) as writer:
        writer.write(sample(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", ftruncate)
            with monkeypatch.context() as once:
                flaky_write(once, errno.EIO, 10)
                with pytest.raises(CodedError):
                    writer.write(sample(1))
            with pytest.raises(CodedError) as caught:
                writer.write(sample(2))
            assert caught.value.code == "NODE.IO"
        assert writer.write(sample(2)), "the half line is gone before anything is written behind it"
    assert saved(tmp_path) == [sample(0), sample(2)]


def test_an_interrupt_in_the_middle_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        real(fd, bytes(data[:10]))
        raise KeyboardInterrupt

    with opened(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            with pytest.raises(KeyboardInterrupt):
                writer.write(sample(0))
        assert saved(tmp_path) == []
        assert writer.write(sample(0))


def test_a_sync_that_fails_is_told_and_the_folder_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    writer = opened(tmp_path)
    writer.write(sample())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CodedError, match="newest lines") as caught:
            writer.close()
    assert caught.value.code == "NODE.DISK_FULL"
    writer.close()
    opened(tmp_path, "resume").close()


FILL = """
import json, resource, sys
from pathlib import Path
from dispatch.files import write_atomic
from dispatch.rollout.output import SampleWriter
from protocol import CodedError

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # Python ignores SIGXFSZ: EFBIG is what is left
with SampleWriter(folder, mode="new", run="fill") as writer:
    try:
        for index in range(10**6):
            writer.write({"prompt_id": "p", "index": index, "text": "x" * 1000})
    except CodedError as error:
        codes, detail = [error.code], error.detail
try:
    write_atomic(folder / "summary.json", b"x" * 10**7)
except CodedError as error:
    codes.append(error.code)
print(json.dumps({"codes": codes, "saved": len(writer.done), "detail": detail}))
"""


def fill(folder: Path, limit: int) -> dict[str, Any]:
    command = [sys.executable, "-c", textwrap.dedent(FILL), str(folder), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_full(folder: Path, found: dict[str, Any]) -> None:
    assert found["codes"] == ["NODE.DISK_FULL"] * 2
    assert [one["index"] for one in saved(folder)] == list(range(found["saved"]))
    assert found["saved"] > 10
    assert f"{found['saved']} whole samples" in found["detail"]
    assert sorted(os.listdir(folder)) == [".lock", "samples.jsonl"], "no part of summary.json stays"


def test_a_real_limit_on_file_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    check_full(folder, fill(folder, 100_000))
    with opened(folder, "resume") as writer:
        assert writer.torn == 0
        assert writer.write(sample(10**6))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount, umount = shutil.which("mount"), shutil.which("umount")
    disk = tmp_path / "disk"
    disk.mkdir()
    if mount is None or umount is None:
        pytest.skip("no mount command here")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting is not permitted here")
    yield disk
    subprocess.run([umount, str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    folder = small_disk / "out"
    check_full(folder, fill(folder, 0))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 512):
            pass
    with opened(folder, "resume") as writer:  # opening needs no space
        with pytest.raises(CodedError, match="No space"):
            writer.write(sample(10**6, text="x" * 10_000))
        filler.unlink()
    with opened(folder, "resume") as writer:
        assert writer.torn == 0
        assert writer.write(sample(10**6))


# Killed at any moment


keys = st.lists(st.tuples(st.sampled_from(["a", "é", 'q"\n']), st.integers(0, 3)), max_size=6, unique=True)


@pytest.mark.timeout(180)  # thousands of times to the disk
@given(keys=keys, content=st.text(max_size=12))
@settings(max_examples=20, deadline=None)
def test_killed_at_every_byte(
    tmp_path_factory: pytest.TempPathFactory, keys: list[tuple[str, int]], content: str
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    wanted = [{"prompt_id": prompt_id, "index": index, "text": content} for prompt_id, index in keys]
    with opened(folder) as writer:
        for one in wanted:
            writer.write(one)
    whole = (folder / SAMPLES).read_bytes()
    for size in range(len(whole) + 1):
        (folder / SAMPLES).write_bytes(whole[:size])
        lines = whole[:size].count(b"\n")
        with opened(folder, "resume") as writer:
            assert len(writer.done) == lines, "nothing but the torn line is lost"
            assert writer.torn == size - (whole[:size].rfind(b"\n") + 1)
            assert [writer.write(one) for one in wanted] == [False] * lines + [True] * (len(wanted) - lines)
        assert (folder / SAMPLES).read_bytes() == whole


KILLED = """
import sys
from pathlib import Path
from dispatch.rollout.output import SampleWriter

with SampleWriter(Path(sys.argv[1]), mode="resume", run="killed") as writer:
    for index in range(len(writer.done), 10**9):
        writer.write({"prompt_id": "p", "index": index, "text": "x" * 2000})
        if index % 50 == 0:
            print(index, flush=True)
"""


def test_really_killed_again_and_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(3):
                assert child.stdout.readline()
            child.kill()
    with opened(tmp_path, "resume") as writer:  # the kernel has let go of the lock
        count = len(writer.done)
    assert [one["index"] for one in saved(tmp_path)] == list(range(count))


# Whole files


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "NODE.DISK_FULL"),
        (OSError(errno.EIO, "Input/output error"), "NODE.IO"),
        (KeyboardInterrupt(), None),
    ],
)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: str | None, step: str
) -> None:
    def fail(*_: object) -> None:
        raise failure

    path = tmp_path / "summary.json"
    write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises((CodedError, KeyboardInterrupt)) as caught:
            write_atomic(path, b"new")
    assert getattr(caught.value, "code", None) == code
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CodedError, match="No such file or directory") as caught:
        write_atomic(tmp_path / "no" / "summary.json", b"x")
    assert caught.value.code == "NODE.IO"
