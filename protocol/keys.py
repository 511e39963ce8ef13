"""keys: the run's key, by which a token proves that a trusted role of this run minted it.

A checksum only tells a whole token from a cut one: anybody can compute it, a policy that learns to
print it included. A signed token (keyed BLAKE2s, RFC 7693) can be minted only by who has the key. So
the key goes to trusted roles alone (trainer, pool, posters, supervisors), by a named actor
(`start_keeper`, `fetch`) or by a file that only its owner may read (`save`, `load`); never through
``runtime_env``, which every task inherits and the dashboard shows, and never into the environment of
an engine, whose output is what the key defends against. That is why a `Keyring` hides its keys from
``repr`` and refuses to be pickled.

Rotation: `Keyring.rotated` signs with a new key and still believes the one before it, so that roles may
take the new one over at different times.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

KEY_BYTES: Final = 32
"""Length of a key: the most that BLAKE2s takes."""
KEPT: Final = 2
"""Former keys that are still believed."""
NAMESPACE: Final = "failsoft"
"""Ray namespace of the actor that keeps a run's key."""

_FIRST_LINE: Final = "failsoft-key 1"


@dataclass(frozen=True, slots=True)
class Keyring:
    """The key that signs (``current``) and the former ones that are still believed, newest first.
    Each is 1 to 32 bytes.

    Raises ValueError for a key of another length."""

    current: bytes = field(repr=False)
    former: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for key in self.all:
            _checked(key)

    @classmethod
    def generate(cls) -> Keyring:
        """A new key, from the operating system's random numbers."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def rotated(self) -> Keyring:
        """A new key that signs; this one, and the one before it, are still believed."""
        return Keyring(secrets.token_bytes(KEY_BYTES), self.all[:KEPT])

    @property
    def all(self) -> tuple[bytes, ...]:
        """Every key that is believed, the one that signs first."""
        return (self.current, *self.former)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Keyring is not pickled, or it would travel in task arguments and runtime_env: "
            "fetch it with protocol.keys.fetch, or load it from its file"
        )


Key = bytes | Keyring | None
"""What verifies a token: one key, a ring of them, or None for those that the process holds. ``b""``
is no key."""

_held: Keyring | None = None


def hold(ring: Keyring | None) -> None:
    """Sign and verify with ``ring`` in this process from now on; None for neither."""
    global _held
    _held = ring


def held() -> Keyring | None:
    """What this process signs and verifies with."""
    return _held


def save(ring: Keyring, path: Path) -> None:
    """Write ``ring`` to a file that only its owner may read (mode 0600). The file is replaced as a
    whole, so that a reader sees the old keys or the new ones.

    Raises OSError when that cannot be done."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600 from the start
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write("\n".join([_FIRST_LINE, *(key.hex() for key in ring.all), ""]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # whatever ends it, no key lies about in a temporary file
        os.unlink(name)
        raise


def load(path: Path) -> Keyring:
    """Read what `save` wrote.

    Raises ValueError, saying what to do, when others could have read or written the file or it is no
    key file; OSError when it cannot be opened."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_owner(path, os.fstat(fd))
        lines = os.read(fd, 4096).decode("ascii", "replace").splitlines()
    finally:
        os.close(fd)
    if len(lines) < 2 or lines[0] != _FIRST_LINE:
        raise ValueError(f"{path} is no key file: its first line must be {_FIRST_LINE!r}, then a key a line")
    keys: list[bytes] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            keys.append(_checked(bytes.fromhex(line)))
        except ValueError:
            raise ValueError(
                f"{path}:{number}: a key is 1 to {KEY_BYTES} bytes in hexadecimal digits"
            ) from None
    return Keyring(keys[0], tuple(keys[1:]))


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file: name the key file itself")
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to user {status.st_uid}: a key file must be your own")
    if status.st_mode & 0o077:
        raise ValueError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may know the key: "
            f"make a new key, and keep its file at mode 0600"
        )


def _checked(key: bytes) -> bytes:
    if not 1 <= len(key) <= KEY_BYTES:
        raise ValueError(f"a key is 1 to {KEY_BYTES} bytes, not {len(key)}")
    return key


class KeyKeeper:
    """The Ray actor that makes a run's key and hands it to who asks by the run's name. The key is made
    inside of it, so it never stands in the arguments of a task, which Ray's control store keeps."""

    def __init__(self) -> None:
        self._ring = Keyring.generate()

    def keys(self) -> tuple[bytes, ...]:
        """All keys, the one that signs first."""
        return self._ring.all

    def rotate(self) -> None:
        """Sign with a new key from now on (who holds the old one should fetch again)."""
        self._ring = self._ring.rotated()


def start_keeper(run: str) -> Any:
    """Start the actor that keeps the key of ``run`` and return its handle, which must be kept: the
    actor lives as long as its owner, no longer.

    Raises ValueError when that run has one already (Ray's own error for a name that is taken)."""
    import ray

    actor = ray.remote(KeyKeeper).options(name=_name(run), namespace=NAMESPACE, num_cpus=0)
    return actor.remote()


async def fetch(run: str, *, timeout: float = 30.0) -> Keyring:
    """The keys of ``run``, from its keeper, within ``timeout`` seconds.

    Raises ValueError when there is no such keeper (Ray's own error), TimeoutError when it does not
    answer, Ray's exceptions when it is dead."""
    import ray

    keeper: Any = ray.get_actor(_name(run), namespace=NAMESPACE)
    async with asyncio.timeout(timeout):
        current, *former = await keeper.keys.remote()
    return Keyring(current, tuple(former))


def _name(run: str) -> str:
    return f"failsoft-key:{run}"


class Replays:
    """The occurrences that this process has met, by which a quotation is told from a failure.

    A signed token is genuine, and can still be copied: a log that a model was shown, or an error text
    that came back in its answer, holds one. An occurrence that was met before is a quotation when it
    turns up in text again. Holds the latest ``limit`` ids."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def met(self, id: str) -> bool:
        """Whether ``id`` was met before; from now on it was."""
        known = id in self._ids
        self._ids[id] = None
        self._ids.move_to_end(id)
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)
        return known
