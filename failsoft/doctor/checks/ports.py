"""Ports: those that orphans still hold, and those that a file's commands name and others have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import psutil

from dispatch.engines.spec import EngineSpec
from dispatch.engines.traces import leftovers
from failsoft.doctor.finding import Examined, Finding, Severity

NAME: Final = "ports"
_FLAG: Final = re.compile(r"-+[\w-]*(port|addr|address|endpoint)\Z", re.IGNORECASE)
_NAMED: Final = re.compile(r"[A-Z_]*(PORT|ADDR|ADDRESS)\Z", re.IGNORECASE)
_PORT: Final = re.compile(r"(?:.*:)?(\d{2,5})\Z")


def check(examined: Examined) -> list[Finding]:
    """Listening sockets (proc(5), net/tcp) that will be in the way."""
    listeners = _listeners()
    found = []
    left = {one.pid for one in leftovers.orphans().processes}
    for port, pid in sorted(listeners.items()):
        if pid in left:
            what = f"port {port} is held by a process of an engine whose guard is gone"
            fix = "`failsoft doctor --fix` ends it"
            found.append(Finding(check=NAME, severity="warning", what=what, where=f"pid {pid}", fix=fix))
    if examined.file is None:
        return found
    for spec, count, name in _kinds(examined.file.specs, examined.file.names):
        for port, where in _fixed(spec):
            if port in listeners:
                what = f"port {port}, which {where} of engine {name} names, is taken"
                pid = listeners[port]
                fix = f"`ss -ltnp | grep :{port}` tells who has it; end that, or name another port"
                severe: Severity = "error"
                if _is_engine(pid) and pid not in left:
                    severe, fix = "note", "an engine has it: the fleet of this file, if it runs"
                found.append(Finding(check=NAME, severity=severe, what=what, where=_who(pid), fix=fix))
            if count > 1 and _binds(where):
                what = (
                    f"{count} engines alike ({name}) have port {port} in {where}: all but one cannot bind it"
                )
                fix = "write {port}, or give each a table and a port of its own"
                found.append(Finding(check=NAME, severity="warning", what=what, where=where, fix=fix))
    return found


def _listeners() -> dict[int, int | None]:
    """Listening TCP ports and whose they are, None where that is another user's secret."""
    found: dict[int, int | None] = {}
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr:
            found[one.laddr.port] = one.pid
    return found


def _kinds(specs: tuple[EngineSpec, ...], names: tuple[str, ...]) -> Iterator[tuple[EngineSpec, int, str]]:
    """Each spec of the file once, with how many are alike."""
    alike: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        alike.setdefault(name.partition("/")[0], []).append(number)
    for name, numbers in alike.items():
        yield specs[numbers[0]], len(numbers), name


def _fixed(spec: EngineSpec) -> Iterator[tuple[int, str]]:
    """The ports that are written out in a command or its environment, and where: ``--dist-init-addr
    127.0.0.1:29500``, ``--nccl-port=5000``, ``MASTER_PORT``. Addresses of other machines are left out."""
    before = ""
    for text in spec.command:
        flag, equals, value = text.partition("=")
        if not equals:
            flag, value = before, text
        before = text
        if _FLAG.match(flag) and (port := _port(value, spec.host)):
            yield port, flag
    for name, value in spec.env.items():
        if _NAMED.match(name) and (port := _port(value, spec.host)):
            yield port, name


def _port(value: str, host: str) -> int | None:
    found = _PORT.match(value)
    if found is None or not 0 < int(found[1]) < 65536:
        return None
    there = value.rpartition(":")[0].rpartition("/")[2]
    return int(found[1]) if there in ("", host, "localhost", "127.0.0.1", "0.0.0.0", "[::]") else None  # noqa: S104 - read, not bound


def _binds(where: str) -> bool:
    """Whether engines listen there, rather than meet: rendezvous addresses are the same for all."""
    return where.lower().endswith("port") and "master" not in where.lower()


def _is_engine(pid: int | None) -> bool:
    try:
        return pid is not None and leftovers.MARKER in psutil.Process(pid).environ()
    except psutil.Error:
        return False


def _who(pid: int | None) -> str:
    if pid is None:
        return "another user's process"
    try:
        return f"pid {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"pid {pid}"
