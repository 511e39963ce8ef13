"""Limits of this process that the next start inherits: descriptors, processes, ephemeral ports."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

import psutil

from failsoft.doctor.finding import Examined, Finding

NAME: Final = "limits"
DESCRIPTORS: Final = 4096
"""Below this Ray warns at every start that connections may fail, and recommends `GOOD` (ray.init,
ray/_private/worker.py; ray#11239)."""
GOOD: Final = 8192
TASKS: Final = 1024
"""Threads that should still be free: a Ray worker has some 40, an engine hundreds, and where the limit is
reached pthread_create(3) fails in whoever comes next with EAGAIN."""
RAY_PORTS: Final = (10002, 19999)
"""Where Ray's workers listen by default (Ray's documentation, Configuring Ray, Ports configurations)."""
CONNECTIONS: Final = 8192
"""Ephemeral ports: each connection to one server takes one, and for a minute after its end again
(TIME_WAIT, tcp(7))."""


def check(examined: Examined) -> list[Finding]:
    """Limits that are too low for engines and a pool of a few thousand requests in flight."""
    return [*_descriptors(), *_tasks(), *_ephemeral(Path("/proc/sys/net/ipv4/ip_local_port_range"))]


def _descriptors() -> list[Finding]:
    """RLIMIT_NOFILE (getrlimit(2)). The hard limit counts: Ray, the pool
    (dispatch.posting.transports.descriptors) and engines raise their own soft one to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= GOOD:
        return []
    low = hard < DESCRIPTORS
    return [
        Finding(
            check=NAME,
            severity="error" if low else "warning",
            what=f"a process may open {hard} files (soft limit {soft}); every request in flight is one, and "
            f"Ray wants {GOOD}",
            where="ulimit -Hn",
            fix=f"`ulimit -n {GOOD}` as root before the start, LimitNOFILE={GOOD} in a systemd unit, "
            f"`--ulimit nofile={GOOD}` for docker run",
        )
    ]


def _tasks() -> list[Finding]:
    """RLIMIT_NPROC counts the threads of all processes of a user, root's and those with CAP_SYS_RESOURCE
    excepted (getrlimit(2)); pids.max those of a cgroup (kernel documentation, cgroup-v2)."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        used = _threads_of(os.getuid())
        if soft - used < TASKS:
            what = f"this user may have {soft} threads and has {used}"
            fix = "`ulimit -u unlimited` as root before the start, or nproc in /etc/security/limits.conf"
            found.append(Finding(check=NAME, severity="error", what=what, where="ulimit -u", fix=fix))
    for folder in _cgroups():
        limit, now = _read(folder / "pids.max"), _read(folder / "pids.current")
        if limit.isdigit() and now.isdigit() and int(limit) - int(now) < TASKS:
            what = f"this cgroup may have {limit} threads and has {now}"
            fix = "TasksMax= in the systemd unit, `--pids-limit` for docker run, podPidsLimit of a kubelet"
            found.append(Finding(check=NAME, severity="error", what=what, where=str(folder), fix=fix))
    return found


def _ephemeral(path: Path) -> list[Finding]:
    """The range that outgoing connections get their ports from (kernel documentation, ip-sysctl)."""
    words = _read(path).split()
    if len(words) != 2:
        return [Finding(check=NAME, severity="note", what="ephemeral ports: not checked", where=str(path))]
    low, high = int(words[0]), int(words[1])
    fix = "`sysctl -w net.ipv4.ip_local_port_range='32768 60999'`, the kernel's default, as root"
    found = []
    if high - low < CONNECTIONS:
        what = f"{high - low + 1} ephemeral ports: so many connections to one server at most"
        found.append(Finding(check=NAME, severity="warning", what=what, where=str(path), fix=fix))
    if low <= RAY_PORTS[1] and high >= RAY_PORTS[0]:
        what = (
            f"the ephemeral ports {low} to {high} overlap with those of Ray's workers, {RAY_PORTS[0]} to "
            f"{RAY_PORTS[1]}: a connection may hold the port that a worker wants"
        )
        found.append(Finding(check=NAME, severity="warning", what=what, where=str(path), fix=fix))
    return found


def _threads_of(user: int) -> int:
    count = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == user:
                count += process.num_threads()
        except psutil.Error:
            continue  # gone
    return count


def _cgroups() -> list[Path]:
    """Our cgroup (version 2) and those above it: each may have a limit."""
    root = Path("/sys/fs/cgroup")
    own = next(
        (line[3:] for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), ""
    )
    if not own or ".." in own:
        return []
    folder = root / own.lstrip("/")
    return [place for place in (folder, *folder.parents) if place.is_relative_to(root)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
