"""CodedError: equal after every round trip, bounded, and without secrets."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest
from ray import cloudpickle

from faults import Action, classify, decide
from protocol import CodedError, Trust, code_of, coded, mint, read, scan
from protocol.errors import MAX_CHAIN, MAX_NOTES, Link, Origin
from protocol.safe import MAX_DETAIL, MAX_TEXT
from protocol.token import _mac
from protocol.walking import walk
from tests.protocol.badly_written import (
    HOSTILE,
    KeywordOnly,
    RequiredArguments,
    cause_cycle,
    causes_itself,
    coded_errors,
    long_chain,
)

Again = Callable[[CodedError], CodedError]
ROUND_TRIPS: dict[str, Again] = {
    **{
        f"pickle {n}": (lambda e, n=n: pickle.loads(pickle.dumps(e, n)))  # type: ignore[misc]
        for n in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda e: pickle.loads(cloudpickle.dumps(e)),
}


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@pytest.mark.parametrize("error", coded_errors().values(), ids=coded_errors())
def test_equal_after_a_round_trip(error: CodedError, again: Again) -> None:
    back = error
    for _ in range(3):
        back = again(back)
    assert type(back) is type(error)
    assert back == error
    assert hash(back) == hash(error)
    assert (str(back), repr(back), back.args) == (str(error), repr(error), error.args)
    assert back.chain == error.chain
    assert back.origin == error.origin
    before, after = dict(vars(error)), dict(vars(back))
    before.pop("_chain"), after.pop("_chain")
    assert after == before
    assert getattr(back, "__notes__", None) == getattr(error, "__notes__", None)


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_data_that_cannot_be_pickled_does_not_cost_the_name(again: Again) -> None:
    """What is given is made JSON-safe; what is put there later may be anything."""
    error = CodedError("ACTOR.DIED", "d", {"node": "n1"})
    error.data["lock"] = threading.Lock()
    error.data["set"] = {1}
    back = again(error)
    assert (back.code, back.id, back.data["node"]) == (error.code, error.id, "n1")
    assert "lock" in str(back.data["lock"])


def test_the_message_does_not_double() -> None:
    error = RequiredArguments("sglang", 30000)
    text = str(error)
    for _ in range(5):
        error = pickle.loads(pickle.dumps(error))
    assert str(error) == text
    assert text.count("sglang:30000") == 1
    assert text.count("FS1.") == 1


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_local_class_stays_itself(again: Again) -> None:
    """Also where a plain pickle is all there is, as with multiprocessing."""

    class Local(CodedError):
        def __init__(self, *, a: int) -> None:
            super().__init__("ENGINE.PORT_TAKEN", f"a={a}")
            self.a = a

    error = Local(a=3)
    back = again(again(error))
    assert type(back) is Local
    assert back == error
    assert back.a == 3


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_a_copy_needs_no_pickle(again: Again) -> None:
    """Of a class that no pickle can send; and what several attributes share, they share in it."""
    lock = threading.Lock()

    class Local(CodedError):
        def held(self) -> bool:
            return lock.locked()

    error = Local("NODE.IO")
    vars(error).update(tried=(tried := ["a"]), last=tried)
    back = again(error)
    assert type(back) is Local
    assert back == error
    assert vars(back)["tried"] is vars(back)["last"]
    assert (vars(back)["tried"] is tried) == (again is copy.copy)


_LOCAL = """
import pickle, sys
from tests.protocol.badly_written import RequiredArguments

def make():
    class Local(RequiredArguments):
        pass
    return Local("sglang", 30000)

error = make()
sys.stdout.buffer.write(pickle.dumps([error.id, error]))
assert "cloudpickle" not in str(list(sys.modules))
"""


def test_a_local_class_arrives_as_its_nearest_base_without_cloudpickle() -> None:
    written = subprocess.run(
        [sys.executable, "-c", _LOCAL], capture_output=True, check=True, timeout=60
    ).stdout
    id, error = pickle.loads(written)
    assert type(error) is RequiredArguments
    assert (error.code, error.id, vars(error)["engine"]) == ("ENGINE.PORT_TAKEN", id, "sglang")


def test_a_local_class_that_cannot_be_sent_arrives_as_its_nearest_base() -> None:
    lock = threading.Lock()

    class Local(RequiredArguments):
        def held(self) -> bool:
            return lock.locked()

    error = Local("sglang", 30000)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is RequiredArguments
    assert back == error


def test_a_round_trip_through_another_process() -> None:
    error = RequiredArguments("sglang", 30000)
    error.__cause__ = KeyError("why")
    script = (
        "import pickle, sys; e = pickle.load(sys.stdin.buffer); e.seen = True; "
        "sys.stdout.buffer.write(pickle.dumps(e))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(error), capture_output=True, check=True, timeout=50
    )
    back = pickle.loads(done.stdout)
    assert back == error
    assert back.seen
    assert back.origin.pid == os.getpid()
    assert back.chain == (Link("KeyError", "'why'"),)


def test_str_begins_with_a_token_that_reads_back() -> None:
    error = CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog")
    assert str(error) == f"{error.token} the watchdog"
    assert str(CodedError("TASK.FAILED")).count(" ") == 0
    found = scan(str(error))[0]
    assert (found.code, found.id) == (error.code, error.id)


def test_ids_are_kept_or_fresh() -> None:
    assert CodedError("TASK.FAILED", id="ABCDEFGH").id == "ABCDEFGH"
    assert CodedError("TASK.FAILED").id != CodedError("TASK.FAILED").id
    assert CodedError("TASK.FAILED") != CodedError("TASK.FAILED")
    assert CodedError("TASK.FAILED") != ValueError("x")


def test_a_malformed_code_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a code"):
        CodedError("nonsense")


def test_from_exception_keeps_type_text_and_causes() -> None:
    try:
        try:
            raise KeyError("below")
        except KeyError as below:
            raise KeywordOnly(status=503) from below
    except KeywordOnly as exc:
        made = CodedError.from_exception(exc, "UPSTREAM.SERVER_ERROR", data={"n": 1})
    name = f"{KeywordOnly.__module__}.KeywordOnly"
    assert made.detail == f"{name}: status 503"
    assert (made.origin.type, made.origin.text, made.origin.pid) == (name, "status 503", os.getpid())
    assert made.chain == (Link(name, "status 503"), Link("KeyError", "'below'"))
    assert made.data == {"n": 1}


def test_from_exception_makes_subclasses_too() -> None:
    class Mine(CodedError):
        pass

    assert type(Mine.from_exception(ValueError("x"), "TASK.FAILED", "said so")) is Mine


@pytest.mark.parametrize("cause", [causes_itself, cause_cycle])
def test_a_cycle_of_causes_ends(cause: Callable[[], Exception]) -> None:
    error = CodedError("TASK.FAILED")
    error.__cause__ = cause()
    assert 1 <= len(error.chain) <= 2
    assert pickle.loads(pickle.dumps(error)) == error


def test_ten_thousand_causes_are_capped() -> None:
    error = CodedError("TASK.FAILED")
    error.__cause__ = long_chain(10_000)
    assert [link.text for link in error.chain] == [f"level {n}" for n in range(9999, 9999 - MAX_CHAIN, -1)]
    assert pickle.loads(pickle.dumps(error)).chain == error.chain
    assert len(list(walk(error))) == 256


def test_the_chain_holds_codes_and_contexts() -> None:
    error = CodedError("TASK.FAILED")
    try:
        try:
            raise CodedError("NODE.IO", "disk")
        except CodedError:
            raise error  # noqa: B904 - the context is what this is about
    except CodedError:
        pass
    assert [(link.code, link.text) for link in error.chain] == [("NODE.IO", "disk")]
    assert code_of(error) == "TASK.FAILED"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_exception_can_be_named(name: str) -> None:
    exc = HOSTILE[name]
    made = CodedError.from_exception(exc, "TASK.FAILED")
    assert type(exc).__qualname__ in made.detail
    assert len(made.detail) <= MAX_DETAIL
    assert len(made.chain) <= MAX_CHAIN
    assert pickle.loads(pickle.dumps(made)) == made
    json.dumps([made.detail, made.data, made.origin.text]).encode()


def test_twenty_megabytes_are_capped_everywhere() -> None:
    big = "x" * 20_000_000
    made = CodedError.from_exception(ValueError(big), "TASK.FAILED", data={"big": big, "list": [big] * 1000})
    assert len(made.detail) <= MAX_DETAIL
    assert len(made.origin.text) <= MAX_TEXT
    assert len(pickle.dumps(made)) < 200_000
    assert "19997" in made.origin.text or "characters cut" in made.origin.text


def test_equality_asks_for_the_same_content() -> None:
    base = CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1))
    assert base == CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1))
    for other in (
        CodedError("TASK.WORKER_CRASHED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "e", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "d", {"a": 2}, id="ABCDEFGH", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGJ", origin=Origin("h", 1)),
        CodedError("TASK.FAILED", "d", {"a": 1}, id="ABCDEFGH", origin=Origin("h", 2)),
    ):
        assert base != other


def test_foreign_text_in_the_detail_does_not_speak_for_the_error() -> None:
    error = CodedError("TASK.FAILED", f"the model wrote {mint('BACKPRESSURE.OVERLOADED')}")
    assert code_of(str(error)) == "TASK.FAILED"
    assert read(error).trust is Trust.STRUCTURED


# -- what a subclass brings along ----------------------------------------------------------------------


class WithALock(CodedError):
    """A subclass with an attribute that cannot be pickled, one that can, and arguments of its own."""

    def __init__(self, step: int, *, why: str) -> None:
        super().__init__("WEIGHTS.REFIT_ABORTED", f"step {step}: {why}")
        self.step = step
        self.lock = threading.Lock()


@pytest.mark.parametrize("again", [a for name, a in ROUND_TRIPS.items()], ids=ROUND_TRIPS)
def test_an_attribute_that_cannot_be_pickled_costs_no_name(again: Again) -> None:
    error = WithALock(7, why="watchdog")
    got = again(error)
    assert got == error
    assert type(got) is WithALock
    assert got.step == 7
    assert "lock" in str(got.lock)


class Holder:
    """What a user's error refers to, and what refers to the error in turn."""

    error: CodedError


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_an_attribute_that_leads_back_to_the_error_ends(again: Again) -> None:
    """It did not within hours: each level of the recursion pickled the one below it twice."""
    error, other, holder = CodedError("TASK.FAILED", "x"), CodedError("TASK.FAILED", "y"), Holder()
    holder.error = error
    vars(error).update(me=error, holder=holder, other=other)
    vars(other).update(me=other, other=error)
    got = again(error)
    assert got == error
    assert vars(got)["me"] == error
    assert vars(got)["holder"].error == error
    assert vars(got)["other"] == other


def test_errors_that_hold_errors_cost_no_more_for_each() -> None:
    error = CodedError("TASK.FAILED", "0")
    for n in range(1, 60):
        holding = CodedError("TASK.FAILED", str(n))
        vars(holding)["inner"] = error
        error = holding
    assert vars(pickle.loads(pickle.dumps(error)))["inner"].detail == "58"


class WithItsOwnNew(CodedError):
    """One that cannot be made without its arguments."""

    def __new__(cls, step: int, *, why: str) -> Self:
        return super().__new__(cls, step, why)

    def __init__(self, step: int, *, why: str) -> None:
        super().__init__("WEIGHTS.REFIT_ABORTED", f"step {step}: {why}")
        self.step = step


class OfALayout(CodedError, TimeoutError):
    """An OSError, which only OSError can make."""

    def __new__(cls, step: int) -> Self:
        return super().__new__(cls, step)

    def __init__(self, step: int) -> None:
        super().__init__("TIMEOUT.DEADLINE", f"step {step}")
        self.step = step


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@pytest.mark.parametrize("error", [WithItsOwnNew(7, why="watchdog"), OfALayout(7)], ids=["own", "layout"])
def test_a_new_that_wants_arguments_costs_no_name(error: WithItsOwnNew | OfALayout, again: Again) -> None:
    got = again(error)
    assert got == error
    assert type(got) is type(error)
    assert got.step == 7


class Several(CodedError, ExceptionGroup[Exception]):
    """A group, of which there is none without its exceptions."""

    def __new__(cls, text: str, several: list[Exception]) -> Self:
        return super().__new__(cls, text, several)

    def __init__(self, text: str, several: list[Exception]) -> None:
        CodedError.__init__(self, "ENGINE.EXITED", text)


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_group_of_ones_own_arrives_as_its_nearest_base(again: Again) -> None:
    error = Several("two of them", [KeyError("a"), OSError("b")])
    got = again(error)
    assert got == error
    assert [link.type for link in got.chain] == ["KeyError", "OSError"]


class Forgetful(CodedError):
    """One whose ``__init__`` never calls ours."""

    def __init__(self, step: int) -> None:
        self.step = step


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_one_that_was_never_initialised_is_printed_and_sent(again: Again) -> None:
    error = Forgetful(7)
    got = again(error)
    assert got == error
    assert vars(got)["step"] == 7
    assert scan(str(got))[0].code == scan(repr(got))[0].code == code_of(got) == "UNKNOWN.EXCEPTION"
    with pytest.raises(TypeError):
        error.data["shared"] = "by all of them"


@pytest.mark.parametrize(
    ("name", "value"), [("code", "ENGINE.EXITED"), ("detail", None), ("data", None), ("id", 5)]
)
def test_an_attribute_that_was_replaced_leaves_a_text_that_names_it(name: str, value: object) -> None:
    error = CodedError("ENGINE.EXITED", "x")
    setattr(error, name, value)
    assert scan(str(error))[0].code == scan(repr(error))[0].code == "ENGINE.EXITED"
    assert error.trust is Trust.STRUCTURED


def test_notes_of_the_error_are_capped_and_hold_no_secrets() -> None:
    error = CodedError("TASK.FAILED", "x")
    error.add_note("Authorization: Bearer s3cr3ts3cr3t")
    for _ in range(100):
        error.add_note("x" * 20_000_000)
    assert len(error.__notes__) == MAX_NOTES
    for text in (str(pickle.dumps(error)), "".join(traceback.format_exception(error))):
        assert len(text) < 2 * MAX_NOTES * MAX_TEXT
        assert "s3cr3t" not in text
    with pytest.raises(TypeError):
        CodedError("TASK.FAILED").add_note(5)  # type: ignore[arg-type]


def _noted(text: str) -> Exception:
    noted = ValueError("short")
    noted.add_note(text)
    return noted


def _tenth(text: str) -> Exception:
    outermost = long_chain(9)
    walk(outermost)[-1].__cause__ = ValueError(text)
    return outermost


@pytest.mark.parametrize(
    "cause",
    [ValueError, _noted, _tenth, lambda text: long_chain(10_000)],
    ids=["its text", "its note", "the tenth", "ten thousand"],
)
def test_causes_that_ray_could_not_carry_are_kept_as_data(cause: Callable[[str], Exception]) -> None:
    """Whether the error was made from them or raised from them: Ray prints the whole chain."""

    @coded
    def raises() -> None:
        raise CodedError("ENGINE.EXITED", "x") from cause("x" * 20_000_000)

    made = CodedError.from_exception(cause("x" * 20_000_000), "TASK.FAILED")
    with pytest.raises(CodedError) as caught:
        raises()
    for error in (made, caught.value):
        assert len("".join(traceback.format_exception(error))) < 64 * 1024
        assert len(error.chain) >= 1


def test_a_short_cause_stays_live() -> None:
    @coded
    def raises() -> None:
        raise CodedError("ENGINE.EXITED", "x") from _noted("short")

    with pytest.raises(CodedError) as caught:
        raises()
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(CodedError.from_exception(_noted("short"), "TASK.FAILED").__cause__, ValueError)


def test_notes_travel_with_the_error_and_as_data_of_its_causes() -> None:
    cause = ValueError("inner")
    cause.add_note("rank 3")
    cause.add_note("x" * 100_000)
    for n in range(100):
        cause.add_note(str(n))
    error = CodedError.from_exception(cause, "TASK.FAILED")
    error.add_note("seen on node 2")
    got = pickle.loads(pickle.dumps(error))
    assert got == error
    assert got.__notes__ == ["seen on node 2"]
    (link,) = got.chain
    assert link.notes[0] == "rank 3"
    assert len(link.notes) == MAX_NOTES
    assert all(len(note) <= MAX_TEXT for note in link.notes)


@pytest.mark.parametrize("notes", [None, "text", 5, ("a",), {"a": 1}])
def test_notes_that_are_no_list_are_no_notes(notes: object) -> None:
    cause = ValueError("inner")
    cause.__notes__ = notes  # type: ignore[assignment]
    assert CodedError.from_exception(cause, "TASK.FAILED").chain[0].notes == ()


def test_the_leaves_of_a_group_are_kept_as_data() -> None:
    leaf = CodedError("ENGINE.EXITED", "signal 9")
    group = ExceptionGroup("two", [leaf, ExceptionGroup("inner", [KeyError("k")])])
    error = CodedError.from_exception(group, "TASK.FAILED")
    chain = pickle.loads(pickle.dumps(error)).chain
    assert [link.type for link in chain] == [
        "ExceptionGroup",
        "protocol.errors.CodedError",
        "ExceptionGroup",
        "KeyError",
    ]
    assert chain[1].code == "ENGINE.EXITED"


# -- a reader that does not have the writer's module ---------------------------------------------------

_ONLY_THERE = """
import enum, pickle, sys
from protocol import CodedError

class Phase(enum.Enum):
    REFIT = 1

class Middle(CodedError):
    pass

class Mine(Middle):
    def __init__(self, rank):
        super().__init__("WEIGHTS.REFIT_ABORTED", f"rank {rank}", {"rank": rank})
        self.rank = rank
        self.phase = Phase.REFIT
"""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_subclass_that_the_reader_cannot_import_arrives_as_its_nearest_base(
    tmp_path: Path, protocol: int
) -> None:
    (tmp_path / "only_there.py").write_text(_ONLY_THERE)
    script = (
        "import sys, pickle, only_there\n"
        "error = only_there.Mine(3)\n"
        f"sys.stdout.buffer.write(pickle.dumps([error.id, error], {protocol}))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    written = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=True, timeout=60
    ).stdout
    id, error = pickle.loads(written)
    assert type(error) is CodedError
    assert (error.code, error.id, error.data) == ("WEIGHTS.REFIT_ABORTED", id, {"rank": 3})
    assert vars(error)["rank"] == 3
    assert "phase" not in vars(error)  # its class cannot be imported either
    again = pickle.loads(pickle.dumps(error))
    assert again == error


def test_a_token_of_a_later_release_is_carried_on_byte_for_byte() -> None:
    body = "FS2.GPU.ECC.ABCDEFGH"
    raw = f"{body}.{_mac(body, b'')}"

    @coded
    def relay() -> None:
        raise RuntimeError(f"from the future: {raw}")

    with pytest.raises(CodedError) as caught:
        relay()
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.code == "UNKNOWN.FOREIGN"
    assert error.id == "ABCDEFGH"
    assert str(error).startswith(raw)
    assert (read(error).raw, read(str(error)).raw) == (raw, raw)
    assert decide(classify(error)).action is Action.GIVE_UP


@pytest.mark.parametrize("data", [{"carried": "five boxes"}, {"carried": mint("NODE.IO")}, {"nested": True}])
def test_facts_of_a_user_do_not_change_the_name(data: dict[str, object]) -> None:
    error = CodedError("ACTOR.DIED", "d", data)
    assert code_of(str(error)) == "ACTOR.DIED"
    assert str(error).startswith("FS1.ACTOR.DIED.")
    assert classify(error).blame == "callee"
