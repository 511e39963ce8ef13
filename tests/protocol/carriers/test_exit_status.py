"""Exit statuses: what a failure ends with, and what an end means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.fault import Outcome
from faults.meanings import meaning
from protocol import Code, Family, Reading, Trust, catalogue
from protocol.carriers.error_file import failure_of
from protocol.carriers.exit_status import memory_cgroup, oom_kills, read_status, status_of
from tests.support.cgroup import memory_cgroup_of
from tests.support.signals import no_signal_ignored

SYSEXITS = {
    os.EX_USAGE: ("EX_USAGE", "CONFIG.INVALID"),
    os.EX_DATAERR: ("EX_DATAERR", "REQUEST.INVALID"),
    os.EX_NOINPUT: ("EX_NOINPUT", "CONFIG.MISSING"),
    os.EX_NOUSER: ("EX_NOUSER", "REQUEST.UNAUTHORIZED"),
    os.EX_NOHOST: ("EX_NOHOST", "TRANSPORT.UNKNOWN"),
    os.EX_UNAVAILABLE: ("EX_UNAVAILABLE", "UPSTREAM.UNKNOWN"),
    os.EX_SOFTWARE: ("EX_SOFTWARE", "TASK.FAILED"),
    os.EX_OSERR: ("EX_OSERR", "NODE.UNKNOWN"),
    os.EX_OSFILE: ("EX_OSFILE", "CONFIG.MISSING"),
    os.EX_CANTCREAT: ("EX_CANTCREAT", "NODE.IO"),
    os.EX_IOERR: ("EX_IOERR", "NODE.IO"),
    os.EX_TEMPFAIL: ("EX_TEMPFAIL", "BACKPRESSURE.UNKNOWN"),
    os.EX_PROTOCOL: ("EX_PROTOCOL", "TRANSPORT.PROTOCOL"),
    os.EX_NOPERM: ("EX_NOPERM", "REQUEST.UNAUTHORIZED"),
    os.EX_CONFIG: ("EX_CONFIG", "CONFIG.INVALID"),
}


# -- writing


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("CONFIG.INVALID", os.EX_CONFIG),
        ("CONFIG.MISSING", os.EX_CONFIG),
        ("REQUEST.REJECTED", os.EX_DATAERR),
        ("REQUEST.UNAUTHORIZED", os.EX_NOPERM),
        ("TIMEOUT.DEADLINE", os.EX_TEMPFAIL),
        ("BACKPRESSURE.OVERLOADED", os.EX_TEMPFAIL),
        ("UPSTREAM.SERVER_ERROR", os.EX_UNAVAILABLE),
        ("TRANSPORT.CONNECT", os.EX_UNAVAILABLE),
        ("TRANSPORT.PROTOCOL", os.EX_PROTOCOL),
        ("INTERNAL.BUG", os.EX_SOFTWARE),
        ("TASK.FAILED", os.EX_SOFTWARE),
        ("NODE.IO", os.EX_IOERR),
        ("NODE.OUT_OF_MEMORY", os.EX_OSERR),
        ("POOL.MISUSE", os.EX_USAGE),
    ],
)
def test_a_code_has_its_status(code: str, status: int) -> None:
    assert status_of(code) == status_of(Code(code)) == status


def test_every_code_of_every_family_has_a_status_of_sysexits() -> None:
    codes = [entry.code for entry in catalogue] + [Code(f"{family}.NEVER_HEARD_OF") for family in Family]
    assert {status_of(code) for code in codes} <= set(range(64, 79))


def test_what_is_no_code_has_no_status() -> None:
    with pytest.raises(ValueError, match="there is no family 'GPU'"):
        status_of("GPU.ECC")


@pytest.mark.parametrize("family", ["CONFIG", "REQUEST", "NODE", "TASK", "UPSTREAM", "BACKPRESSURE"])
def test_a_family_is_read_back_from_its_status(family: str) -> None:
    found = read_status(status_of(f"{family}.NEVER_HEARD_OF")).code
    assert found is not None
    assert found.family == family


# -- reading: what a process exited with


def test_a_success_is_nothing() -> None:
    assert read_status(0) == read_status(0, oom=True) == Reading()


@pytest.mark.parametrize("status", sorted(SYSEXITS))
def test_a_status_of_sysexits_is_a_guess(status: int) -> None:
    name, code = SYSEXITS[status]
    found = read_status(status)
    assert found == Reading(
        Code(code), "", f"exit status {status} ({name})", {"exit_status": status}, Trust.HEURISTIC
    )


def test_the_table_is_all_of_sysexits() -> None:
    assert sorted(SYSEXITS) == list(range(64, 79))


@pytest.mark.parametrize("status", range(64, 79))
def test_no_status_alone_says_that_the_work_may_be_sent_again(status: int) -> None:
    """A code that is retried must not claim that nothing was run: the program may have found out late."""
    code = read_status(status).code
    assert code is not None
    assert catalogue.entry(code).advice == "give_up" or meaning(code)[2] is Outcome.UNKNOWN


@pytest.mark.parametrize("status", [1, 2, 3, 63, 79, 120, 127, 128, 193, 255])
def test_another_status_is_what_it_is(status: int) -> None:
    assert read_status(status) == Reading(
        Code("TASK.PROCESS_EXITED"), "", f"exit status {status}", {"exit_status": status}, Trust.STRUCTURED
    )
    assert read_status(status, oom=True) == read_status(status)


# -- reading: what killed a process

FROM_OUTSIDE = [
    "KILL",
    "TERM",
    "INT",
    "HUP",
    "QUIT",
    "PIPE",
    "ALRM",
    "USR1",
    "USR2",
    "VTALRM",
    "PROF",
    "IO",
    "PWR",
    "STKFLT",
]
ITS_OWN_FAULT = ["SEGV", "BUS", "ILL", "FPE", "ABRT", "TRAP", "SYS", "XCPU"]
IDLE = ["CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "WINCH"]
CODES = {
    **dict.fromkeys(FROM_OUTSIDE, "TASK.PROCESS_KILLED"),
    **dict.fromkeys(ITS_OWN_FAULT, "TASK.PROCESS_CRASHED"),
    "XFSZ": "NODE.DISK_FULL",
}


@pytest.mark.parametrize("name", sorted(CODES))
def test_a_signal_is_what_the_kernel_says(name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    killed, by_shell = read_status(-number), read_status(128 + number)
    assert killed.code == by_shell.code == CODES[name]
    assert killed.data == {"signal": f"SIG{name}"}
    assert by_shell.data == {"exit_status": 128 + number, "signal": f"SIG{name}"}
    assert (killed.trust, by_shell.trust) == (Trust.STRUCTURED, Trust.HEURISTIC)
    assert f"SIG{name}" in killed.detail
    assert str(128 + number) in by_shell.detail


def test_the_tables_name_every_signal() -> None:
    named = {s.name.removeprefix("SIG") for s in signal.Signals} - {"RTMIN", "RTMAX"}
    assert named == {*CODES, *IDLE}


@pytest.mark.parametrize("name", IDLE)
def test_a_signal_that_ends_no_process_is_not_read_into_a_shells_status(name: str) -> None:
    status = 128 + signal.Signals[f"SIG{name}"]
    assert read_status(status).code == "TASK.PROCESS_EXITED"
    assert read_status(status).data == {"exit_status": status}


def test_a_realtime_signal_has_a_number() -> None:
    assert read_status(-40).code == "TASK.PROCESS_KILLED"
    assert read_status(-40).data == {"signal": "SIG40"}


def test_the_oom_killer_sends_sigkill_and_nothing_else() -> None:
    assert read_status(-9, oom=True).code == "NODE.OUT_OF_MEMORY"
    assert read_status(137, oom=True).code == "NODE.OUT_OF_MEMORY"
    assert read_status(-9, oom=True).data == {"signal": "SIGKILL"}
    assert (read_status(-9, oom=True).trust, read_status(137, oom=True).trust) == (
        Trust.STRUCTURED,
        Trust.HEURISTIC,
    )
    for other in (-11, -15, 1, 70, 143, 0):
        assert read_status(other, oom=True) == read_status(other)


@given(st.integers(), st.booleans())
def test_any_number_can_be_read(returncode: int, oom: bool) -> None:
    found = read_status(returncode, oom=oom)
    assert (found.code is None) == (returncode == 0)


@pytest.mark.parametrize("name", [*FROM_OUTSIDE, *ITS_OWN_FAULT])
def test_real_signals_of_a_real_kernel_and_a_real_shell(name: str) -> None:
    script = f"ulimit -c 0; kill -{signal.Signals[f'SIG{name}'].value} $$"
    if name == "XCPU":
        script = "ulimit -c 0; ulimit -S -t 1; while :; do :; done"
    done = subprocess.run(["/bin/sh", "-c", script], timeout=30, preexec_fn=no_signal_ignored)
    assert read_status(done.returncode).data == {"signal": f"SIG{name}"}
    if name != "XCPU":
        nested = ["/bin/sh", "-c", f"ulimit -c 0; /bin/sh -c '{script}'; exit $?"]
        done = subprocess.run(nested, timeout=30, preexec_fn=no_signal_ignored)
        assert read_status(done.returncode).data["signal"] == f"SIG{name}"
        assert read_status(done.returncode).data["exit_status"] == done.returncode


# -- the OOM killer's evidence


def tree(at: Path, cgroup: str, mountinfo: str) -> Path:
    """A /proc of one process, whose mount points are all below ``at``."""
    (at / "proc/42").mkdir(parents=True)
    (at / "proc/self").mkdir()
    (at / "proc/42/cgroup").write_text(cgroup)
    (at / "proc/self/mountinfo").write_text(mountinfo.replace("/sys", f"{at}/sys"))
    return at / "proc"


V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V1_OTHER = "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
V2 = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V2_HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
IN_DOCKER = "41 31 0:38 /docker/abc /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "expected"),
    [
        ("0::/a/b\n", V2, "sys/fs/cgroup/a/b"),
        ("0::/\n", V2, "sys/fs/cgroup"),
        ("1:cpu:/c\n0::/a\n", V2, "sys/fs/cgroup/a"),
        ("4:memory:/job/1\n3:cpu:/\n0::/\n", V2_HYBRID + V1_OTHER + V1, "sys/fs/cgroup/memory/job/1"),
        ("4:hugetlb,memory:/job\n", V1, "sys/fs/cgroup/memory/job"),
        ("0::/docker/abc/x\n", IN_DOCKER, "sys/fs/cgroup/x"),
        ("0::/docker/abc\n", IN_DOCKER, "sys/fs/cgroup"),
        ("0::/docker/other\n", IN_DOCKER, None),
        ("0::/../elsewhere\n", V2, None),
        ("4:memory:/job\n", V1_OTHER, None),
        ("3:cpu:/job\n", V1_OTHER, None),
        ("0::/a b\n", V2.replace("/sys/fs/cgroup ", "/sys/fs/c\\040g "), "sys/fs/c g/a b"),
        ("", V2, None),
    ],
)
def test_the_memory_cgroup_of_a_process(
    tmp_path: Path, cgroup: str, mountinfo: str, expected: str | None
) -> None:
    proc = tree(tmp_path, cgroup, mountinfo)
    assert memory_cgroup(42, proc=proc) == (tmp_path / expected if expected is not None else None)
    assert memory_cgroup(43, proc=proc) is None


def test_the_count_of_v2_and_of_v1(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert oom_kills(tmp_path) == 7
    (tmp_path / "memory.events").write_text("low 1\nhigh 2\nmax 3\noom 4\noom_kill 5\noom_group_kill 6\n")
    assert oom_kills(tmp_path) == 5


@pytest.mark.parametrize("text", ["", "oom 4\n", "oom_kill\n", "oom_kill many\n", "oom_kill -1\n", "\xff\n"])
def test_a_kernel_that_keeps_no_count_is_not_taken_for_zero(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.events").write_bytes(text.encode("latin-1"))
    assert oom_kills(tmp_path) is None


def test_a_process_that_is_gone_has_no_count() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    assert memory_cgroup(gone.pid) is None
    assert oom_kills(gone.pid) is None


def test_the_count_of_this_kernel_is_unmoved_by_a_kill_from_outside() -> None:
    """SIGKILL from us is no OOM kill; a child has the cgroup of its parent."""
    before = oom_kills(os.getpid())
    if before is None:
        pytest.skip("this kernel offers no count of OOM kills here")
    with subprocess.Popen(["sleep", "60"]) as child:
        assert memory_cgroup(child.pid) == memory_cgroup(os.getpid())
        child.kill()
        child.wait(30)
    cgroup = memory_cgroup(os.getpid())
    assert cgroup is not None
    assert oom_kills(cgroup) == before


# -- a real kill by the kernel


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    with memory_cgroup_of(64 * 2**20) as made:
        yield made


def test_a_child_that_the_kernel_kills_for_its_memory(small_cgroup: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        f"open({str(small_cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "held = []\n"
        "while True:\n"
        "    held.append(bytearray(os.urandom(2**20)))\n"
    )
    before = oom_kills(small_cgroup)
    done = subprocess.run([sys.executable, "-c", program], timeout=50, capture_output=True)
    after = oom_kills(small_cgroup)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert before is not None
    assert after is not None
    assert after > before
    error = failure_of(done.returncode, tmp_path / "no-file", oom=after > before)
    assert error is not None
    assert error.code == "NODE.OUT_OF_MEMORY"
