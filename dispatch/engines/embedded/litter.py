"""What real engines leave about, behind `--litter`: everything that outlives a SIGKILL of the process alone.

vLLM and SGLang have child processes that live on without their parent, shared memory segments, temporary
files, Unix sockets and a second port between their processes. A supervisor that ends "the engine" has to end
these as well, so the embedded engine makes one of each before it binds its port, and `GET /litter` says
where: a test can then look for them without asking whoever was meant to remove them.

At an orderly end the engine takes its own things away, as a good engine does, except the grandchild in a
session of its own, which has no parent any more and ignores TERM: that one is left to whoever started the
engine.
"""

import contextlib
import mmap
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import NoReturn

import msgspec

PREFIX = "failsoft-litter-"
"""How the names of the segment, the file and the socket begin; the engine's pid follows."""

SEGMENTS = Path("/dev/shm")  # noqa: S108  where shm_open(3) makes its segments on Linux
SEGMENT_BYTES = 1 << 16

SLEEP = ("sleep", "1000000")
"""What the processes do: nothing, for longer than any test."""

GRACE = 1.0
"""Seconds that the child gets to act on TERM."""


class Process(msgspec.Struct):
    """A process by pid and start time in unix seconds (as psutil counts it), for pids are used again."""

    pid: int
    create_time: float


class Litter(msgspec.Struct):
    """What there is, as `GET /litter` answers it."""

    child: Process
    grandchild: Process
    shm: str
    file: str
    socket: str
    port: int


class Litterer:
    """Makes the litter and holds on to what has to stay open. Make one before any thread is started, for it
    forks. Raises OSError when the port can't be bound or there is no room for the files."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        # By hand and not by `multiprocessing.shared_memory`: that starts a resource tracker, whose work it
        # is to remove what a killed process has left.
        segment = SEGMENTS / name
        with segment.open("xb+") as file:
            file.truncate(SEGMENT_BYTES)
            self._memory = mmap.mmap(file.fileno(), SEGMENT_BYTES)
        descriptor, path = tempfile.mkstemp(prefix=name)
        os.close(descriptor)
        self._socket = socket.socket(socket.AF_UNIX)
        where = f"{tempfile.gettempdir()}/{name}.sock"
        self._socket.bind(where)
        # The child holds the port as well: a second process that outlives the first keeps it taken.
        self._child = subprocess.Popen(SLEEP, pass_fds=(self._listener.fileno(),))
        self.litter = Litter(
            child=_process(self._child.pid),
            grandchild=_process(_start_grandchild()),
            shm=str(segment),
            file=path,
            socket=where,
            port=self._listener.getsockname()[1],
        )

    def clear(self) -> None:
        """Take everything away but the grandchild."""
        self._child.terminate()
        try:
            self._child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._memory.close()
        self._socket.close()
        self._listener.close()
        for path in (self.litter.shm, self.litter.file, self.litter.socket):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _start_grandchild() -> int:
    """Fork twice, into a session of its own, and answer the pid: a process that no parent waits for."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        _become_the_grandchild(write)
    os.close(write)
    os.waitpid(between, 0)
    with open(read, "rb") as file:
        return int(file.read())


def _become_the_grandchild(write: int) -> NoReturn:
    try:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stays so through exec
            os.write(write, str(os.getpid()).encode())
            os.execvp(SLEEP[0], SLEEP)  # noqa: S606  a constant command
    finally:
        os._exit(0)


def _process(pid: int) -> Process:
    """A process and when it began: boot time and field 22 of its stat (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return Process(pid, int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK"))
