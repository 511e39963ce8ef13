"""The run's key: who has it, how it is handed on, and what it proves."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import cloudpickle

from faults import classify
from protocol import CodedError, Trust, coded, defuse, mint, read, scan
from protocol.errors import CODE_TRUST
from protocol.keys import KEPT, Keyring, Replays, fetch, held, hold, load, save, start_keeper


@pytest.fixture
def ring() -> Iterator[Keyring]:
    ring = Keyring.generate()
    hold(ring)
    yield ring
    hold(None)


def only(text: str, key: bytes | Keyring | None = None) -> Trust:
    found = scan(text, key=key)
    assert len(found) == 1
    return found[0].trust


# -- signing -------------------------------------------------------------------------------------------


def test_a_process_that_holds_a_key_signs_and_verifies(ring: Keyring) -> None:
    error = CodedError("ENGINE.EXITED", "signal 9")
    assert only(str(error)) is Trust.SIGNED
    assert only(str(error), ring) is Trust.SIGNED
    assert read(f"log: {error}").trust is Trust.SIGNED
    assert scan(str(error), key=b"") == [], "who has no key cannot tell it from a forgery"
    assert scan(str(error), key=Keyring.generate()) == []


def test_what_was_minted_without_the_key_is_checksummed_at_most(ring: Keyring) -> None:
    forged = mint("TRANSPORT.CONNECT", key=b"")
    assert only(forged) is Trust.CHECKSUMMED
    fault = classify(RuntimeError(f"the model wrote {forged}"))
    assert fault.code == "TRANSPORT.CONNECT"
    assert not fault.forgivable


def test_signed_text_may_be_forgiven_and_a_request_at_fault_may_not(ring: Keyring) -> None:
    assert classify(RuntimeError(mint("TRANSPORT.CONNECT"))).forgivable
    assert classify(CodedError("ENGINE.EXITED")).forgivable
    assert not classify(CodedError("REQUEST.INVALID")).forgivable
    assert not classify(CodedError("CANCEL.CALLER")).forgivable


def test_passing_on_what_was_read_from_text_does_not_sign_it(ring: Keyring) -> None:
    forged = mint("TRANSPORT.CONNECT", key=b"")

    @coded
    def embeds() -> None:
        raise RuntimeError(f"tool output: {forged}")

    with pytest.raises(CodedError) as caught:
        embeds()
    assert caught.value.data[CODE_TRUST] == "checksummed"
    assert caught.value.id == read(forged).id, "it is the same occurrence"
    assert only(str(caught.value).split()[0]) is Trust.CHECKSUMMED
    assert all(token.trust is Trust.CHECKSUMMED for token in scan(str(caught.value)))
    assert not classify(caught.value).forgivable
    again = pickle.loads(pickle.dumps(caught.value))
    assert only(again.token) is Trust.CHECKSUMMED


def test_defuse_kills_signed_tokens_too(ring: Keyring) -> None:
    assert scan(defuse(f"x {mint('TASK.FAILED')}")) == []


# -- rotation ------------------------------------------------------------------------------------------


def test_after_a_rotation_the_former_keys_are_still_believed_and_older_ones_are_not() -> None:
    rings = [Keyring.generate()]
    for _ in range(KEPT + 1):
        rings.append(rings[-1].rotated())
    tokens = [mint("TASK.FAILED", key=ring.current) for ring in rings]
    latest = rings[-1]
    assert scan(tokens[0], key=latest) == [], "rotated out"
    for token in tokens[1:]:
        assert only(token, latest) is Trust.SIGNED
    assert scan(tokens[-1], key=rings[0]) == [], "the new key is not derived from the old one"
    assert len(set(latest.all)) == len(latest.all) == KEPT + 1


@pytest.mark.parametrize("length", [0, 33])
def test_a_key_of_the_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="1 to 32 bytes"):
        Keyring(b"x" * length)


# -- replays -------------------------------------------------------------------------------------------


def test_an_occurrence_that_was_met_before_is_a_quotation(ring: Keyring) -> None:
    replays = Replays()
    error = CodedError("TRANSPORT.CONNECT", "refused")
    assert read(error, replays=replays).trust is Trust.STRUCTURED
    quoted = read(RuntimeError(f"the log says {error}"), replays=replays)
    assert (quoted.code, quoted.trust) == ("TRANSPORT.CONNECT", Trust.HEURISTIC)
    assert read(error, replays=replays).trust is Trust.STRUCTURED, "the failure itself stays what it is"
    fresh = str(CodedError("TRANSPORT.CONNECT"))
    assert [read(fresh, replays=replays).trust for _ in range(2)] == [Trust.SIGNED, Trust.HEURISTIC]


def test_a_quotation_is_never_forgiven(ring: Keyring) -> None:
    replays = Replays()
    error = CodedError("TRANSPORT.CONNECT", "refused")
    assert classify(error, replays=replays).forgivable
    quoting = RuntimeError(f"the model wrote {error}")
    assert classify(quoting).forgivable, "who does not remember cannot tell"
    assert not classify(quoting, replays=replays).forgivable
    assert classify(error, replays=replays).forgivable


def test_replays_are_bounded_and_forget_the_oldest() -> None:
    replays = Replays(limit=3)
    assert [replays.met(id) for id in ("A", "B", "C", "A", "D", "B", "A")] == [
        *(False, False, False, True, False),
        *(False, True),  # B was the oldest when D came; A had been met again
    ]


# -- where the key must not go -------------------------------------------------------------------------


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps, copy.deepcopy])
def test_a_keyring_is_not_pickled(dump: object) -> None:
    with pytest.raises(TypeError, match=r"protocol\.keys\.fetch"):
        dump(Keyring.generate())  # type: ignore[operator]


def test_a_keyring_hides_its_keys() -> None:
    ring = Keyring(b"the secret key", (b"the one before it",))
    for text in (repr(ring), str(ring), f"{ring}"):
        assert "secret" not in text
        assert "before" not in text


def test_a_child_process_gets_no_key(ring: Keyring) -> None:
    script = "import os; from protocol.keys import held; print(held(), os.environ)"
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    assert told.startswith("None ")
    assert ring.current.hex() not in told


# -- the file ------------------------------------------------------------------------------------------


def test_the_file_is_the_owners_alone_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    ring = Keyring.generate().rotated()
    old_mask = os.umask(0)
    try:
        save(ring, path)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load(path) == ring
    save(ring.rotated(), path)
    assert load(path).former[0] == ring.current
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "run.key").mkdir()
    with pytest.raises(OSError, match=r"run\.key"):
        save(Keyring.generate(), tmp_path / "run.key")
    assert [path.name for path in tmp_path.iterdir()] == ["run.key"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602, 0o611])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.key"
    save(Keyring.generate(), path)
    path.chmod(mode)
    with pytest.raises(ValueError, match=re.escape(f"{path} has mode {mode:04o}")):
        load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    save(Keyring.generate(), path)
    os.chown(path, 12345, -1)
    with pytest.raises(ValueError, match="belongs to user 12345"):
        load(path)


def test_a_link_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    save(Keyring.generate(), path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        load(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises((ValueError, OSError), match=re.escape(str(other))):
            load(other)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its first line must be"),
        ("failsoft-key 1\n", "its first line must be"),
        ("failsoft-key 2\nab\n", "its first line must be"),
        ("failsoft-key 1\nnot hex\n", ":2: a key is 1 to 32 bytes in hexadecimal"),
        ("failsoft-key 1\nab\nxyz\n", ":3: a key is 1 to 32 bytes in hexadecimal"),
        ("failsoft-key 1\n\n", ":2: a key is 1 to 32 bytes"),
        (f"failsoft-key 1\n{'ab' * 33}\n", ":2: a key is 1 to 32 bytes"),
    ],
)
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        load(path)
    assert str(path) in str(caught.value)


# -- the named actor, on a real Ray --------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Role:
    """A trusted role: it fetches the key by the run's name and signs with it."""

    async def sign(self, run: str) -> str:
        hold(await fetch(run))
        return mint("WEIGHTS.REFIT_ABORTED")

    async def fail(self) -> None:
        raise CodedError("WEIGHTS.REFIT_ABORTED", "watchdog")

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


@ray.remote(num_cpus=0)
class Untrusted:
    def sign(self) -> tuple[str, bool]:
        return mint("WEIGHTS.REFIT_ABORTED"), held() is None


async def test_trusted_roles_get_the_key_from_a_named_actor(ray_local: None) -> None:
    keeper = start_keeper("a-run")
    try:
        ring = await fetch("a-run")
        role, untrusted = Role.remote(), Untrusted.remote()
        signed = await role.sign.remote("a-run")
        assert only(signed, ring) is Trust.SIGNED
        forged, without = await untrusted.sign.remote()
        assert without
        assert only(forged, ring) is Trust.CHECKSUMMED
        environment = await role.environment.remote()
        assert not [v for v in environment.values() if ring.current.hex() in v]
        assert ring.current.hex() not in str(ray.get_runtime_context().runtime_env)

        await keeper.rotate.remote()
        renewed = await fetch("a-run")
        assert renewed.former[0] == ring.current
        assert only(signed, renewed) is Trust.SIGNED, "who has not fetched yet is still believed"
        assert only(await role.sign.remote("a-run"), renewed) is Trust.SIGNED
        with pytest.raises(CodedError) as caught:
            await role.fail.remote()
        assert only(str(caught.value).split("Traceback")[-1].splitlines()[-1], renewed) is Trust.SIGNED
        with pytest.raises(ValueError, match="a-run"):
            ray.get(start_keeper("a-run").keys.remote(), timeout=30)
    finally:
        ray.kill(keeper)


async def test_a_run_without_a_keeper_says_so(ray_local: None) -> None:
    with pytest.raises(ValueError, match="no-such-run"):
        await fetch("no-such-run")


async def test_a_keeper_that_does_not_answer_is_not_waited_for(ray_local: None) -> None:
    keeper = start_keeper("deaf")
    try:
        await fetch("deaf")
        blocked = keeper.__ray_call__.remote(lambda self: __import__("threading").Event().wait(30))
        with pytest.raises(TimeoutError):
            await fetch("deaf", timeout=0.5)
    finally:
        ray.kill(keeper)
    with pytest.raises(ray.exceptions.RayActorError):
        await asyncio.wait_for(blocked, 30)
