"""Real children that fail in every way, and what their parent is told."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protocol import CodedError, Trust
from protocol.carriers.error_file import failure_of, read
from tests.protocol.carriers.children import ID
from tests.support.signals import no_signal_ignored

ROOT = Path(__file__).parents[3]
CHILDREN = "tests.protocol.carriers.children"


@dataclass
class Ended:
    returncode: int
    path: Path
    out: str
    err: str

    @property
    def failure(self) -> CodedError:
        found = failure_of(self.returncode, self.path)
        assert found is not None
        return found

    @property
    def left(self) -> CodedError | None:
        """What is in the file, whatever the status says."""
        found = read(self.path)
        # One file or none, and nothing beside it.
        assert os.listdir(self.path.parent) == ([self.path.name] if found is not None else [])
        return found


def python(*command: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        preexec_fn=no_signal_ignored,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "errors").mkdir()
    return tmp_path / "errors" / "error"


def run(path: Path, *target: object, **environment: str) -> Ended:
    """Run a target through the runner."""
    done = python("-m", "protocol.carriers.child", "--error-file", path, *target, **environment)
    return Ended(done.returncode, path, done.stdout, done.stderr)


def way(path: Path, name: str, *more: object) -> Ended:
    return run(path, "-m", CHILDREN, name, *more)


def installed(path: Path, body: str) -> Ended:
    """Run a program that calls `install` itself."""
    head = f"from protocol.carriers.child import install\ninstall({str(path)!r})\n"
    done = python("-c", head + textwrap.dedent(body))
    return Ended(done.returncode, path, done.stdout, done.stderr)


# -- failures that end the process


def test_a_success_leaves_nothing(path: Path) -> None:
    ended = way(path, "exit_0")
    assert (ended.returncode, ended.left, failure_of(0, path)) == (0, None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", "pass"], "option -c not recognized"),
        (["--error-file"], "option --error-file requires argument"),
        (["program.py"], "--error-file and a script, or -m and a module, are needed"),
        (["--error-file", "x", "-m"], "--error-file and a script, or -m and a module, are needed"),
        (["--error-file=", "x"], "--error-file and a script, or -m and a module, are needed"),
    ],
)
def test_a_wrong_command_line_is_said_in_a_line(arguments: list[str], said: str) -> None:
    done = python("-m", "protocol.carriers.child", *arguments)
    assert done.returncode == os.EX_USAGE
    usage, line = done.stderr.splitlines()
    assert usage.startswith("usage: python -m protocol.carriers.child --error-file PATH [-m MODULE | SCRIPT]")
    assert line == f"python -m protocol.carriers.child: {said}"


def test_help() -> None:
    done = python("-m", "protocol.carriers.child", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--error-file PATH" in done.stdout


def test_unhandled_in_main(path: Path) -> None:
    ended = way(path, "fail")
    assert ended.returncode == os.EX_SOFTWARE
    assert (ended.failure.code, ended.failure.detail) == ("TASK.FAILED", "ValueError: it broke")
    assert ended.failure.data == {"process_end": {"exit_status": os.EX_SOFTWARE}}
    assert ended.failure.trust is Trust.STRUCTURED
    assert (ended.failure.origin.type, ended.failure.origin.text) == ("ValueError", "it broke")
    assert ended.failure.origin.pid != os.getpid()


def test_the_traceback_is_the_programs_own(path: Path) -> None:
    lines = way(path, "fail").err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "children.py" in lines[1]
    assert "child.py" not in "\n".join(lines).replace("children.py", "")
    assert "runpy" not in "\n".join(lines)
    assert lines[-1] == "ValueError: it broke"


def test_a_coded_error_keeps_code_id_and_data_exactly(path: Path) -> None:
    ended = way(path, "fail_with_a_code")
    assert ended.returncode == os.EX_UNAVAILABLE
    left = ended.left
    assert left is not None
    assert (left.code, left.id, left.detail) == ("WEIGHTS.REFIT_ABORTED", ID, "the watchdog")
    assert left.data == {"step": 7, "why": ["a", None]}
    assert (ended.failure.code, ended.failure.id) == (left.code, ID)


def test_what_a_failure_carries_is_its_name(path: Path) -> None:
    ended = way(path, "fail_because_of_a_code")
    assert (ended.failure.code, ended.failure.id) == ("WEIGHTS.REFIT_ABORTED", ID)
    assert ended.failure.detail == "RuntimeError: the trainer gave up"
    assert [link.code for link in ended.failure.chain] == ["", "WEIGHTS.REFIT_ABORTED"]
    assert ended.returncode == os.EX_UNAVAILABLE


def test_a_group(path: Path) -> None:
    ended = way(path, "fail_in_a_group")
    assert (ended.failure.code, ended.failure.id) == ("NODE.IO", ID)
    assert [link.type for link in ended.failure.chain] == [
        "ExceptionGroup",
        "ValueError",
        "protocol.errors.CodedError",
    ]
    assert ended.returncode == os.EX_IOERR


def test_an_exception_without_text(path: Path) -> None:
    ended = way(path, "fail_without_text")
    assert ended.failure.code == "TASK.FAILED"
    assert "whose str() raised RuntimeError" in ended.failure.detail
    assert ended.returncode == os.EX_SOFTWARE


def test_an_interrupt(path: Path) -> None:
    ended = way(path, "interrupt")
    assert ended.returncode == 130
    assert ended.failure.code == "TASK.PROCESS_KILLED"
    assert ended.failure.data["signal"] == "SIGINT"
    assert "KeyboardInterrupt" in ended.err


def test_the_last_memory_is_enough_to_say_so(path: Path) -> None:
    """A real MemoryError, by RLIMIT_AS; what the kernel's OOM killer does is `test_killed`."""
    ended = way(path, "use_up_the_memory")
    assert (ended.failure.code, ended.returncode) == ("NODE.OUT_OF_MEMORY", os.EX_OSERR)
    assert ended.failure.origin.type == "MemoryError"


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("import does_not_exist", "ModuleNotFoundError"),
        ("import broken", "SyntaxError"),
        ("from json import nothing", "ImportError"),
        ("def f(:", "SyntaxError"),
        ("import raising", "protocol.errors.CodedError"),
    ],
)
def test_at_import(path: Path, tmp_path: Path, program: str, kind: str) -> None:
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "raising.py").write_text(
        "from protocol import CodedError\nraise CodedError('CONFIG.MISSING', 'no checkpoint')"
    )
    ended = run(path, tmp_path / "program.py")
    if kind == "protocol.errors.CodedError":
        assert (ended.failure.code, ended.returncode) == ("CONFIG.MISSING", os.EX_CONFIG)
    else:
        assert (ended.failure.code, ended.failure.origin.type) == ("TASK.FAILED", kind)
    ended.path.unlink()
    done = python("-m", "protocol.carriers.child", "--error-file", path, "-m", "program", cwd=tmp_path)
    assert done.returncode == ended.returncode
    assert read(path) is not None


# -- sys.exit


def test_exit_with_a_number_is_a_status_and_no_file(path: Path) -> None:
    ended = way(path, "exit_3")
    assert (ended.returncode, ended.left) == (3, None)
    assert (ended.failure.code, ended.failure.data) == ("TASK.PROCESS_EXITED", {"exit_status": 3})


def test_exit_with_text_is_a_failure_with_that_text(path: Path) -> None:
    ended = way(path, "exit_with_text")
    assert (ended.returncode, ended.err) == (1, "no checkpoint in /ckpt\n")
    assert (ended.failure.code, ended.failure.detail) == ("TASK.PROCESS_EXITED", "no checkpoint in /ckpt")
    assert ended.failure.data == {"process_end": {"exit_status": 1}}


def test_exit_with_a_token_is_believed_as_the_text_it_is(path: Path) -> None:
    failure = way(path, "exit_with_a_token").failure
    assert (failure.code, failure.id, failure.trust) == ("CONFIG.MISSING", ID, Trust.CHECKSUMMED)


def test_exit_at_once_is_not_seen_but_its_status_is(path: Path) -> None:
    ended = way(path, "exit_at_once")
    assert (ended.returncode, ended.left) == (5, None)
    assert ended.failure.data == {"exit_status": 5}


# -- signals


@pytest.mark.parametrize(
    ("call", "signal", "code"),
    [
        (("die", 9), "SIGKILL", "TASK.PROCESS_KILLED"),
        (("die", 15), "SIGTERM", "TASK.PROCESS_KILLED"),
        (("die", 1), "SIGHUP", "TASK.PROCESS_KILLED"),
        (("segfault",), "SIGSEGV", "TASK.PROCESS_CRASHED"),
        (("abort",), "SIGABRT", "TASK.PROCESS_CRASHED"),
        (("die", 4), "SIGILL", "TASK.PROCESS_CRASHED"),
        (("die", 7), "SIGBUS", "TASK.PROCESS_CRASHED"),
        (("use_up_the_cpu",), "SIGXCPU", "TASK.PROCESS_CRASHED"),
        (("use_up_the_file_size",), "SIGXFSZ", "NODE.DISK_FULL"),
    ],
)
def test_killed(path: Path, tmp_path: Path, call: tuple[Any, ...], signal: str, code: str) -> None:
    ended = way(path, *call, *([tmp_path / "file"] if call[0] == "use_up_the_file_size" else []))
    assert ended.returncode < 0
    assert ended.left is None
    failure = ended.failure
    assert (failure.code, failure.data, failure.trust) == (code, {"signal": signal}, Trust.STRUCTURED)
    # An OOM kill is a SIGKILL with a count that rose; the count is the parent's to take.
    blamed = failure_of(ended.returncode, path, oom=True)
    assert blamed is not None
    assert blamed.code == ("NODE.OUT_OF_MEMORY" if signal == "SIGKILL" else code)


def test_a_crash_prints_its_stack(path: Path) -> None:
    ended = way(path, "segfault")
    assert "Fatal Python error: Segmentation fault" in ended.err
    assert "in segfault" in ended.err


# -- failures that do not end the process


@pytest.mark.parametrize(
    "name",
    [
        "fail_in_a_thread",
        "fail_in_a_bare_thread",
        "fail_in_a_task",
        "fail_in_a_callback",
        "fail_at_exit",
        "fail_when_collected",
        "fail_at_the_interpreters_end",
        "fail_at_the_end_of_main",
    ],
)
def test_failures_beside_main_are_left_in_the_file_and_printed_as_ever(path: Path, name: str) -> None:
    ended = way(path, name)
    left = ended.left
    assert left is not None, ended.err
    assert (left.code, left.detail) == ("TASK.FAILED", "ValueError: it broke")
    assert ended.err.rstrip().endswith("ValueError: it broke")
    # The process went on and succeeded: that is no failure of it.
    assert ended.returncode == 0
    assert failure_of(ended.returncode, path) is None


def test_a_task_that_failed_is_reported_once_and_by_asyncio(path: Path) -> None:
    err = way(path, "fail_in_a_task").err
    assert err.count("Task exception was never retrieved") == 1


@pytest.mark.parametrize("name", ["exit_in_a_thread", "lose_a_connection"])
def test_what_is_no_failure_of_the_process_leaves_nothing(path: Path, name: str) -> None:
    ended = way(path, name)
    assert (ended.returncode, ended.left) == (0, None)


def test_a_signal_that_comes_after_a_threads_failure_is_kept_beside_it(path: Path) -> None:
    ended = way(path, "fail_in_a_thread_and_be_killed")
    assert ended.returncode == -9
    assert (ended.failure.code, ended.failure.detail) == ("TASK.FAILED", "ValueError: it broke")
    assert ended.failure.data == {"process_end": {"signal": "SIGKILL", "code": "TASK.PROCESS_KILLED"}}


def test_the_first_failure_wins_and_the_status_is_the_last_ones(path: Path) -> None:
    ended = way(path, "fail_in_a_thread_and_then_in_main")
    assert ended.returncode == os.EX_CONFIG
    assert ended.failure.code == "TASK.FAILED"
    assert ended.failure.data == {"process_end": {"exit_status": os.EX_CONFIG}}


# -- install, in a program of one's own


def test_installed_hooks_see_main_and_pass_it_on(path: Path) -> None:
    ended = installed(path, "raise ValueError('it broke')")
    assert ended.returncode == 1
    assert (ended.failure.code, ended.failure.detail) == ("TASK.FAILED", "ValueError: it broke")
    assert ended.err.endswith("ValueError: it broke\n")


def test_installed_hooks_see_an_interrupt(path: Path) -> None:
    ended = installed(path, "import signal; signal.raise_signal(signal.SIGINT)")
    assert ended.returncode == -2
    assert ended.failure.code == "TASK.PROCESS_KILLED"
    assert ended.failure.data["process_end"] == {"signal": "SIGINT", "code": "TASK.PROCESS_KILLED"}


def test_a_namer_names_what_carries_no_code(path: Path) -> None:
    body = f"""
        import errno
        from faults.classify import name_of
        install({str(path)!r}, name=name_of)
        raise OSError(errno.ENOSPC, "No space left")
    """
    done = python("-c", "from protocol.carriers.child import install" + textwrap.dedent(body))
    found = failure_of(done.returncode, path)
    assert found is not None
    assert found.code == "NODE.DISK_FULL"


def test_a_namer_that_raises_costs_the_file_and_not_the_traceback(path: Path) -> None:
    body = f"""
        def name(exc):
            raise KeyError("no name")
        install({str(path)!r}, name=name)
        raise ValueError("it broke")
    """
    done = python("-c", "from protocol.carriers.child import install" + textwrap.dedent(body))
    assert done.returncode == 1
    assert f"error file {path} could not be written: KeyError: 'no name'" in done.stderr
    assert done.stderr.endswith("ValueError: it broke\n")
    assert not path.exists()


def test_the_hooks_that_stood_there_are_called(path: Path) -> None:
    body = f"""
        import sys, threading
        sys.excepthook = lambda *a: print("main", a[1])
        threading.excepthook = lambda a: print("thread", a.exc_value)
        sys.unraisablehook = lambda a: print("unraisable", a.exc_value)
        install({str(path)!r})
        def fail(*_):
            raise ValueError("it broke")
        t = threading.Thread(target=fail)
        t.start()
        t.join()
        X = type("X", (), {{"__del__": fail}})
        X()
        fail()
    """
    done = python("-c", "from protocol.carriers.child import install" + textwrap.dedent(body))
    assert done.stdout.splitlines() == ["thread it broke", "unraisable it broke", "main it broke"]
    assert done.stderr == ""
    assert read(path) is not None


def test_asyncio_prints_as_before_in_a_program_with_and_without_logging(path: Path) -> None:
    body = """
        import asyncio, gc, logging, sys
        {setup}
        async def fail():
            raise ValueError("it broke")
        async def main():
            t = asyncio.ensure_future(fail())
            await asyncio.wait([t])
            del t
            gc.collect()
        asyncio.run(main())
    """
    bare = installed(path, body.format(setup=""))
    assert bare.err.startswith("Task exception was never retrieved\n")
    assert bare.left is not None
    path.unlink()
    logged = installed(path, body.format(setup="logging.basicConfig(stream=sys.stdout)"))
    assert logged.out.startswith("ERROR:asyncio:Task exception was never retrieved\n")
    assert logged.err == ""
    assert logged.left is not None


def test_a_child_without_stderr(path: Path) -> None:
    body = """
        import os, sys
        os.close(2)
        sys.stderr.close()
        raise ValueError("it broke")
    """
    assert installed(path, body).failure.code == "TASK.FAILED"
    path.unlink()
    head = "import sys; sys.stderr = None; from protocol.carriers.child import install; "
    done = python("-c", f"{head}install({str(path)!r}); raise ValueError('it broke')")
    assert done.returncode == 1
    assert read(path) is not None


def test_an_installed_relative_path_is_where_the_program_was(path: Path) -> None:
    body = """
        import os
        os.chdir(os.path.dirname({path!r}))
        install(os.path.basename({path!r}))
        os.chdir("/")
        raise ValueError("it broke")
    """.format(path=str(path))
    python("-c", "from protocol.carriers.child import install" + textwrap.dedent(body))
    assert read(path) is not None


def test_a_fork_inherits_the_hooks(path: Path) -> None:
    body = """
        import os, sys
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the fork")
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status))
    """
    ended = installed(path, body)
    assert ended.out == "1\n"
    assert ended.left is not None
    assert ended.left.origin.text == "in the fork"


def test_no_directory_is_one_clear_line(path: Path) -> None:
    missing = path / "below"
    expected = f"error file {missing}: there is no directory {path}; make it before the child starts"
    ended = run(missing, "-m", CHILDREN, "exit_0")
    assert ended.returncode == os.EX_CONFIG
    assert ended.err == f"python -m protocol.carriers.child: {expected}\n"
    done = python("-c", f"from protocol.carriers.child import install; install({str(missing)!r})")
    assert expected in done.stderr
    assert "CONFIG.MISSING" in done.stderr


# -- the runner, as a stand-in for python


def test_a_script_that_is_not_there(path: Path) -> None:
    ended = run(path, "nowhere.py")
    assert ended.returncode == os.EX_CONFIG
    assert ended.err.count("\n") == 1
    assert f"script {ROOT}/nowhere.py: no such file" in ended.err
    assert ended.failure.code == "CONFIG.MISSING"


def test_a_module_that_is_not_there(path: Path) -> None:
    ended = run(path, "-m", "no_such_module", "--flag")
    assert ended.failure.origin.type == "ImportError"
    assert ended.failure.detail == "ImportError: No module named no_such_module"


PROGRAM = """
import json, os, sys
main = sys.modules["__main__"]
name = os.path.basename(__file__)
print(json.dumps([__name__, name, sys.argv[1:], sys.path[0], main.__dict__ is globals()]))
"""


@pytest.mark.parametrize("arguments", [[], ["-m", "x"], ["--error-file", "y"], ["--", "-h"], ["a b", ""]])
def test_a_program_sees_what_it_would_see(path: Path, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for target in ([str(tmp_path / "program.py")], ["-m", "program"]):
        plain = python(*target, *arguments, cwd=tmp_path)
        ours = ["-m", "protocol.carriers.child", "--error-file", path]
        wrapped = python(*ours, *target, *arguments, cwd=tmp_path)
        assert plain.stdout
        assert (wrapped.stdout, wrapped.stderr) == (plain.stdout, plain.stderr)


def test_the_safe_path_is_respected(path: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.path[0])")
    ended = run(path, tmp_path / "program.py", PYTHONSAFEPATH="1")
    assert ended.out.strip() != str(tmp_path)


def test_a_relative_path_is_where_the_program_started(path: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os; os.chdir('/'); raise ValueError('it broke')")
    ours = ["-m", "protocol.carriers.child", "--error-file", "errors/error"]
    assert python(*ours, "program.py", cwd=tmp_path).returncode == os.EX_SOFTWARE
    assert read(path) is not None


def test_a_program_may_start_processes_of_multiprocessing(path: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing

            def square(n):
                return n * n

            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.map(square, [2, 3]))
            """
        )
    )
    for target in ([tmp_path / "program.py"], ["-m", "program"]):
        ours = ["-m", "protocol.carriers.child", "--error-file", path]
        done = python(*ours, *target, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "[4, 9]\n"), done.stderr
    assert read(path) is None


def test_the_programs_globals_outlive_main_for_its_threads(path: Path, tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        textwrap.dedent(
            """
            import threading

            class Held:
                def __del__(self):
                    print("collected", flush=True)

            def later():
                threading.main_thread().join()
                print("still held", flush=True)
            """
        )
    )
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import threading
            import library

            held = library.Held()
            threading.Thread(target=library.later).start()
            """
        )
    )
    assert run(path, tmp_path / "program.py").out == "still held\ncollected\n"
