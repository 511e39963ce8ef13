"""Reading a failure from text alone: a pasted traceback, a log line, what Ray kept of an exception
that it could not carry.

Python and Ray write an exception's type at the start of a line; Ray names both itself and the cause,
``ray.exceptions.RayTaskError(ActorDiedError): ray::Outer.call() (pid=…)``. Everything read here is a
guess: text can be forged, and the fault's trust says so.
"""

from __future__ import annotations

import re
from typing import Final

from faults.http_faults import HTTP, status_code
from faults.pool_faults import POOLS
from faults.ray_faults import NESTED, RAY, TASK_ERROR, TEXT_ONLY
from faults.torch_faults import TORCH
from protocol.carriers.log_line import without_terminal

MAX_SEARCH: Final = 65536
"""Characters of a text, counted from its end, that are looked at."""

MAX_LINE: Final = 1000
"""Most characters of a line on either side of a token that are kept as evidence."""

BUILTIN: Final[dict[str, str]] = {
    "TimeoutError": "TIMEOUT.DEADLINE",
    "asyncio.exceptions.TimeoutError": "TIMEOUT.DEADLINE",
    "asyncio.exceptions.CancelledError": "CANCEL.CALLER",
    "concurrent.futures._base.CancelledError": "CANCEL.CALLER",
    "KeyboardInterrupt": "CANCEL.CALLER",
    "ConnectionRefusedError": "TRANSPORT.CONNECT",
    "ConnectionResetError": "TRANSPORT.DISCONNECTED",
    "ConnectionAbortedError": "TRANSPORT.DISCONNECTED",
    "BrokenPipeError": "TRANSPORT.DISCONNECTED",
    "EOFError": "TRANSPORT.DISCONNECTED",
    "MemoryError": "NODE.OUT_OF_MEMORY",
}
_FULL: Final[dict[str, str]] = {**TORCH, **RAY, **HTTP, **POOLS, **BUILTIN}
_SHORT: Final[dict[str, str]] = {name.rpartition(".")[2]: code for name, code in _FULL.items()}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for the tab and the end of a line
# What stands before a line in a worker's log, in an ExceptionGroup's tree.
_PREFIX = re.compile(
    r"^(?:\([^()\n]{1,80} pid=[0-9]{1,10}[^()\n]{0,80}\) ?)?(?:[ +|-]{1,40}\| ?)?", re.MULTILINE
)
_LINE = re.compile(
    r"^([A-Za-z_][A-Za-z0-9_.]{2,120})(?:\(([A-Za-z_][A-Za-z0-9_]{0,80})\))?(?:: ?(.{0,400}).*)?$", re.M
)
_STATUS = re.compile(r"(?<![0-9])([1-5][0-9]{2})(?![0-9])")
_INIT = "error raised in its creation task"
# What Ray 2.60 prints without the name of an exception: a worker, its raylet, the driver about a result
# that nobody fetched (ray/_private/utils.py, node_manager.cc, worker.py). And PyTorch, before it aborts the
# process: NCCL's watchdog (ProcessGroupNCCL.cpp), an exception that a thread of C++ did not catch.
_TERMINATED: Final = "terminate called after throwing an instance of 'c10::"
_SAID: Final = tuple(
    (re.compile(pattern, re.MULTILINE), code)
    for pattern, code in (
        (r"^Exception raised in creation task: The actor died.{0,400}", "ACTOR.INIT_FAILED"),
        (r"^A worker died or was killed while executing a task.{0,400}", "TASK.WORKER_CRASHED"),
        (
            r"^[0-9]{1,6} Workers \(tasks / actors\) killed due to memory pressure.{0,400}",
            "NODE.OUT_OF_MEMORY",
        ),
        (r"^.{0,200}\bWatchdog caught collective operation timeout: .{0,400}", "TASK.COLLECTIVE_FAILED"),
        (rf"^{_TERMINATED}Dist[A-Za-z]{{0,20}}Error'.{{0,400}}", "TASK.COLLECTIVE_FAILED"),
        (rf"^{_TERMINATED}OutOfMemoryError'.{{0,400}}", "TASK.GPU_OUT_OF_MEMORY"),
        (rf"^{_TERMINATED}AcceleratorError'.{{0,400}}", "TASK.GPU_FAILED"),
        (r"^(?:[^\n]{1,120} -- )?Unhandled error \(suppress with .{0,400}", TASK_ERROR),
    )
)


def guess(text: str) -> tuple[str, int | None, str] | None:
    """(code, HTTP status, the line it was read from), or None when no known type is named."""
    plain_text = _unprefixed(text)
    lines = list(_LINE.finditer(plain_text))
    known = [line for line in lines if _code_of(line) is not None]
    said = _said(plain_text)
    if said is not None and not any(line.start() < said[0].start() for line in known):
        # What stands below it was printed by what failed.
        below = [line for line in lines if line.start() > said[0].start()]
        return _unhandled(said[0], below) if said[1] == TASK_ERROR else (said[1], None, said[0].group(0))
    outer = next((m for m in reversed(lines) if m.group(1) == TASK_ERROR and m.group(2)), None)
    created = next((m for m in reversed(known) if _code_of(m) == "ACTOR.DIED" and _INIT in m.group(0)), None)
    if created is not None and (outer is None or outer.start() < created.start()):
        # Whatever stands below it was printed by it, from inside the __init__ that failed.
        return "ACTOR.INIT_FAILED", None, created.group(0)
    code = _by_short(outer.group(2), known) if outer is not None else ""
    if outer is not None and code not in TEXT_ONLY:
        # Likewise, from inside our callee.
        status = None
        if code == "UPSTREAM.SERVER_ERROR":
            code, status = _by_status(next((m.group(0) for m in reversed(known) if m is not outer), ""))
        return NESTED.get(code, code), status, _told(outer, lines)
    for line in reversed(known):
        code = _code_of(line) or ""
        if code in TEXT_ONLY or line.group(1) == TASK_ERROR:
            continue
        if code == "UPSTREAM.SERVER_ERROR":
            code, status = _by_status(line.group(3) or "")
            return code, status, line.group(0)
        inside = any(m.group(1) == TASK_ERROR and m.start() < line.start() for m in known)
        return NESTED.get(code, code) if inside else code, None, line.group(0)
    if known:
        return _code_of(known[-1]) or "", None, known[-1].group(0)
    return None


def names_failure(line: str) -> bool:
    """Whether a line of its own, without what a log puts before it, begins as the report of a failure
    that the tables know."""
    match = _LINE.match(_unprefixed(line))
    if match is not None and (match.group(1) == TASK_ERROR or _code_of(match) is not None):
        return True
    return any(pattern.match(line) for pattern, _ in _SAID)


def plain(text: str) -> str:
    """``text`` without terminal sequences and control characters: it comes from a log, and goes to a
    terminal."""
    return _CONTROL.sub("", without_terminal(text))


def line_of(needle: str, text: str) -> str:
    """The line of ``text`` that holds ``needle`` in any case, or its end where none does."""
    found = re.search(re.escape(needle), text, re.IGNORECASE)
    if found is None:
        return text[-MAX_LINE:]
    start = text.rfind("\n", max(0, found.start() - MAX_LINE), found.start()) + 1
    end = text.find("\n", found.end(), found.end() + MAX_LINE)
    return text[start or max(0, found.start() - MAX_LINE) : end if end >= 0 else found.end() + MAX_LINE]


def _unprefixed(text: str) -> str:
    return _PREFIX.sub("", without_terminal(text[-MAX_SEARCH:].replace("\r\n", "\n")))


def _said(text: str) -> tuple[re.Match[str], str] | None:
    found = [(match, code) for pattern, code in _SAID if (match := pattern.search(text)) is not None]
    return min(found, key=lambda one: one[0].start(), default=None)


def _unhandled(said: re.Match[str], below: list[re.Match[str]]) -> tuple[str, int | None, str]:
    if not below:
        return "TASK.FAILED", None, said.group(0)
    code = _by_short(_short(below[-1]), below)
    if code in TEXT_ONLY:
        code = "TASK.FAILED"
    if code == "UPSTREAM.SERVER_ERROR":
        return *_by_status(below[-1].group(3) or ""), below[-1].group(0)
    return NESTED.get(code, code), None, below[-1].group(0)


def _told(outer: re.Match[str], lines: list[re.Match[str]]) -> str:
    """What the cause says of itself, and in which call."""
    own = next((m.group(0) for m in reversed(lines) if m.group(3) and _short(m) == outer.group(2)), "")
    call = outer.group(3) or ""
    return f"{own} [in {call}]" if own and call.startswith("ray::") else own or outer.group(0)


def _short(line: re.Match[str]) -> str:
    return line.group(1).rpartition(".")[2]


def _by_short(name: str, lines: list[re.Match[str]]) -> str:
    """The code of a class that Ray names without its module, by the last line that names it in full: Ray and
    PyTorch both have an OutOfMemoryError."""
    named = (_FULL.get(m.group(1)) for m in reversed(lines) if _short(m) == name)
    return next((code for code in named if code is not None), _SHORT.get(name, "TASK.FAILED"))


def _code_of(line: re.Match[str]) -> str | None:
    name = line.group(1)
    # aiohttp's and httpx's classes print with the module they live in or the package's name.
    return _FULL.get(name) or (
        _SHORT.get(name.rpartition(".")[2]) if name.startswith(("aiohttp.", "httpx.")) else None
    )


def _by_status(text: str) -> tuple[str, int | None]:
    digits = _STATUS.search(text)
    status = int(digits.group(1)) if digits else None
    return (status_code(status) if status else None) or "UNKNOWN.EXCEPTION", status
