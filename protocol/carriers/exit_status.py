"""Exit statuses: all that is left of a child process that wrote nothing.

`status_of` is the status with which a program of ours ends on a failure: one of 64 to 78, whose meanings
BSD's sysexits.h fixed. `read_status` is the way back from what ``subprocess`` or a shell reports. A
status says little: any program may use any of them, and it never says which reason of a family it was.
What the kernel says, that a signal ended the process, is certain; why the signal was sent is not, and
`oom_kills` counts the evidence for the one sender that leaves some.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

from protocol.codes import Code
from protocol.reading import Reading
from protocol.token import Trust

EXIT_STATUS: Final = "exit_status"
"""In a failure's data: the status that the process exited with. (``status`` is an HTTP status.)"""
SIGNAL: Final = "signal"
"""In a failure's data: the name of the signal that ended the process."""

# A code's own row, else its family's.
_STATUS: Final[dict[str, int]] = {
    "TASK": 70,  # EX_SOFTWARE
    "ACTOR": 69,  # EX_UNAVAILABLE
    "NODE": 71,  # EX_OSERR
    "NODE.IO": 74,  # EX_IOERR
    "NODE.DISK_FULL": 74,
    "OBJECT": 70,
    "TIMEOUT": 75,  # EX_TEMPFAIL
    "CANCEL": 70,  # no EX_TEMPFAIL: what was cancelled is not to be tried again
    "TRANSPORT": 69,
    "TRANSPORT.PROTOCOL": 76,  # EX_PROTOCOL
    "UPSTREAM": 69,
    "REQUEST": 65,  # EX_DATAERR
    "REQUEST.UNAUTHORIZED": 77,  # EX_NOPERM
    "BACKPRESSURE": 75,
    "POOL": 69,
    "POOL.MISUSE": 64,  # EX_USAGE
    "ENGINE": 69,
    "WEIGHTS": 69,
    "QUEUE": 75,
    "CONFIG": 78,  # EX_CONFIG
    "INTERNAL": 70,
    "UNKNOWN": 70,
}

# The reason UNKNOWN where the family is all that the status tells. Nothing here may say that the work
# was not run and may be sent again: a program can find out late that a service is not there.
_READ: Final[dict[int, tuple[str, str]]] = {
    64: ("EX_USAGE", "CONFIG.INVALID"),
    65: ("EX_DATAERR", "REQUEST.INVALID"),
    66: ("EX_NOINPUT", "CONFIG.MISSING"),
    67: ("EX_NOUSER", "REQUEST.UNAUTHORIZED"),
    68: ("EX_NOHOST", "TRANSPORT.UNKNOWN"),
    69: ("EX_UNAVAILABLE", "UPSTREAM.UNKNOWN"),
    70: ("EX_SOFTWARE", "TASK.FAILED"),
    71: ("EX_OSERR", "NODE.UNKNOWN"),
    72: ("EX_OSFILE", "CONFIG.MISSING"),
    73: ("EX_CANTCREAT", "NODE.IO"),
    74: ("EX_IOERR", "NODE.IO"),
    75: ("EX_TEMPFAIL", "BACKPRESSURE.UNKNOWN"),
    76: ("EX_PROTOCOL", "TRANSPORT.PROTOCOL"),
    77: ("EX_NOPERM", "REQUEST.UNAUTHORIZED"),
    78: ("EX_CONFIG", "CONFIG.INVALID"),
}

# Signals that a process brings upon itself. All others come from outside.
_SIGNALS: Final[dict[str, str]] = {
    "SIGSEGV": "TASK.PROCESS_CRASHED",
    "SIGBUS": "TASK.PROCESS_CRASHED",
    "SIGILL": "TASK.PROCESS_CRASHED",
    "SIGFPE": "TASK.PROCESS_CRASHED",
    "SIGABRT": "TASK.PROCESS_CRASHED",
    "SIGTRAP": "TASK.PROCESS_CRASHED",
    "SIGSYS": "TASK.PROCESS_CRASHED",
    "SIGXCPU": "TASK.PROCESS_CRASHED",  # its RLIMIT_CPU is used up: elsewhere it would use it up again
    "SIGXFSZ": "NODE.DISK_FULL",  # its RLIMIT_FSIZE: what classify calls the same limit met as EFBIG
}
_LAST_SIGNAL: Final = 64
# The default of these is to do nothing or to stop: no status of a shell means them.
_NEVER_ENDS: Final = frozenset(
    ("SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH")
)


def status_of(code: Code | str) -> int:
    """The status, 64 to 78, with which a program ends on a failure named ``code``.

    Raises ValueError when ``code`` is malformed."""
    code = Code(code)
    return _STATUS.get(code, _STATUS[code.family])


def read_status(returncode: int, *, oom: bool = False) -> Reading:
    """What an exit status means; an empty reading for 0.

    ``returncode`` is as ``subprocess`` has it (-9: killed by signal 9) or as a shell or a container
    runtime reports it (137: 128 + 9). ``data`` holds the ``exit_status`` (of a process that exited), or the
    ``signal``'s name (of one that was killed), and both where a shell stood in between. The trust is
    STRUCTURED for what the kernel says, HEURISTIC for 64 to 78 and for 128 + n, which any program may
    use, and STRUCTURED for another status, whose code claims no more than that the process exited.

    ``oom`` says that the kernel's out-of-memory killer was at work meanwhile (see `oom_kills`). It sends
    SIGKILL, so no other end of a process is put down to it."""
    if returncode == 0:
        return Reading()
    if -_LAST_SIGNAL <= returncode < 0:
        name = signal_name(-returncode)
        return _by_signal(name, f"killed by signal {-returncode} ({name})", {}, Trust.STRUCTURED, oom)
    name = signal_name(returncode - 128)
    if 128 < returncode <= 128 + _LAST_SIGNAL and name not in _NEVER_ENDS:
        text = f"exit status {returncode}, a shell's word for signal {returncode - 128} ({name})"
        return _by_signal(name, text, {EXIT_STATUS: returncode}, Trust.HEURISTIC, oom)
    if returncode in _READ:
        meaning, code = _READ[returncode]
        text = f"exit status {returncode} ({meaning})"
        return Reading(Code(code), "", text, {EXIT_STATUS: returncode}, Trust.HEURISTIC)
    code, text = "TASK.PROCESS_EXITED", f"exit status {returncode}"
    return Reading(Code(code), "", text, {EXIT_STATUS: returncode}, Trust.STRUCTURED)


def _by_signal(name: str, text: str, data: dict[str, int], trust: Trust, oom: bool) -> Reading:
    code = _SIGNALS.get(name, "TASK.PROCESS_KILLED")
    if oom and name == "SIGKILL":
        code, text = "NODE.OUT_OF_MEMORY", f"{text} while the kernel's out-of-memory killer was at work"
    return Reading(Code(code), "", text, {**data, SIGNAL: name}, trust)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``SIG`` and the number for the realtime signals, which have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def oom_kills(of: int | Path) -> int | None:
    """How many processes of a memory cgroup the kernel's out-of-memory killer has killed so far; ``of`` is
    the cgroup's directory or the pid of a process in it. None where no count is to be had: no Linux, no
    such process, no memory cgroup mounted here, or the root of a v2 hierarchy, which keeps none.

    Read it before a child starts and after it ended, and a SIGKILL with a count that rose in between was
    most likely the killer's: the count is the whole cgroup's (v2: with those below it), so a neighbour may
    have been the victim. The kernel counts before it sends the signal, so whoever has waited for the child
    sees it. A dead process is in no cgroup any more: ask for its parent's, which it inherits, or keep what
    `memory_cgroup` said while it lived. Needs no privilege."""
    cgroup = memory_cgroup(of) if isinstance(of, int) else of
    if cgroup is None:
        return None
    for name in ("memory.events", "memory.oom_control"):  # v2, v1
        try:
            lines = (cgroup / name).read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            key, _, count = line.partition(" ")
            if key == "oom_kill" and count.isdecimal():
                return int(count)
    return None


def memory_cgroup(pid: int, *, proc: Path = Path("/proc")) -> Path | None:
    """The directory of the memory cgroup that the process ``pid`` is in, v2 or v1; None where there is
    none, or none that this process can see."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text("utf-8", "surrogateescape").splitlines()
        mounts = (proc / "self" / "mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    paths: dict[str, str] = {}  # by the file system's type: where the group is in its hierarchy
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path  # beats a v2 hierarchy beside it, which cannot count memory then
    for kind in ("cgroup", "cgroup2"):
        if kind in paths:
            found = _below_mount(kind, paths[kind], mounts)
            if found is not None:
                return found
    return None


def _below_mount(kind: str, path: str, mounts: list[str]) -> Path | None:
    # proc_pid_mountinfo(5): id, parent, device, root, mount point, options, tags… - type, source, options
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, (found, _, options) = before.split(" "), after.split(" ", 2)
        if found != kind or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, point = _unescaped(fields[3]), _unescaped(fields[4])
        # In a container the mount may show a part of the hierarchy alone, and the path count from its top.
        # A path with .. leads out of our cgroup namespace, to where nothing of the kind is mounted.
        inside = os.path.relpath(path, root)
        if ".." not in path.split("/") and not inside.startswith(".."):
            return Path(point) / inside
    return None


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
