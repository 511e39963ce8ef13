"""Output: the samples of a run, on disk and whole, whatever ends the run.

One rule makes a crash harmless: *a sample is saved when its line is, newline included*. Lines are
appended with one write each; what is left of an unfinished one is cut off, at once when the disk
refuses it and at the next start when the process was killed. A resumed run then repeats exactly the
samples that are not in the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import stat
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, Self

import msgspec

from dispatch.files import failed_write, shown, sync_folder
from dispatch.rollout.prompts import SURROGATE, excerpt
from protocol import CodedError

Mode = Literal["new", "resume", "overwrite"]
Clock = Callable[[], float]

SAMPLES: Final = "samples.jsonl"
STALE: Final = ("failures.jsonl", "events.jsonl", "summary.json")
"""A run's other files: they would belie one that overwrites."""
MAX_SAMPLE_BYTES: Final = 256 * 2**20
"""Longest line: resuming holds one line in memory, so writing refuses what resuming could not read."""


class _Key(msgspec.Struct):
    """What resuming needs of a sample; everything else is skipped without being built."""

    prompt_id: str
    index: Annotated[int, msgspec.Meta(ge=0)]
    prompt: Any = None


class SampleWriter:
    """The one writer of ``samples.jsonl`` in a folder.

    ``mode`` says what may be there already: ``new`` nothing, ``resume`` an earlier part of the same
    work (or nothing yet, so that a job may always start with it), ``overwrite`` anything of ours,
    which is dropped. ``run`` names the holder of the folder to a second run that wants it. The
    folder is made when it is missing and locked until `close`; the lock ends with the process.

    ``done`` holds the (prompt id, index) of every sample in the file, ``texts`` the hash of the prompt
    of each id that resuming met there, ``duplicates`` counts refused samples, ``torn`` is the size in
    bytes of the unfinished last line that resuming cut off. Calls block for as long as the disk does,
    and are for one thread.

    Raises CodedError: CONFIG.INVALID for a folder that cannot be used so, NODE.DISK_FULL, NODE.IO.
    """

    def __init__(
        self, folder: Path, *, mode: Mode, run: str, sync_every: float = 5.0, clock: Clock = time.monotonic
    ) -> None:
        self.path = folder / SAMPLES
        self.done: set[tuple[str, int]] = set()
        self.texts: dict[str, int] = {}
        self.duplicates = 0
        self.torn = 0
        self._sync_every = sync_every
        self._clock = clock
        self._synced = clock()
        self._end = 0  # where the last whole line ends
        self._tail = self._unsynced = False  # may part of a line lie behind it; is there anything to sync
        self._fd = self._lock = -1
        _writers.add(self)
        try:
            self._take(folder, run)
            self._open(mode)
        except BaseException as error:  # whatever ends the opening, nothing may stay open or locked
            self._release()
            if not isinstance(error, OSError):
                raise
            raise failed_write(
                error, Path(error.filename or self.path), "cannot be opened", "try again", opening=True
            ) from error

    def write(self, sample: Mapping[str, Any]) -> bool:
        """Save one sample; False, and nothing written, when its key is saved already.

        A sample needs ``prompt_id`` (text) and ``index`` (0 or more). NaN and infinities are written
        as null and halves of surrogate pairs as U+FFFD: JSON has no others, and a model's odd output
        must not cost the sample. Raises ValueError or TypeError for what is no sample, and CodedError
        when the sample cannot be saved; the file then ends with the last whole line, and the same
        sample may be written again.
        """
        if self._fd < 0:
            raise ValueError(f"{shown(self.path)} is closed")
        saved = _key(sample)
        if saved in self.done:
            self.duplicates += 1
            return False
        line = _encode(sample)
        if len(line) > MAX_SAMPLE_BYTES:
            raise self._refusal(
                f"takes {MAX_SAMPLE_BYTES} bytes a sample, not {len(line)}; keep fewer tokens"
            )
        self._append(line)
        # In this order, an interrupt in between costs a sample that resuming repeats, never a second copy.
        self.done.add(saved)
        self._end += len(line)
        self._tail = False
        if self._clock() - self._synced >= self._sync_every:
            self.sync()
        return True

    def sync(self) -> None:
        """Have the disk itself hold what was written: from here on even a crash of the machine spares it."""
        if self._fd < 0 or not self._unsynced:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error, "synced, so the disk may lack its newest lines") from error
        self._unsynced = False
        self._synced = self._clock()

    def close(self) -> None:
        """Sync, and let go of the file and the folder. A second call does nothing."""
        try:
            self._cut()
            self.sync()
        finally:
            with contextlib.suppress(OSError, ValueError):  # a process forked just now may hold a copy
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        try:
            if self._tail:
                os.ftruncate(self._fd, self._end)
            self._tail = self._unsynced = True
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException as error:  # an interrupt between two parts of a line leaves half of it, too
            self._cut()
            if isinstance(error, OSError):
                raise self._failed(error, "written") from error
            raise

    def _cut(self) -> None:
        with contextlib.suppress(OSError):  # the next write tries again, and so does resuming
            os.ftruncate(self._fd, self._end)
            self._tail = False

    def _take(self, folder: Path, run: str) -> None:
        """Lock the folder, or say who has it. The kernel lets go of it when this process ends."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = excerpt(os.pread(self._lock, 200, 0).decode("utf-8", "replace"))
            text = f"{shown(folder)} is in use by {holder}; wait until it ends, or name another folder"
            raise CodedError("CONFIG.INVALID", text, {"file": str(folder)}) from None
        with contextlib.suppress(OSError):  # the name is a courtesy; a full disk must not stop a resume here
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"run {run}, process {os.getpid()}".encode("utf-8", "replace"), 0)

    def _open(self, mode: str) -> None:
        # Anything but the two modes that may meet a file is treated as new, which can lose nothing.
        only_new = 0 if mode in ("resume", "overwrite") else os.O_EXCL
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | only_new, 0o666)
        except FileExistsError:
            remedy = "continue it with --resume, replace it with --overwrite, or name another folder"
            raise self._refusal(f"is there already; {remedy}") from None
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise self._refusal("is no regular file; name another folder")
        if mode == "resume":
            with self.path.open("rb") as file:
                self._recall(file)
        elif mode == "overwrite":
            for name in STALE:
                (self.path.parent / name).unlink(missing_ok=True)
        os.ftruncate(self._fd, self._end)
        sync_folder(self.path.parent)

    def _recall(self, file: BinaryIO) -> None:
        """Read the keys of the samples that are there, one line in memory at a time."""
        decoder = msgspec.json.Decoder(_Key)
        for number, line in enumerate(iter(lambda: file.readline(MAX_SAMPLE_BYTES), b""), start=1):
            if not line.endswith(b"\n"):
                self.torn = len(line)
                while part := file.readline(2**20):
                    self.torn += len(part)
                    if part.endswith(b"\n"):
                        raise self._damaged(number, f"it has more than {MAX_SAMPLE_BYTES} bytes")
                return
            try:
                key = decoder.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                found = excerpt(line[:200].decode("utf-8", "replace"))
                raise self._damaged(number, f"{found} is no sample ({error})") from error
            saved = key.prompt_id, key.index
            if saved in self.done:
                raise self._damaged(number, f"it repeats sample {saved[1]} of {excerpt(saved[0])}")
            self.done.add(saved)
            if isinstance(key.prompt, str):
                self.texts.setdefault(key.prompt_id, hash(key.prompt))
            self._end += len(line)

    def _damaged(self, number: int, what: str) -> CodedError:
        what = f"cannot be resumed: line {number} is damaged, since {what}"
        command = f"sed -i {number}d {shlex.quote(shown(self.path))}"
        return self._refusal(f"{what}; remove it ({command}), or start over with --overwrite", line=number)

    def _refusal(self, what: str, **data: Any) -> CodedError:
        return CodedError("CONFIG.INVALID", f"{shown(self.path)} {what}", {"file": str(self.path), **data})

    def _failed(self, error: OSError, what: str) -> CodedError:
        remedy = f"continue with --resume: {len(self.done)} whole samples ({self._end} bytes) are in it"
        return failed_write(error, self.path, f"could not be {what}", remedy)

    def _release(self) -> None:
        for fd in (self._fd, self._lock):
            with contextlib.suppress(OSError):  # fsync has told of the errors that count
                os.close(fd)
        self._fd = self._lock = -1


def _key(sample: Mapping[str, Any]) -> tuple[str, int]:
    try:
        key = msgspec.convert(sample, _Key)
        key.prompt_id.encode()  # an id that was mended on its way to the file would not be known again
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ValueError(f"a sample needs a prompt_id (text) and an index (0 or more): {error}") from error
    return key.prompt_id, key.index


def _encode(sample: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(sample) + b"\n"
    except UnicodeEncodeError:
        text = SURROGATE.sub("\ufffd", json.dumps(msgspec.to_builtins(sample), ensure_ascii=False))
        return msgspec.json.encode(json.loads(text, parse_constant=lambda _: None)) + b"\n"


# A forked child shares the lock: holding on to it, it would keep the folder after its parent's death.
_writers: weakref.WeakSet[SampleWriter] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(SampleWriter._release, _writers)))
