"""Ports: those of one engine reserved together, whether one was taken all the same, and whose it is.

Between choosing a port and binding it another process can take it (verl#3977, verl#6448: two
engines started at once with the same seed). Among ours it cannot, whoever starts them and as which
user: a port is reserved by a name, that of an abstract Unix socket (unix(7)), of which there is one
in a network namespace, as of the port itself. The guard inherits the socket, so that a reservation
lives as long as what it is for; the kernel drops it with the last descriptor, however that goes, and
no file is left to be cleaned, locked or forged.

Other programs know nothing of these names. So the ports come from where the kernel takes none for
outgoing connections, a start whose port was taken is tried again with fresh ones, and a port counts
as the engine's only when one of the engine's own processes listens on it, for an answer from another
program's server looks like success.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from protocol import CodedError

MAIN: Final = "port"
"""The name of the port that the engine serves on."""
TRIES: Final = 5
"""How often one start tries fresh ports."""
STATUS_TAKEN: Final = 98
"""Exit status of an engine whose port was taken: EADDRINUSE on Linux."""
LOWEST: Final = 20000
"""Below are the ports of known services, and those that Ray gives to its workers (10002 to 19999)."""
_SYSCTL: Final = Path("/proc/sys/net/ipv4")
"""Of IPv6 as well (kernel documentation, ip-sysctl)."""
_TAKEN: Final = re.compile(
    r"address (is )?already in use"  # strerror(3): vLLM, uvicorn, ZeroMQ, torch, Go's and Rust's servers
    r"|\b(os error|errno:?) 98\b|\bEADDRINUSE\b"  # where strerror speaks another language
    r"|couldn't bind http server socket"  # llama.cpp
    r"|port at \d+ is not available",  # SGLang looks first, and names its port (gpustack#5842)
    re.IGNORECASE,
)


class Reserved:
    """Ports that no other engine of this machine is given, as long as one of ``descriptors`` is open
    in some process. ``numbers`` are the ports by name, the one to serve on under ``port``."""

    def __init__(self, numbers: Mapping[str, int], names: Iterable[socket.socket] = ()) -> None:
        self.numbers: Final = dict(numbers)
        self._names = tuple(names)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For the guard to inherit; none any more after `release`."""
        return tuple(name.fileno() for name in self._names)

    def release(self) -> None:
        """Close this process's descriptors. Idempotent; those that a guard has inherited hold on."""
        names, self._names = self._names, ()
        for name in names:
            name.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def reserve(names: Collection[str], host: str = "127.0.0.1", avoid: Collection[int] = ()) -> Reserved:
    """Ports of ``host`` for ``port`` and each of ``names``, which no socket uses at this moment, not
    even one in TIME_WAIT, on any address. Those in ``avoid`` only when there is no other: clients may
    still have connections to an engine that was killed. Chosen by the kernel's random numbers, not by
    a generator that a run has seeded.

    Takes about a millisecond, and longer only for a ``host`` that has to be asked of a name server.
    Raises CodedError CONFIG.INVALID when ``host`` is no address of this machine and ENGINE.PORT_TAKEN
    when there are not as many ports left."""
    _check(host)
    candidates = _candidates()
    held: dict[str, tuple[int, socket.socket]] = {}
    try:
        for name in (MAIN, *names):
            held[name] = _take(candidates, avoid)
    except BaseException:  # nothing stays reserved for a start that does not take place
        Reserved({}, (lock for _, lock in held.values())).release()
        raise
    return Reserved({name: port for name, (port, _) in held.items()}, (lock for _, lock in held.values()))


def _check(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except (OSError, TypeError, ValueError) as exc:  # no OSError: a name that cannot be looked up
        why = getattr(exc, "strerror", None) or str(exc)
        raise CodedError(
            "CONFIG.INVALID",
            f"engine spec: host must be an address of this machine, not {host!r:.200}: {why}",
            {"field": "host"},
        ) from exc


def _candidates() -> list[int]:
    """The ports from `LOWEST` on without the kernel's ephemeral range and what the administrator has
    set aside (ip-sysctl: ip_local_port_range, ip_local_reserved_ports); where that range leaves none,
    those in it."""
    low, high = map(int, _setting("ip_local_port_range", "32768 60999").split())
    ports = [*range(LOWEST, min(low, 65536)), *range(max(LOWEST, high + 1), 65536)] or range(LOWEST, 65536)
    aside: set[int] = set()
    for part in _setting("ip_local_reserved_ports", "").split(","):
        if part:
            first, _, last = part.partition("-")
            aside.update(range(int(first), int(last or first) + 1))
    return [port for port in ports if port not in aside]


def _setting(name: str, default: str) -> str:
    try:
        return (_SYSCTL / name).read_text().strip()
    except OSError:  # a sandbox's kernel does not have it, and has no more than the default
        return default


def _take(candidates: list[int], avoid: Collection[int]) -> tuple[int, socket.socket]:
    for port in _in_random_order(candidates, avoid):
        name = _lock(port)
        if name is not None:
            if _is_unused(port):
                return port, name
            name.close()
    raise CodedError(
        "ENGINE.PORT_TAKEN",
        f"no port is free in {_spans(candidates)}: each is in use or reserved for another engine",
        {"ports": len(candidates)},
    )


def _in_random_order(candidates: list[int], avoid: Collection[int]) -> Iterator[int]:
    """All of them, from a random one on, those to avoid last."""
    first = secrets.randbelow(len(candidates)) if candidates else 0
    late = []
    for place in range(len(candidates)):
        port = candidates[(first + place) % len(candidates)]
        if port in avoid:
            late.append(port)
        else:
            yield port
    yield from late


def _lock(port: int) -> socket.socket | None:
    """The socket whose name reserves ``port``, or None when another process has it."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0failsoft-port-{port}")
    except OSError as exc:
        name.close()
        if exc.errno == errno.EADDRINUSE:
            return None
        raise
    return name


def _is_unused(port: int) -> bool:
    """Whether ``port`` can be bound on every address at once. Without SO_REUSEADDR, so that a socket in
    TIME_WAIT and one on another interface count as well: what can be bound like this can be bound by
    every engine, whichever options and address it uses."""
    family, everywhere = (
        (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")  # noqa: S104 - bound for a moment and never listened on
    )
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((everywhere, port))
        except OSError as exc:
            if exc.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _spans(ports: list[int]) -> str:
    """In words: ``20000 to 32767, 61000 to 65535``."""
    if not ports:
        return f"{LOWEST} to 65535"
    ends = [place for place, port in enumerate(ports[:-1]) if ports[place + 1] != port + 1]
    starts = [0, *(place + 1 for place in ends)]
    spans = zip(starts, [*ends, len(ports) - 1], strict=True)
    return ", ".join(f"{ports[start]} to {ports[end]}" for start, end in spans)


def says_taken(status: int | None, last_lines: Iterable[str]) -> bool:
    """Whether an engine that exited did so because a port of its was taken: by its exit status, or by
    what it printed (most engines print the errno's text and exit with 1)."""
    return status == STATUS_TAKEN or any(_TAKEN.search(line) for line in last_lines)


def listening(root_pid: int) -> set[int]:
    """The TCP ports on which the processes below ``root_pid`` listen, as far as they can be looked into
    (proc(5): net/tcp and fd). Blocks for some milliseconds: call it in a thread."""
    return _look(root_pid)[0]


def listens(root_pid: int, port: int) -> bool:
    """Whether a process below ``root_pid`` listens on ``port``.

    True as well when one of them cannot be looked into (another user's): what cannot be known must
    not keep an engine from serving. Blocks for some milliseconds: call it in a thread."""
    found, complete = _look(root_pid)
    return port in found or not complete


def elsewhere(root_pid: int, port: int) -> str:
    """What to add to the failure of an engine that never bound its ``port``: ``; it listens on 8001, not
    on 8000``, or nothing. Blocks for some milliseconds: call it in a thread."""
    found = sorted(listening(root_pid) - {port})
    return f"; it listens on {', '.join(map(str, found[:8]))}, not on {port}" if found else ""


def _look(root_pid: int) -> tuple[set[int], bool]:
    """The ports, and whether every process could be looked into."""
    found: set[int] = set()
    complete = True
    try:
        processes = psutil.Process(root_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return found, complete
    for process in processes:
        try:
            sockets = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            complete = False
            continue
        found.update(one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN)
    return found, complete
