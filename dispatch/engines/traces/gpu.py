"""The GPUs of one engine: what they held before its start, and whether all of it is free after its stop.

A process that is gone for /proc may still be held by its driver, and the next start then finds the
memory taken. NVML (nvidia-ml-py, the extra ``gpu``) says who is on a device. What cannot be asked is said
in words and never counts as a success that was seen.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec
import psutil

from dispatch.engines.traces.aside import in_thread
from protocol import CodedError

LOOK_TIMEOUT: Final = 5.0
"""Seconds for one look. NVML's first call takes up to seconds where no daemon keeps the driver awake."""
MARGIN: Final = 128 << 20
"""Bytes by which a device's used memory may differ from before: less than any CUDA context takes."""
_NODES: Final = ("/dev/nvidiactl", "/dev/dxg")
"""Device nodes of NVIDIA's driver (the second under WSL). Where there is none the library is not even
loaded, which takes a fraction of a second."""
LEAST: Final = 1.0
"""Seconds that a look gets also when the time is nearly over: one that was cut off would say less than the
one before it."""
_PAUSE: Final = 0.05
_INITIAL_NAMESPACE: Final = "pid:[4026531836]"
"""Linux's first pid namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h), the one NVML speaks of."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device at one time. ``used`` is bytes; ``processes`` are the compute processes, pid → bytes;
    each None when NVML does not say, and ``problem`` is then why."""

    name: str
    used: int | None = None
    processes: dict[int, int] | None = None
    problem: str = ""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """All devices at one time; none, and why, when there is nothing to be asked."""

    devices: tuple[Device, ...] = ()
    absent: str = ""


class Gpus(Protocol):
    """The devices that an engine may use."""

    def look(self) -> Look:
        """How they stand now. Blocks, for ever where a device hangs: call it in a thread (`Check`)."""
        ...


class Nvml:
    """`Gpus` through NVML. ``visible`` is the engine's CUDA_VISIBLE_DEVICES, None when it is not set:
    indexes, UUIDs or beginnings of them, or MIG ids; what follows an entry that is none of these does not
    count, as for CUDA. An index is NVML's, by bus; on a machine with GPUs of different kinds CUDA counts
    so only with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    def __init__(self, visible: str | None, module: Any = None) -> None:
        self._visible = visible
        self._nvml = module
        self._ready = False

    def look(self) -> Look:
        if self._visible is not None and not _entries(self._visible):
            return Look(absent=f"no GPU for this engine: CUDA_VISIBLE_DEVICES is {self._visible!r}")
        if self._nvml is None:
            if not any(map(os.path.exists, _NODES)):
                return Look(absent=f"no GPU on this machine: there is no {_NODES[0]}")
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError as exc:
                return Look(absent=f"GPUs not checked: {exc}; install failsoft with its extra gpu")
        nvml = self._nvml
        try:
            if not self._ready:
                nvml.nvmlInit()
                self._ready = True
            names = self._names()
        except nvml.NVMLError as exc:
            return Look(absent=f"no GPU on this machine that NVML can see: {exc}")
        if not names:
            return Look(absent="no GPU on this machine")
        return Look(devices=tuple(self._device(name) for name in names))

    def _names(self) -> list[str]:
        if self._visible is not None:
            return _entries(self._visible)
        return [str(index) for index in range(self._nvml.nvmlDeviceGetCount())]

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith("GPU-"):
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if self._nvml.nvmlDeviceGetUUID(handle).startswith(name):
                    return handle
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _device(self, entry: str) -> Device:
        nvml = self._nvml
        name = f"GPU {entry}" if entry.isdigit() else entry
        used: int | None = None
        processes: dict[int, int] | None = None
        problems: list[str] = []
        try:
            handle = self._handle(entry)
        except nvml.NVMLError as exc:
            return Device(name=name, problem=str(exc))
        try:
            used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError as exc:
            problems.append(f"memory: {exc}")
        try:
            listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            processes = {one.pid: one.usedGpuMemory or 0 for one in listed}  # None where it is not known
        except nvml.NVMLError as exc:
            problems.append(f"processes: {exc}")
        return Device(name=name, used=used, processes=processes, problem="; ".join(problems))


def _entries(visible: str) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES up to the first that names no device (``-1``, ``NoDevFiles``)."""
    entries = []
    for entry in (text.strip() for text in visible.split(",")):
        if not entry.isdigit() and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(entry)
    return entries


class _Held(msgspec.Struct, frozen=True):
    """A device that is not free."""

    device: str
    pids: tuple[int, ...]
    bytes: int
    words: str


class Check:
    """One engine's check: made before its start, `released` after its end. Belongs to the running loop."""

    def __init__(self, gpus: Gpus, *, exact: bool | None = None) -> None:
        """``exact``: pids that NVML lists are those of this process's /proc. None finds out: they are in
        the first pid namespace, and in a container only when one of the tree has been seen listed."""
        self._gpus = gpus
        self._exact = _in_initial_namespace() if exact is None else exact
        self._before = asyncio.create_task(self._look(LOOK_TIMEOUT))
        self._during: asyncio.Task[Look] | None = None

    async def _look(self, timeout: float) -> Look:
        try:
            return await in_thread(self._gpus.look, timeout)
        except TimeoutError:
            return Look(absent=f"GPUs not checked: NVML gave no answer within {timeout:g} s")
        except Exception as exc:  # noqa: BLE001 - a foreign library and its versions; told in the report
            return Look(absent=f"GPUs not checked: {type(exc).__name__}: {exc}")

    def stopping(self) -> None:
        """Look while the engine still lives, for whether its pids are among those that NVML lists."""
        if not self._exact and self._during is None:
            self._during = asyncio.create_task(self._look(LOOK_TIMEOUT))

    def cancel(self) -> None:
        """For a start that failed. A thread that hangs in NVML stays; it keeps no interpreter alive."""
        for task in (self._before, self._during):
            if task is not None:
                task.cancel()

    async def absent(self) -> str:
        """Why there is nothing to check, "" if there is."""
        return (await asyncio.shield(self._before)).absent

    async def released(self, tree: Mapping[int, float], timeout: float) -> str:
        """Wait until the devices hold nothing of ``tree`` (pid → create time) any more; what was seen, in
        words. Raises CodedError ENGINE.STOP_FAILED with the stage ``gpu``, the device, pids and bytes,
        when ``timeout`` seconds are over: also when a device that was there can be asked no more."""
        deadline = time.monotonic() + timeout
        before = await asyncio.shield(self._before)
        if before.absent:
            return before.absent
        if self._during is not None:
            during = await asyncio.shield(self._during)
            self._exact = any(pid in tree for one in during.devices for pid in one.processes or ())
            self._during = None
        pause = _PAUSE
        while True:
            left = deadline - time.monotonic()
            now = await self._look(min(max(left, LEAST), LOOK_TIMEOUT))
            seen = {one.name: one for one in now.devices}
            verdicts = [
                self._verdict(one, seen.get(one.name, Device(name=one.name, problem=now.absent)), tree)
                for one in before.devices
            ]
            held = [one for one in verdicts if isinstance(one, _Held)]
            if not held:
                return "; ".join(str(one) for one in verdicts)
            if time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)
        worst = held[0]
        raise CodedError(
            "ENGINE.STOP_FAILED",
            f"stage gpu: {'; '.join(one.words for one in held)}, {timeout:g} s after the engine's end",
            {"stage": "gpu", "device": worst.device, "pids": worst.pids, "bytes": worst.bytes},
        )

    def _verdict(self, before: Device, now: Device, tree: Mapping[int, float]) -> _Held | str:
        name = before.name
        if before.used is None and before.processes is None:
            return f"{name} not checked: {before.problem}"
        if now.used is None and now.processes is None:
            return _Held(name, (), 0, f"{name} cannot be asked any more: {now.problem}")
        listed = now.processes
        if self._exact and listed is not None:
            ours = {pid: used for pid, used in listed.items() if pid in tree and not _other(pid, tree[pid])}
            if not ours:
                return f"{name}: none of our processes"
            pids, held = tuple(sorted(ours)), sum(ours.values())
            return _Held(name, pids, held, f"{name} still has processes {list(pids)} with {held} bytes")
        why = (
            f"NVML lists no processes: {now.problem}"
            if listed is None
            else "NVML's pids are not this container's"
        )
        if before.used is None or now.used is None:
            return f"{name} not checked: {why}; {before.problem or now.problem}"
        both = (before.processes or {}).keys() & (listed or {}).keys()  # the same numbers, whosever they are
        others = sum((listed or {})[pid] - (before.processes or {})[pid] for pid in both)
        grown = now.used - before.used - others
        if grown <= MARGIN:
            return f"{name}: its used memory is back to what it was before the start ({why})"
        return _Held(name, (), grown, f"{name} has {grown} bytes more in use than before the start ({why})")


def _other(pid: int, create_time: float) -> bool:
    """Whether ``pid`` is another process by now. One that is gone for /proc may still be on the GPU."""
    try:
        return abs(psutil.Process(pid).create_time() - create_time) >= 1
    except psutil.NoSuchProcess:
        return False


def _in_initial_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_NAMESPACE
    except OSError:
        return False
