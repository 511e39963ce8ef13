"""The error file: the first failure, whole, or nothing; and what its reader makes of anything else."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import Code, CodedError, Family, Trust, code_of, keys, mint
from protocol.carriers import error_file
from protocol.carriers.error_file import MAX_FILE, failure_of, named, read, write
from protocol.carriers.http_problem import problem
from protocol.carriers.http_reply import read_reply
from protocol.errors import Link, Origin
from protocol.token import _mac
from tests.protocol.badly_written import HOSTILE, KeywordOnly, Plain, RequiredArguments, coded_errors

ROOT = Path(__file__).parents[3]
CHILDREN = [sys.executable, "-m", "tests.protocol.carriers.children"]
CODE = Code("WEIGHTS.REFIT_ABORTED")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "error"


def only(path: Path) -> bool:
    """Whether ``path`` is all that its directory holds."""
    return os.listdir(path.parent) == [path.name]


# -- round trips


@pytest.mark.parametrize("name", sorted(coded_errors()))
def test_what_is_read_equals_what_was_written(path: Path, name: str) -> None:
    error = coded_errors()[name]
    assert write(path, error)
    found = read(path)
    assert found == error
    assert found is not None
    assert (str(found), found.args, found.chain) == (str(error), (error.code, error.detail), error.chain)
    assert found.trust is Trust.STRUCTURED
    assert only(path)


texts = st.text(max_size=60) | st.sampled_from(
    ["x" * 9000, "http://u:p@h/", "\x00\x1b\u2028", "\ud800", "FS1."]
)
data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
codes = st.builds(
    lambda family, reason: Code(f"{family}.{reason}"),
    st.sampled_from(Family),
    st.from_regex(r"[A-Z]([A-Z0-9_]{0,38}[A-Z0-9])?", fullmatch=True),
)


@st.composite
def errors(draw: st.DrawFn) -> CodedError:
    if draw(st.booleans()):
        error = CodedError(draw(codes), draw(texts), draw(st.dictionaries(texts, data, max_size=5)))
    else:
        error = CodedError.from_exception(KeywordOnly(status=draw(st.integers())), draw(codes))
    for note in draw(st.lists(texts, max_size=2)):
        error.add_note(note)
    below: BaseException = error
    for text in draw(st.lists(texts, max_size=10)):
        below.__cause__ = ValueError(text) if draw(st.booleans()) else CodedError(draw(codes), text)
        below = below.__cause__
        below.add_note(text)
    return error


@settings(max_examples=150, deadline=None)
@given(errors())
def test_any_failure_survives_the_file(tmp_path_factory: pytest.TempPathFactory, error: CodedError) -> None:
    path = tmp_path_factory.mktemp("error") / "error"
    assert write(path, error)
    assert read(path) == error
    again = path.with_name("again")
    found = read(path)
    assert found is not None
    assert write(again, found)  # passed on by a parent that fails of it
    assert again.read_bytes() == path.read_bytes()


def test_a_subclass_arrives_as_the_failure_that_it_is(path: Path) -> None:
    for n, error in enumerate([Plain(CODE, "d"), RequiredArguments("sglang", 30000)]):
        assert write(f"{path}{n}", error)
        assert read(f"{path}{n}") == error


def test_notes_are_kept(path: Path) -> None:
    error = CodedError(CODE, "x")
    error.add_note("while loading shard 7")
    assert write(path, error)
    found = read(path)
    assert found is not None
    assert found.__notes__ == ["while loading shard 7"]


def test_a_text_search_of_the_file_finds_the_failure(path: Path) -> None:
    error = CodedError(CODE, "d")
    write(path, error)
    assert code_of(path.read_bytes()) == code_of(path.read_text()) == CODE
    assert error.token in path.read_text()


def test_the_token_in_the_file_is_signed_by_who_has_the_key(path: Path) -> None:
    ring = keys.Keyring.generate()
    keys.hold(ring)
    try:
        write(path, CodedError(CODE))
    finally:
        keys.hold(None)
    assert code_of(path.read_bytes(), key=ring) == CODE
    assert code_of(path.read_bytes()) is None
    found = read(path)
    assert found is not None
    assert (found.code, found.trust) == (CODE, Trust.STRUCTURED)


# -- naming


def test_a_foreign_exception_is_named_first(path: Path) -> None:
    exc = KeywordOnly(status=503)
    exc.__cause__ = OSError(5, "a disk")
    assert write(path, exc)
    found = read(path)
    assert found is not None
    assert found.code == "TASK.FAILED"
    assert found.detail == "tests.protocol.badly_written.KeywordOnly: status 503"
    assert (found.origin.type, found.origin.pid) == ("tests.protocol.badly_written.KeywordOnly", os.getpid())
    assert [link.type for link in found.chain] == ["tests.protocol.badly_written.KeywordOnly", "OSError"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_exception_is_written(path: Path, name: str) -> None:
    assert write(path, HOSTILE[name])
    found = read(path)
    assert found is not None
    assert found.code == "TASK.FAILED"


def test_what_an_exception_carries_is_its_name() -> None:
    inner = CodedError(CODE, "the watchdog", {"step": 7})
    outer = RuntimeError("gave up")
    outer.__cause__ = inner
    made = named(outer)
    assert (made.code, made.id, made.detail) == (CODE, inner.id, "RuntimeError: gave up")
    assert [link.code for link in made.chain] == ["", CODE]
    assert named(inner) is inner


def test_a_code_from_mere_text_gains_no_trust_in_the_file(path: Path) -> None:
    """Or a policy whose output reaches an exception's text could name its own failures."""
    write(path, RuntimeError(f"the tool said: {mint('NODE.OUT_OF_MEMORY')}"))
    found = read(path)
    assert found is not None
    assert (found.code, found.trust) == ("NODE.OUT_OF_MEMORY", Trust.CHECKSUMMED)
    ended = failure_of(70, path)
    assert ended is not None
    assert ended.trust is Trust.CHECKSUMMED


def test_a_token_of_a_later_release_is_carried_on(path: Path) -> None:
    body = "FS1.GPU.ECC.ABCDEFGH"
    raw = f"{body}.{_mac(body, b'')}"
    write(path, RuntimeError(f"it said {raw}"))
    found = read(path)
    assert found is not None
    assert (found.code, found.token, found.id) == ("UNKNOWN.FOREIGN", raw, "ABCDEFGH")


@pytest.mark.parametrize(
    ("exc", "code", "data"),
    [
        (KeyboardInterrupt(), "TASK.PROCESS_KILLED", {"signal": "SIGINT"}),
        (SystemExit("no checkpoint"), "TASK.PROCESS_EXITED", {}),
        (MemoryError(), "NODE.OUT_OF_MEMORY", {}),
        (GeneratorExit(), "TASK.FAILED", {}),
        (OSError(28, "No space left"), "TASK.FAILED", {}),
    ],
)
def test_what_ends_processes_has_a_name(exc: BaseException, code: str, data: dict[str, Any]) -> None:
    made = named(exc)
    assert (made.code, made.data) == (code, data)


def test_a_namer_comes_before_the_defaults_and_after_what_is_carried(path: Path) -> None:
    from faults.classify import name_of

    assert named(OSError(28, "No space left"), name_of).code == "NODE.DISK_FULL"
    assert named(MemoryError(), lambda exc: "CONFIG.INVALID").code == "CONFIG.INVALID"
    assert named(MemoryError(), lambda exc: None).code == "NODE.OUT_OF_MEMORY"
    assert named(CodedError(CODE), lambda exc: "CONFIG.INVALID").code == CODE
    assert write(path, OSError(28, "No space left"), name=name_of)
    assert code_of(read(path)) == "NODE.DISK_FULL"


# -- the file


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        write(path, CodedError(CODE))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_first_failure_wins(path: Path) -> None:
    first = CodedError(CODE, "the cause")
    assert write(path, first) is True
    inode = path.stat().st_ino
    assert write(path, CodedError("NODE.IO", "what came of it")) is False
    assert read(path) == first
    assert path.stat().st_ino == inode
    assert only(path)


@pytest.mark.parametrize("what", ["text", "empty", "directory", "dangling link", "fifo"])
def test_whatever_is_there_is_not_replaced(path: Path, what: str) -> None:
    match what:
        case "text":
            path.write_text("somebody's notes")
        case "empty":
            path.touch()
        case "directory":
            path.mkdir()
        case "dangling link":
            path.symlink_to(path.with_name("elsewhere"))
        case "fifo":
            os.mkfifo(path)
    assert write(path, CodedError(CODE)) is False
    assert read(path) is None
    assert only(path)


def test_the_one_that_comes_between_look_and_link_wins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look beforehand only saves work: what decides is the link."""
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    first = CodedError(CODE)
    assert write(path, first)
    assert write(path, CodedError("NODE.IO")) is False
    assert read(path) == first
    assert only(path)


def test_a_relative_path_and_a_path_of_bytes_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("error", "x" * 255, "ünïcode"):
        error = CodedError(CODE)
        assert write(name, error)
        assert read(tmp_path / name) == error


def test_threads_that_write_at_once_leave_one_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # so that all come as far as the link
    mine = [CodedError(CODE, str(n) * 5000) for n in range(16)]
    barrier = threading.Barrier(len(mine))
    won: list[CodedError] = []

    def one(error: CodedError) -> None:
        barrier.wait(20)
        if write(path, error):
            won.append(error)

    threads = [threading.Thread(target=one, args=(error,)) for error in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert won == [read(path)]
    assert only(path)


def test_processes_that_write_at_once_leave_one_file(path: Path) -> None:
    command = [*CHILDREN, "write_when_told", str(path)]
    children = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    said = ""
    for child in children:
        assert child.stdout is not None
        with child:
            said += child.stdout.read()
            assert child.wait(30) == 0
    found = read(path)
    assert found is not None
    assert said.split() == [found.id]
    assert len(found.detail) == 3000
    assert only(path)


# -- no room


def test_a_full_disk_costs_the_file_and_nothing_else(path: Path) -> None:
    done = subprocess.run(
        [*CHILDREN, "write_on_a_full_disk", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "False\n"
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert "File too large" in done.stderr
    assert os.listdir(path.parent) == []
    assert read(path) is None


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """In a mount namespace of the child's own, where that needs no privilege."""
    inside = tmp_path / "small"
    inside.mkdir()
    script = 'mount -t tmpfs -o size=64k none "$0" && "$@"; ls -A "$0"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(inside)]
    done = subprocess.run(
        [*command, *CHILDREN, "fill_the_disk_and_write", str(inside / "error")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mount namespace without privilege here")
    assert done.stdout.splitlines() == ["28", "False", "ballast"]
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("where", ["missing/error", "file/error"])
def test_no_directory_is_said_in_one_line(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert write(tmp_path / where, CodedError(CODE)) is False
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("failsoft", logging.WARNING)
    assert str(tmp_path / where) in record.getMessage()
    assert read(tmp_path / where) is None


def test_a_file_system_without_hard_links(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert write(path, CodedError(CODE)) is False
    assert "hard links" in caplog.text
    assert os.listdir(path.parent) == []


# -- the size


def huge(text: str) -> CodedError:
    return CodedError(CODE, text * 8000, {str(n): [text * 2000] * 60 for n in range(60)})


@pytest.mark.parametrize("text", ["x", "\x00", "\U0001f4a5"])
def test_a_large_failure_loses_its_data_and_keeps_its_name(path: Path, text: str) -> None:
    error = huge(text)
    error.data["code_trust"] = "checksummed"
    error.__cause__ = ValueError("the cause")
    assert write(path, error)
    assert path.stat().st_size <= MAX_FILE
    found = read(path)
    assert found is not None
    assert (found.code, found.id, found.detail, found.chain) == (CODE, error.id, error.detail, error.chain)
    assert found.trust is Trust.CHECKSUMMED  # what it was believed goes along with the name
    assert "left out" in found.data["…"]


def test_causes_that_are_too_large_are_left_out_as_well(path: Path) -> None:
    error = below = huge("\x00")
    for n in range(8):
        cause = CodedError("NODE.IO", "\x00" * 8000)
        for _ in range(8):
            cause.add_note("\x00" * 8000)
        below.__cause__ = cause
        below = cause
        assert n < 8
    assert write(path, error)
    assert path.stat().st_size <= MAX_FILE
    found = read(path)
    assert found is not None
    assert (found.code, found.id, found.detail, found.chain) == (CODE, error.id, error.detail, ())


def test_attributes_that_were_replaced_by_nonsense(path: Path) -> None:
    error = CodedError(CODE)
    error.detail = "\ud800" * 20_000_000
    error.data = {"lock": threading.Lock(), "set": {1}, "large": 2**200, 5: object()}  # type: ignore[dict-item]
    error.id = "no id"
    error.origin = Origin("h" * 10_000_000, 5, "\ud800", "\ud800")
    error._chain = (Link("t" * 10_000_000, "\ud800"),)
    assert write(path, error)
    assert path.stat().st_size <= MAX_FILE
    found = read(path)
    assert found is not None
    assert (found.code, len(found.id), found.data["set"]) == (CODE, 8, [1])
    assert code_of(path.read_bytes()) == CODE


REPLACED: list[tuple[str, object]] = [
    *(("code", "ENGINE.EXITED"), ("code", None), ("detail", None), ("detail", b"x"), ("data", None)),
    *(("data", [1]), ("id", 5), ("id", None), ("origin", None), ("_chain", 5), ("_chain", ("x",))),
]


@pytest.mark.parametrize(("name", "value"), REPLACED)
def test_an_attribute_of_another_type_does_not_cost_the_name(path: Path, name: str, value: object) -> None:
    """Neither in a file nor over HTTP."""
    error = CodedError("ENGINE.EXITED", "x")
    setattr(error, name, value)
    expected = "UNKNOWN.EXCEPTION" if (name, value) == ("code", None) else "ENGINE.EXITED"
    assert write(path, error)
    found = read(path)
    assert found is not None
    assert found.code == expected
    made = problem(error)
    assert read_reply(made.status, made.headers, made.body).code == expected


# -- reading what is not a failure


@pytest.mark.parametrize("name", ["data", "grouped", "bare"])
def test_half_a_file_is_no_failure(path: Path, name: str) -> None:
    write(path, coded_errors()[name])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) is None, length
    path.write_bytes(whole)
    assert read(path) is not None
    path.write_bytes(whole.ljust(len(whole) + 512, b"\0"))  # as some file systems leave it after a crash
    assert read(path) is None


def test_a_missing_file_is_no_failure(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(path) is None
    assert read(path / "below") is None
    assert not caplog.records


GOOD: dict[str, Any] = {
    "failsoft": 1,
    "code": str(CODE),
    "id": "ABCDEFGH",
    "token": "",
    "detail": "d",
    "data": {},
    "origin": {"host": "h", "pid": 5},
    "chain": [],
}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"5",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"failsoft":' * 20_000,
        b"Traceback (most recent call last):\n" + mint(CODE).encode(),
        json.dumps({k: v for k, v in GOOD.items() if k != "failsoft"}).encode(),
        *(
            json.dumps({k: v for k, v in GOOD.items() if k != gone}).encode()
            for gone in ("id", "origin", "data")
        ),
        json.dumps({**GOOD, "failsoft": 0}).encode(),
        json.dumps({**GOOD, "failsoft": "1"}).encode(),
        json.dumps({**GOOD, "id": "no id"}).encode(),
        json.dumps({**GOOD, "id": "abcdefgh"}).encode(),
        json.dumps({**GOOD, "code": None}).encode(),
        json.dumps({**GOOD, "data": []}).encode(),
        json.dumps({**GOOD, "detail": "\ud800"}).encode(),
        json.dumps({**GOOD, "detail": "x" * MAX_FILE}).encode(),
        json.dumps(GOOD).encode() + b" " * MAX_FILE,
        json.dumps(GOOD).encode() * 2,
        json.dumps({**GOOD, "data": {"a": 0}}).encode().replace(b"0", b"[" * 60_000 + b"]" * 60_000),
    ],
)
def test_what_is_not_ours_is_no_failure(path: Path, body: bytes) -> None:
    path.write_bytes(json.dumps(GOOD).encode())
    assert read(path) is not None
    path.write_bytes(body)
    assert read(path) is None


@given(st.binary(max_size=200))
def test_no_bytes_can_upset_the_reader(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    path = tmp_path_factory.mktemp("error") / "error"
    path.write_bytes(body)
    assert read(path) is None


def test_a_file_that_nobody_may_read_is_logged(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    write(path, CodedError(CODE))
    monkeypatch.setattr(os, "open", refuse)
    assert read(path) is None
    assert str(path) in caplog.text


# -- later releases


def test_members_that_a_later_release_adds_are_passed_over(path: Path) -> None:
    path.write_text(
        json.dumps({**GOOD, "failsoft": 2, "severity": 5, "origin": {"host": "h", "pid": 5, "gpu": 1}})
    )
    found = read(path)
    assert found is not None
    assert (found.code, found.id, found.detail, found.origin.host) == (CODE, "ABCDEFGH", "d", "h")


@pytest.mark.parametrize("version", [1, 2])
def test_a_family_of_a_later_release_is_foreign_and_carried_on(path: Path, version: int) -> None:
    body = "FS1.GPU.ECC.ABCDEFGH"
    raw = f"{body}.{_mac(body, b'')}"
    path.write_text(json.dumps({**GOOD, "failsoft": version, "code": "GPU.ECC", "token": raw}))
    found = read(path)
    assert found is not None
    assert (found.code, found.id, found.detail, found.token) == ("UNKNOWN.FOREIGN", "ABCDEFGH", "d", raw)
    assert found.data == {"foreign_code": "GPU.ECC", "carried": raw}
    again = path.with_name("again")
    assert write(again, found)
    assert read(again) == found
    assert code_of(again.read_bytes()) == "UNKNOWN.FOREIGN"


def test_a_reason_of_a_later_release_falls_to_its_family(path: Path) -> None:
    path.write_text(json.dumps({**GOOD, "code": f"NODE.{'X' * 60}"}))
    found = read(path)
    assert found is not None
    assert (found.code, found.data) == ("NODE.UNKNOWN", {"foreign_code": f"NODE.{'X' * 60}"})


def test_another_shape_of_a_later_release_is_foreign(path: Path) -> None:
    path.write_text(json.dumps({"failsoft": 3, "code": "NODE.IO", "detail": "d", "data": [1], "id": 17}))
    found = read(path)
    assert found is not None
    assert (found.code, found.detail, found.data) == ("UNKNOWN.FOREIGN", "d", {"foreign_code": "NODE.IO"})
    assert code_of(str(found)) == "UNKNOWN.FOREIGN"


@pytest.mark.parametrize("token", ["", "no token", f"{mint(CODE)} and text", "FS2." + "A" * 90, "\n" * 80])
def test_what_is_no_token_is_not_carried_as_one(path: Path, token: str) -> None:
    path.write_text(json.dumps({**GOOD, "code": "GPU.ECC", "token": token}))
    found = read(path)
    assert found is not None
    assert found.data == {"foreign_code": "GPU.ECC"}
    assert str(found).startswith("FS1.UNKNOWN.FOREIGN.")


# -- why a child failed


def test_a_child_that_succeeded_has_no_failure(path: Path) -> None:
    assert failure_of(0, path) is None
    write(path, CodedError(CODE))
    assert failure_of(0, path) is None


@pytest.mark.parametrize(
    ("returncode", "oom", "end"),
    [
        (70, False, {"exit_status": 70}),
        (-9, False, {"signal": "SIGKILL", "code": "TASK.PROCESS_KILLED"}),
        (-9, True, {"signal": "SIGKILL", "code": "NODE.OUT_OF_MEMORY"}),
        (139, False, {"exit_status": 139, "signal": "SIGSEGV", "code": "TASK.PROCESS_CRASHED"}),
    ],
)
def test_the_file_is_the_failure_and_the_end_is_kept(
    path: Path, returncode: int, oom: bool, end: dict[str, Any]
) -> None:
    error = CodedError(CODE, "the watchdog", {"step": 7, "status": 503})
    write(path, error)
    found = failure_of(returncode, path, oom=oom)
    assert found is not None
    assert (found.code, found.id, found.detail, found.trust) == (
        CODE,
        error.id,
        "the watchdog",
        Trust.STRUCTURED,
    )
    assert found.data == {"step": 7, "status": 503, "process_end": end}
    assert read(path) == error


@pytest.mark.parametrize("there", [None, "missing", "half"])
@pytest.mark.parametrize(
    ("returncode", "oom", "code", "data", "trust"),
    [
        (3, False, "TASK.PROCESS_EXITED", {"exit_status": 3}, Trust.STRUCTURED),
        (-11, False, "TASK.PROCESS_CRASHED", {"signal": "SIGSEGV"}, Trust.STRUCTURED),
        (-9, True, "NODE.OUT_OF_MEMORY", {"signal": "SIGKILL"}, Trust.STRUCTURED),
        (78, False, "CONFIG.INVALID", {"exit_status": 78, "code_trust": "heuristic"}, Trust.HEURISTIC),
    ],
)
def test_without_a_file_the_status_has_to_do(
    path: Path, there: str | None, returncode: int, oom: bool, code: str, data: dict[str, Any], trust: Trust
) -> None:
    if there == "half":
        path.write_text('{"failsoft":1,')
    found = failure_of(returncode, None if there is None else path, oom=oom)
    assert found is not None
    assert (found.code, found.data, found.trust) == (code, data, trust)
    assert found.detail


def test_the_format_is_what_the_docs_say(path: Path) -> None:
    """Other languages may write it: these members, in this order."""
    error = CodedError(CODE, "d", {"n": 1}, id="ABCDEFGH", origin=Origin("h", 5))
    write(path, error)
    assert json.loads(path.read_text()) == {**GOOD, "token": error.token, "data": {"n": 1}}
    assert list(json.loads(path.read_text())) == list(GOOD)
    assert error_file.FORMAT == 1
