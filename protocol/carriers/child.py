"""A child process that leaves its failures behind: hooks that write the error file, and a runner.

`install` puts the hooks into a program that can be changed. One that can't is run by::

    python -m protocol.carriers.child --error-file PATH [-m MODULE | SCRIPT] ARGS...

which installs them first, so that failures at import are seen too, runs the program as ``__main__``, and
ends with `status_of` its failure. The parent asks `protocol.carriers.error_file.failure_of`.

Seen is what goes unhandled: in the main thread, in another thread, in a task or a callback of asyncio
(when asyncio reports it, which for a task that nobody awaits is when it is collected), in ``__del__`` and
in ``atexit`` callbacks, up to the end of the interpreter. The last four do not end a process. Its file is
there all the same, and stays the first failure whatever happens later: if the process ends with 0 it is a
success with something to look at. Not seen is what Python is not told of: ``os._exit`` and signals, for
which the exit status has to do (`faulthandler` prints the stack of a crash), and ``sys.exit`` with a
number, which is no failure by itself and arrives as the status that it is.
"""

from __future__ import annotations

import faulthandler
import getopt
import logging
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from protocol.boundary import Namer
from protocol.carriers.error_file import named, write
from protocol.carriers.exit_status import status_of
from protocol.codes import Code
from protocol.errors import CodedError
from protocol.safe import clean, text_of

ERROR_FILE: Final = "FAILSOFT_ERROR_FILE"
"""Environment variable by which a parent names the error file to a child whose command it was given: the
runner takes it where ``--error-file`` is missing, a program of your own passes it to `install`."""
INTERRUPTED: Final = 130
"""Exit status after a KeyboardInterrupt: 128 + SIGINT, as shells have it."""

_PROGRAM: Final = "python -m protocol.carriers.child"
_USAGE: Final = f"usage: {_PROGRAM} --error-file PATH [-m MODULE | SCRIPT] ARGS..."
_HELP: Final = """
Run a Python program that leaves its failure in an error file.

--error-file PATH   the file; a path in an existing directory, where no file is yet;
                    without it, the path in the environment variable FAILSOFT_ERROR_FILE
-m MODULE           run a module, as python -m does
"""

# Given back before the first failure is written, which may be that there is no memory left.
_reserve: Final = [bytearray(4 << 20)]  # address space alone, until somebody touches it

# What asyncio's own exception handler begins its report with (base_events, events, runners). It also
# reports broken connections there, which are the transport's to handle and no failure of the process.
_UNHANDLED: Final = (
    "Task exception was never retrieved",
    "Future exception was never retrieved",
    "Exception in callback",
    "unhandled exception during asyncio.run() shutdown",
)


def install(path: str | os.PathLike[str], *, name: Namer | None = None) -> None:
    """From now on the first unhandled failure of this process is written to the error file ``path``, and
    then goes to the hook that stood there before. ``name`` names exceptions that carry no code
    (`faults.name_of`); without it they are TASK.FAILED.

    A forked child inherits the hooks with the path. asyncio's reports are seen while its logger is on and
    its loop has no exception handler of its own.

    Raises CodedError CONFIG.MISSING when the path's directory does not exist."""
    path = Path(os.path.abspath(path))
    if not path.parent.is_dir():
        raise CodedError(
            "CONFIG.MISSING",
            f"error file {path}: there is no directory {path.parent}; make it before the child starts",
        )
    leave = _leaver(path, name)
    _hook_main(leave)
    _hook_threads(leave)
    _hook_unraisable(leave)
    logging.getLogger("asyncio").addFilter(_AsyncioReports(leave))
    _enable_faulthandler()


Leave = Callable[[BaseException | None], None]


def _leaver(path: Path, name: Namer | None) -> Leave:
    def leave(exc: BaseException | None) -> None:
        # SystemExit ends the thread that raised it, on purpose.
        if exc is not None and not issubclass(type(exc), SystemExit):
            _leave(path, exc, name)

    return leave


def _leave(path: Path, exc: BaseException, name: Namer | None = None) -> Code:
    """Write ``exc`` to the error file, if it is the first, and return its code."""
    _reserve.clear()
    try:
        error = named(exc, name)
        write(path, error)
    except Exception as problem:  # noqa: BLE001 - ``name`` may raise anything, and memory may be short
        # The failure is not lost with its file: the hook that stood there before prints it.
        _say(f"error file {path} could not be written: {type(problem).__name__}: {clean(problem, 200)}")
        return Code("TASK.FAILED")
    return error.code


def _say(line: str) -> None:
    if sys.stderr is not None:  # pythonw has none, and neither has a daemon that closed its own
        print(line, file=sys.stderr)


def _hook_main(leave: Leave) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, traceback: TracebackType | None) -> None:
        leave(exc)
        previous(kind, exc, traceback)

    sys.excepthook = hook


def _hook_threads(leave: Leave) -> None:
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        leave(args.exc_value)
        previous(args)

    threading.excepthook = hook


def _hook_unraisable(leave: Leave) -> None:
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        leave(unraisable.exc_value)
        previous(unraisable)

    sys.unraisablehook = hook


class _AsyncioReports(logging.Filter):
    """A filter that lets everything pass. A handler would do as well, but with one of its own asyncio's
    logger would not fall back on printing to stderr in a program that sets up no logging."""

    def __init__(self, leave: Leave) -> None:
        super().__init__()
        self._leave = leave

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.msg, str) and record.msg.startswith(_UNHANDLED):
            self._leave(record.exc_info[1])
        return True


def _enable_faulthandler() -> None:
    if faulthandler.is_enabled():
        return
    # stderr may be closed, or no file: then there is nowhere to print a stack to.
    with suppress(RuntimeError, OSError, ValueError, AttributeError):
        faulthandler.enable()


def main(arguments: Sequence[str]) -> int:
    """Run the program that the command line names, and return the exit status."""
    try:
        # Not argparse, which cannot leave everything after the target alone (a "--" above all).
        options, rest = getopt.getopt(list(arguments), "hm", ["help", "error-file="])
        given = {"--error-file": os.environ.get(ERROR_FILE, ""), **dict(options)}
        if given.keys() & {"-h", "--help"}:
            print(f"{_USAGE}\n{_HELP}")
            return 0
        if not given.get("--error-file") or not rest:
            raise getopt.GetoptError("--error-file and a script, or -m and a module, are needed")
    except getopt.GetoptError as wrong:
        _say(f"{_USAGE}\n{_PROGRAM}: {wrong.msg}")
        return os.EX_USAGE
    path = Path(os.path.abspath(given["--error-file"]))  # now: the program may change the directory
    try:
        install(path)
        if "-m" not in given:
            _check_script(rest[0])
    except CodedError as error:
        if path.parent.is_dir():
            write(path, error)
        _say(f"{_PROGRAM}: {error.detail}")
        return status_of(error.code)
    return _run(rest[0], rest[1:], module="-m" in given, path=path)


def _check_script(script: str) -> None:
    if not os.path.exists(script):
        raise CodedError(
            "CONFIG.MISSING", f"script {os.path.abspath(script)}: no such file; a module is run with -m"
        )


def _run(target: str, arguments: Sequence[str], *, module: bool, path: Path) -> int:
    sys.argv = [target, *arguments]
    if not module and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(target))  # as python itself does; so far it was ours
    try:
        if module:
            ended = runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            ended = runpy.run_path(target, run_name="__main__")
    except SystemExit as exc:
        return _exited(exc, path)
    except BaseException as exc:  # noqa: BLE001 - the end of the process: whatever comes here is its failure
        code = _leave(path, exc)
        _trim(exc)
        sys.excepthook(type(exc), exc, exc.__traceback__)
        return INTERRUPTED if issubclass(type(exc), KeyboardInterrupt) else status_of(code)
    # As with python itself, the program's globals live until the interpreter ends, for its other threads
    # may still go on. In __main__ they are torn down while sys.unraisablehook is still there.
    vars(sys.modules["__main__"])["program"] = ended
    return 0


def _exited(exc: SystemExit, path: Path) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code
    _leave(path, exc)  # sys.exit("text") is how scripts say that they failed
    _say(text_of(exc.code))
    return 1


def _trim(exc: BaseException) -> None:
    """Cut the runner's own frames from the top of the traceback: people read where their program was."""
    traceback = exc.__traceback__
    while traceback is not None:
        of = traceback.tb_frame.f_globals
        if of is not globals() and of.get("__name__") != "runpy":
            break
        traceback = traceback.tb_next
    exc.__traceback__ = traceback


if __name__ == "__main__":
    # Not the main of this copy: the hooks would keep __main__ alive for longer than an interpreter does.
    from protocol.carriers import child

    sys.exit(child.main(sys.argv[1:]))
