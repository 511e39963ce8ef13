"""Room where engines and Ray write: shared memory, temporary files, Ray's sessions, logs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from dispatch.files import temporary_folder
from failsoft.doctor.finding import Examined, Finding, Severity

NAME: Final = "space"
SHM: Final = Path("/dev/shm")  # noqa: S108 - the system's own name for it
SHM_LEAST: Final = 1 << 30
"""What NCCL's guide gives a container (`docker run --shm-size=1g`, Troubleshooting, Docker); Docker's own
default is 64 MiB."""
STORE: Final = 0.3
"""The share of memory that Ray's object store takes, at most `STORE_MOST`; where /dev/shm has less Ray
puts it into its session directory or refuses to start (ray/_private/services.py,
determine_plasma_store_config; ray_constants.py)."""
STORE_MOST: Final = 200_000_000_000
LIMITS: Final = (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory.max"))
"""Where a container's memory limit is (cgroup v1, v2), as Ray looks for it (ray/_common/utils.py,
get_system_memory): in a small container on a large machine the machine's memory is nobody's."""
FULL: Final = 0.95
"""From here on Ray refuses to spill and to create objects (its setting local_fs_capacity_threshold)."""
NEARLY: Final = 0.9


def check(examined: Examined) -> list[Finding]:
    """What is too small or too full."""
    folders = {Path(temporary_folder()), Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray")}  # noqa: S108 - Ray's own default
    if examined.file is not None:
        folders |= {Path(spec.log_dir) for spec in examined.file.specs if spec.log_dir is not None}
    found = _shm(SHM)
    told: set[int] = set()
    for folder in sorted(folders):
        there = _existing(folder)
        device = there.stat().st_dev
        if device not in told:  # one file system is told once
            told.add(device)
            found += _disk(there)
    return found


def _shm(folder: Path) -> list[Finding]:
    try:
        facts = os.statvfs(folder)
    except OSError as exc:
        what, fix = f"there is no {folder}: {exc.strerror}", "mount a tmpfs there"
        return [Finding(check=NAME, severity="error", what=what, where=str(folder), fix=fix)]
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    wanted = min(STORE * _memory(LIMITS), STORE_MOST)
    fix = (
        f"`--shm-size={int(wanted * 1.1) >> 30}g` or `--ipc=host` for docker run, an emptyDir of medium "
        f"Memory in Kubernetes, `mount -o remount,size=50% {folder}` on a machine; what is left there shows "
        f"`ls -l {folder}`"
    )
    if total < SHM_LEAST:
        what = (
            f"shared memory is {_size(total)}: NCCL between processes, and vLLM's workers, fail without 1 GiB"
        )
        return [Finding(check=NAME, severity="error", what=what, where=str(folder), fix=fix)]
    if free < wanted:
        what = (
            f"{_size(free)} of shared memory are free; Ray's object store wants {_size(wanted)}, or is slow"
        )
        return [Finding(check=NAME, severity="warning", what=what, where=str(folder), fix=fix)]
    return []


def _memory(limits: Iterable[Path]) -> int:
    """Bytes of memory that there are for this container, or machine."""
    limit = next((path.read_text().strip() for path in limits if path.exists()), "")
    total: int = psutil.virtual_memory().total
    return min(int(limit), total) if limit.isdigit() else total


def _disk(folder: Path) -> list[Finding]:
    found = []
    facts = os.statvfs(folder)
    usage = psutil.disk_usage(str(folder))
    fix = f"`du -xsh {folder}/* | sort -h`; old sessions of Ray are {folder}/ray/session_*, or set RAY_TMPDIR"
    if usage.percent >= 100 * NEARLY:
        what = (
            f"{usage.percent:.0f} % full, {_size(usage.free)} free; Ray makes no objects at {100 * FULL:g} %"
        )
        severity: Severity = "error" if usage.percent >= 100 * FULL else "warning"
        found.append(Finding(check=NAME, severity=severity, what=what, where=str(folder), fix=fix))
    if facts.f_files and facts.f_favail / facts.f_files < 1 - FULL:
        what = f"{facts.f_favail} of {facts.f_files} inodes are free: no file can be made without one"
        found.append(Finding(check=NAME, severity="warning", what=what, where=str(folder), fix=fix))
    return found


def _existing(folder: Path) -> Path:
    """``folder``, or where it would be made."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _size(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
