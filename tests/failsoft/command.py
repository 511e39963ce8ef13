"""The command as people run it: a process of its own, watched from outside, and what it leaves behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.wait import until_sync

MARK = "ROLLOUT_COMMAND_TEST"  # not FAILSOFT_…, which no engine gets to see
SCRIPT = Path(sys.executable).parent / "failsoft"


def argv(*arguments: object) -> list[str]:
    """The installed command, or the package run as a program where it is not installed."""
    front = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "failsoft"]
    return [*front, *map(str, arguments)]


def prompts_file(path: Path, count: int) -> Path:
    lines = (
        json.dumps({"id": f"p{n}", "prompt": f"The harbour {n} was", "answer": "42"}) for n in range(count)
    )
    path.write_text("".join(line + "\n" for line in lines))
    return path


class Command:
    """One run of ``failsoft`` in its own session, as a terminal would start it. Everything that it
    starts carries a mark in its environment; what Ray renames is known by its parents."""

    def __init__(self, folder: Path, *arguments: object, **environment: str) -> None:
        self.out = folder / "out"
        self.kinds: set[str] = set()
        self._seen: dict[tuple[int, float], psutil.Process] = {}
        self._stdout, self._stderr = folder / "stdout.txt", folder / "stderr.txt"
        self._mark = secrets.token_hex(8)
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                argv(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env={**os.environ, MARK: self._mark, "COLUMNS": "80", **environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """A failed test leaves nothing behind either."""
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait(20.0)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    # ---- its processes

    def alive(self, *names: str) -> list[psutil.Process]:
        """What runs of all that this run has started; with ``names``, of that alone. Zombies do not run."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._remember(child)
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if f"{MARK}={self._mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    self._remember(process)
        running = [p for p in self._seen.values() if _runs(p)]
        return [p for p in running if not names or any(name in _title(p) for name in names)]

    def _remember(self, process: psutil.Process) -> None:
        with suppress(psutil.Error):
            self._seen.setdefault((process.pid, process.create_time()), process)
            self.kinds.add(_title(process))

    def gone(self, timeout: float, *names: str) -> None:
        """Wait until nothing of it runs any more."""
        until_sync(
            lambda: not self.alive(*names),
            timeout,
            f"gone: {[(p.pid, _title(p)) for p in self.alive(*names)]}",
        )

    # ---- its course

    def wait(self, timeout: float = 90.0) -> int:
        """Its exit status; its processes are recorded on the way."""
        until_sync(lambda: (self.alive(), self.process.poll() is not None)[1], timeout, "the command ends")
        return self.process.returncode

    def until(self, true: Callable[[], object], what: str, timeout: float = 60.0) -> None:
        """Wait for something while it runs."""

        def look() -> bool:
            done = bool(true())
            assert done or self.process.poll() is None, f"ended before {what}: {self.stdout}{self.stderr}"
            return done

        until_sync(look, timeout, f"{what}: {self.stdout}{self.stderr}")

    def until_samples(self, count: int) -> None:
        """Wait until so many are on disk, and record what runs then."""
        self.until(lambda: len(self.lines()) >= count, f"{count} samples")
        self.alive()

    def signal(self, which: signal.Signals, *, group: bool = False) -> None:
        """To the process, or with ``group`` to all of its process group, as a terminal does it."""
        if group:
            os.killpg(self.process.pid, which)
        else:
            self.process.send_signal(which)

    # ---- its results

    def lines(self) -> list[bytes]:
        """The whole lines of samples.jsonl."""
        path = self.out / "samples.jsonl"
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

    def samples(self) -> list[dict[str, Any]]:
        """The samples; every line must be whole."""
        content = (self.out / "samples.jsonl").read_bytes()
        assert content == b"" or content.endswith(b"\n")
        return [json.loads(line) for line in content.splitlines()]

    def failures(self) -> list[dict[str, Any]]:
        path = self.out / "failures.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "summary.json").read_text()))

    def told(self, label: str) -> list[str]:
        """What the printed summary says under a label."""
        return [line[18:] for line in self.stdout.splitlines() if line[:18].strip() == label]


def keys(samples: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(one["prompt_id"], one["index"]) for one in samples]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:300] or process.name()
    return ""
