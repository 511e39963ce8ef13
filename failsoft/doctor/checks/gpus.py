"""GPU memory that nobody owns: a process is gone, and its driver still holds what it had.

NVML says how much of a device is used and by which compute processes (`dispatch.engines.traces.gpu`). In a
container it tells of those outside with pids that mean nothing here; so where it lists somebody, nothing
more is said than that nobody of that pid is to be seen from here.
"""

from __future__ import annotations

from typing import Final

import psutil

from dispatch.engines.traces.gpu import Device, Gpus, Nvml
from failsoft.doctor.finding import Examined, Finding

NAME: Final = "gpus"
OWN: Final = 1 << 30
"""Bytes that a device with no process may have in use: the driver's own, some hundred MiB."""


def check(examined: Examined, gpus: Gpus | None = None) -> list[Finding]:
    """Devices whose memory is used by no process that lives."""
    seen = (gpus if gpus is not None else Nvml(None)).look()
    if seen.absent or not seen.devices:
        what = f"not checked: {seen.absent or 'no GPU on this machine'}"
        return [Finding(check=NAME, severity="note", what=what)]
    return [finding for device in seen.devices if (finding := _device(device)) is not None]


def _device(device: Device) -> Finding | None:
    if device.used is None or device.processes is None:
        what, fix = f"not checked: {device.problem}", "`nvidia-smi`, and `dmesg -T | grep -i nvrm`"
        return Finding(check=NAME, severity="warning", what=what, where=device.name, fix=fix)
    if device.used < OWN or any(psutil.pid_exists(pid) for pid in device.processes):
        return None
    used = f"{device.used / (1 << 30):.1f} GiB are used"
    if device.processes:
        what = f"{used} by processes that are not to be seen from here: {sorted(device.processes)}"
        fix = "in a container they may be others'; look from outside of it"
        return Finding(check=NAME, severity="note", what=what, where=device.name, fix=fix)
    fix = (
        "`fuser -v /dev/nvidia*` as root names who has the device open, also without a context on it; with "
        "nobody there, only `nvidia-smi --gpu-reset`, or a reboot, gives the memory back"
    )
    return Finding(check=NAME, severity="error", what=f"{used} by no process", where=device.name, fix=fix)
