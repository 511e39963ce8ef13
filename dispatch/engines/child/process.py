"""One engine process under its guard, for asyncio: started, drained, waited for, stopped for certain.

Everything is on the loop and no child of ours is ever waited for by blocking: the guard (see
`dispatch.engines.child.guard`) forks, reaps, kills and clears up; here are the other ends of its three
pipes, and what is done when it was killed itself.
A process is named by pid and start time, never by its pid alone: pids are used again.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from dispatch.engines.child import evidence
from dispatch.engines.child.output import Output
from dispatch.engines.child.ports import Reserved
from dispatch.engines.spec import LOG_BYTES, LOG_FILES, ExitReport, StopReport
from dispatch.engines.traces import gpu, private
from dispatch.engines.traces.leftovers import MARKER, sweep, unix_time
from dispatch.engines.traces.owned import Traces
from dispatch.processes import is_alive
from protocol import CodedError
from protocol.carriers import error_file

SPAWN_TIMEOUT: Final = 10.0
"""Seconds for the guard to start the engine: 20 ms on an idle machine."""
_DRAIN: Final = 0.5
"""Seconds that the last output and the end of the tree are waited for, after the engine's exit."""
_LOOK: Final = 10.0
"""Seconds between two looks at an engine's memory."""
_TRANSIENT: Final = (
    *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *(errno.ENOSPC, errno.EDQUOT, errno.ETXTBSY),
)
"""What keeps a program from being started now and may not do so in a moment (fork(2), execve(2)): no process,
memory or descriptor to be had, a full disk, a program that is being written."""
_GUARD: Final = str(Path(__file__).with_name("guard.py"))

_log = logging.getLogger("failsoft")


def inherited_environment() -> dict[str, str]:
    """This process's environment without anything of ours, for an engine: names that begin with
    FAILSOFT_ are settings or secrets of the run.

    With SPT_NOENV, by which the package setproctitle leaves the environment in /proc as it was: vLLM's and
    SGLang's processes rename themselves with it, and a marker that it has written over finds nothing."""
    kept = {name: text for name, text in os.environ.items() if not name.upper().startswith("FAILSOFT_")}
    return {"SPT_NOENV": "1", **kept}


class EngineProcess:
    """A started engine. Made by `spawn`; whoever has it calls `stop`, or dies, which does the same."""

    def __init__(self, argv: Sequence[str], output: Output, reserved: Reserved | None) -> None:
        self.argv = tuple(argv)
        self.pid = 0
        self.create_time = 0.0
        self.guard_pid = 0
        self.marker = secrets.token_hex(8)
        self._output = output
        self._held = reserved.descriptors if reserved is not None else ()
        self._seen = evidence.Seen()
        self._traces = Traces(self.marker, {}, private_tmp=False)
        self._began = time.monotonic()
        self._command = self._status = -1
        self._first: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._facts: dict[str, dict[str, Any]] = {}  # the guard's status lines, by event
        self._config = -1
        self._planned = False
        self._changed = asyncio.Event()
        self._tree_gone = asyncio.Event()  # the guard says so, or is gone itself
        self._guard_gone = asyncio.Event()
        self._report: asyncio.Future[ExitReport] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Lock()
        self._stopped: StopReport | None = None
        self._concluding: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        log_bytes: int = LOG_BYTES,
        log_files: int = LOG_FILES,
        reserved: Reserved | None = None,
        timeout: float = SPAWN_TIMEOUT,
        private_tmp: bool = True,
        gpus: gpu.Gpus | None = None,
    ) -> Self:
        """Start ``argv`` with ``env`` added to this process's environment, output also appended to
        ``log_path`` and its rotated files. The guard holds ``reserved`` as long as it lives, and the
        caller may release it afterwards.

        With ``private_tmp``, and unless ``env`` sets TMPDIR, it gets a temporary directory of its own,
        which is removed after its end, and in it the path of an error file as `protocol.carriers.child`
        reads it. ``gpus`` are the devices that must be free again after a stop, by default those of the
        engine's CUDA_VISIBLE_DEVICES.

        Raises CodedError ENGINE.SPAWN_FAILED when there is no such program, it is not executable,
        ``cwd`` is not there, or the guard did not start; ``transient`` in its data says whether that may pass
        by itself. Cancelled, it leaves nothing."""
        made = cls(argv, Output(log_path, log_bytes, log_files), reserved)
        given = dict(env or {})
        made._traces = Traces(made.marker, given, private_tmp=private_tmp)
        made._traces.ports = set(reserved.numbers.values()) if reserved is not None else set()
        try:
            visible = given.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
            made._traces.gpu = gpu.Check(gpus or gpu.Nvml(visible))
            made._launch(given, cwd)
            async with asyncio.timeout(timeout):
                await made._until(lambda: made._guard_gone.is_set() or made._said("engine", "spawn_error"))
            error = made._facts.get("spawn_error")
            if error is not None:
                text = f"{error['message']}: {error['path']}"
                raise made._spawn_failed(text, **_errno(error["errno"]))
            if "engine" not in made._facts:
                raise made._spawn_failed("the guard ended before it had started the engine", transient=True)
        except TimeoutError as exc:
            await made._abandon()
            text = f"the guard did not start it within {timeout:g} s"
            raise made._spawn_failed(text, transient=True) from exc
        except OSError as exc:
            await made._abandon()
            raise made._spawn_failed(f"cannot be started: {exc}", **_errno(exc.errno)) from exc
        except BaseException:  # also a cancelled start leaves no process behind
            await made._abandon()
            raise
        made.pid = made._facts["engine"]["pid"]
        made.create_time = unix_time(made._facts["engine"]["ticks"])
        made._concluding = asyncio.create_task(made._conclude())
        return made

    @property
    def alive(self) -> bool:
        """Whether the engine's own process runs, as far as its guard has said by now."""
        return self.pid > 0 and "exit" not in self._facts and not self._guard_gone.is_set()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The end of what the engine has printed so far."""
        return self._output.last_lines()

    async def wait(self, timeout: float | None = None) -> ExitReport:
        """How the engine ended, as soon as it has. Raises TimeoutError after ``timeout`` seconds;
        None is for those who are cancelled by somebody with a deadline."""
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self._report)

    async def stop(self, term_timeout: float = 5.0, kill_timeout: float = 5.0) -> StopReport:
        """Stop the engine for certain. The stages, each with its own time limit:

        ``term``: TERM to the engine's process group. ``kill``, after ``term_timeout``: KILL to the whole
        tree. ``confirm``: nothing of it is left, by the guard's word, pid and start time, and the marker.
        ``gpu``: no device holds anything of it, where there are devices. ``ports``: nothing listens on
        its ports, where they were reserved. ``shm`` and ``tmp``: its shared memory and its private
        directory are gone, where it had any.

        May be called at any time and again, also after the engine ended by itself; a second call answers
        what the first one did, or tries again what that could not do. Takes at most ``term_timeout + 2 *
        kill_timeout + traces.CLEAR_UP`` seconds. Raises CodedError ENGINE.STOP_FAILED with the ``stage``.
        When processes are left, ``pids``, nothing of what they may use is removed; otherwise all other
        stages have run, and ``failures`` says what failed in which."""
        self._planned = self._planned or self.alive
        if term_timeout == 0:
            self.kill()  # also where another stop still waits for TERM to do it
        async with self._stopping:
            if self._stopped is None:
                try:
                    self._stopped = await self._stop(term_timeout, kill_timeout)
                except asyncio.CancelledError:
                    self._close_command()  # nobody is going to ask again: the guard kills the tree
                    raise
            return self._stopped

    def kill(self) -> None:
        """Have the whole tree killed at once: one write to the guard's pipe, for a signal handler or whoever
        has no loop to wait on. `stop` waits for it and sees that nothing is left."""
        self._planned = self._planned or self.alive
        self._send(b"K")

    async def _stop(self, term_timeout: float, kill_timeout: float) -> StopReport:
        stages: dict[str, float] = {}
        if self.alive:
            if self._traces.gpu is not None:
                self._traces.gpu.stopping()
            self._send(b"T")
            stages["term"] = await self._timed(self._tree_gone.wait(), term_timeout)
        if not self._tree_gone.is_set():
            self._send(b"K")
            stages["kill"] = await self._timed(self._tree_gone.wait(), kill_timeout)
        began = time.monotonic()
        left = await sweep(self.marker, kill_timeout, self._tree)
        if not left and not self._tree_gone.is_set():
            await self._end_guard()
        stages["confirm"] = time.monotonic() - began
        self._close_command()
        if left:
            raise CodedError(
                "ENGINE.STOP_FAILED",
                f"stage confirm: processes {left} of engine {self.argv[0]} are still there after KILL",
                {"stage": "confirm", "pids": left, "stages": stages, "last_lines": self.last_lines[-20:]},
            )
        try:
            words = await self._traces.clear_up(stages, self.create_time, self._guard_did)
        except CodedError as exc:
            exc.data |= {"engine": self.argv[0], "stages": stages, "last_lines": self.last_lines[-20:]}
            raise
        await self._timed(self._guard_gone.wait(), _DRAIN)  # it is about to end, and with it the reservations
        return StopReport(stages=stages, exit=await self.wait(2 * _DRAIN + 1), gpu=words)

    async def _guard_did(self, stage: str, timeout: float) -> list[str] | None:
        done = f"{stage}_done"
        await self._timed(self._until(lambda: self._said(done) or self._guard_gone.is_set()), timeout)
        if self._said(done):
            return list(self._facts[done]["failed"])
        await self._end_guard()
        return None

    @property
    def _tree(self) -> tuple[tuple[int, float], ...]:
        """The processes that are known by pid and create time."""
        return ((self.pid, self.create_time), *self._traces.tree)

    async def _timed(self, waiting: Any, timeout: float) -> float:
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            pass  # the next stage is harsher, and the last one names what is left
        return time.monotonic() - began

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until what the guard says makes ``true`` hold."""
        while not true():
            await self._changed.wait()
            self._changed.clear()

    def _said(self, *events: str) -> bool:
        return any(event in self._facts for event in events)

    # -- the pipes ---------------------------------------------------------------------------------

    def _launch(self, env: dict[str, str], cwd: str | os.PathLike[str] | None) -> None:
        """Start the guard. Blocks for about 3 ms: fork and exec."""
        if sys.platform != "linux":
            raise CodedError(
                "CONFIG.INVALID", f"engines need Linux (prctl, /proc, pidfd), not {sys.platform}"
            )
        base = inherited_environment()
        config = {
            "argv": self.argv,
            "cwd": os.path.abspath(cwd or os.curdir),
            "env": {**base, **env, MARKER: self.marker},
            "tmp": self._traces.tmp,
            "tmp_env": self._traces.environment(base, env),
            "limit": error_file.MAX_FILE,
        }
        loop = asyncio.get_running_loop()
        theirs: list[int] = []
        try:
            # A nameless file, not a pipe: an environment may be larger than a pipe holds.
            self._config = os.memfd_create("failsoft-config")
            with open(self._config, "wb", closefd=False) as file:
                file.write(json.dumps(config).encode("utf-8", "surrogateescape"))
            os.lseek(self._config, 0, os.SEEK_SET)
            command, self._command = os.pipe()
            theirs.append(command)
            self._status, status = os.pipe()
            theirs.append(status)
            output = self._output.attach(loop)
            theirs.append(output)
            os.set_blocking(self._status, False)
            os.set_blocking(self._command, False)
            handles = (self._config, command, status, *self._held)
            self._first = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", _GUARD, *map(str, handles), self.marker],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=base,
                pass_fds=handles,
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        loop.add_reader(self._status, self._on_status, loop)

    def _on_status(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            data = os.read(self._status, 65536)
        except BlockingIOError:
            return
        if self._first is not None:
            # The guard forks and its first process ends at once. What we read came from the second one, or
            # is the end of file of both: this does not block.
            self._first.wait()
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._on_fact(json.loads(line))
        if not data:
            loop.remove_reader(self._status)
            os.close(self._status)
            self._guard_gone.set()
            self._tree_gone.set()
        self._changed.set()

    def _on_fact(self, fact: dict[str, Any]) -> None:
        event = fact["event"]
        self._traces.note(fact)
        if event == "trouble":
            _log.warning("the guard of engine %s (pid %d): %s", self.argv[0], self.guard_pid, fact["text"])
        self._facts[event] = fact
        if event == "guard":
            self.guard_pid = fact["pid"]
        elif event == "gone":
            self._tree_gone.set()

    def _send(self, command: bytes) -> None:
        try:
            if self._command >= 0:
                os.write(self._command, command)
        except OSError:
            pass  # the guard is gone, and with it the engine

    def _close_command(self) -> None:
        command, self._command = self._command, -1
        if command >= 0:
            os.close(command)

    # -- the end -----------------------------------------------------------------------------------

    async def _conclude(self) -> None:
        """Wait for the end and make the report."""
        looking = asyncio.create_task(self._look())
        await self._until(lambda: self._said("exit") or self._guard_gone.is_set())
        seconds = time.monotonic() - self._began
        looking.cancel()
        asking = asyncio.create_task(self._ask_for_evidence())  # beside the waiting: it costs no time
        await self._timed(self._tree_gone.wait(), _DRAIN)
        lost = self._guard_gone.is_set() and not self._said("gone")
        if lost:
            await sweep(self.marker, _DRAIN, self._tree)
        await self._timed(self._output.ended.wait(), _DRAIN)
        await asyncio.wait({asking}, timeout=_DRAIN)
        oom = asking.result() if asking.done() else ""
        fact = self._facts.get("exit", {})
        report = ExitReport(
            status=fact.get("status"),
            signal=fact.get("signal"),
            planned=self._planned,
            guard_lost=lost,
            seconds=seconds,
            last_lines=self.last_lines,
            oom=oom,
            failure=self._failure(),
        )
        if not self._report.done():
            self._report.set_result(report)
        if self._tree_gone.is_set():
            self._close_command()
            self._output.close()
        if lost:  # nobody else does it, and it may be that nobody asks for a stop any more
            await self._traces.remove_quietly()

    def _failure(self) -> dict[str, Any] | None:
        """The failure that the engine left in its error file, as data. Closes the file."""
        descriptor, self._config = self._config, -1
        if descriptor < 0:
            return None
        # The guard hands a copy over before it removes the directory; one that was killed did neither, and
        # the file still holds the configuration, which is no failure.
        handed_over = f"/proc/self/fd/{descriptor}"
        in_place = os.path.join(self._traces.tmp, private.ERROR_FILE)
        try:
            return self._traces.failure(handed_over) or self._traces.failure(in_place)
        finally:
            os.close(descriptor)

    async def _look(self) -> None:
        while True:
            before = self._seen
            self._seen = await asyncio.to_thread(evidence.look, self.pid, before if before.pids else None)
            await asyncio.sleep(_LOOK)

    async def _ask_for_evidence(self) -> str:
        if self._planned:
            return ""
        return await asyncio.to_thread(evidence.oom_evidence, self._seen, self.pid, self.create_time)

    async def _end_guard(self) -> None:
        """For a guard that does not react (stopped by a signal) though nothing of its tree is left."""
        guard = self._facts.get("guard")
        if guard and is_alive(guard["pid"], unix_time(guard["ticks"])):
            os.kill(guard["pid"], signal.SIGKILL)
        await self._timed(self._guard_gone.wait(), _DRAIN)

    async def _abandon(self) -> None:
        """After a start that failed or was cancelled: the guard ends the tree when its pipe closes."""
        self._close_command()
        if self._first is None:
            if self._status >= 0:
                os.close(self._status)
            self._guard_gone.set()
        if self._traces.gpu is not None:
            self._traces.gpu.cancel()
        await self._timed(self._guard_gone.wait(), 2 * _DRAIN)
        if self._first is not None and self._first.poll() is None:
            self._first.kill()
            self._first.wait()
        await sweep(self.marker, _DRAIN)
        self._output.close()
        config, self._config = self._config, -1
        if config >= 0:
            os.close(config)
        if not self._said("tmp_done"):
            await self._traces.remove_quietly()

    def _spawn_failed(self, text: str, **data: Any) -> CodedError:
        return CodedError("ENGINE.SPAWN_FAILED", f"{self.argv[0]}: {text}", {"argv": self.argv, **data})


def _errno(number: int | None) -> dict[str, Any]:
    return {"errno": number, "transient": number in _TRANSIENT}
