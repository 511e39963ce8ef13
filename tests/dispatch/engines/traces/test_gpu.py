"""The GPU check: against a stand-in for pynvml, and the real one where there is no GPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dispatch.engines.child.process import EngineProcess
from dispatch.engines.traces import gpu, owned
from dispatch.engines.traces.gpu import MARGIN, Check, Device, Look, Nvml
from protocol import CodedError
from tests.dispatch.engines.processes import SLEEP, Tag
from tests.support.wait import until

GB = 1 << 30
TREE = {4194200: time.time(), 4194201: time.time()}
"""Two processes that are gone: pids above any that is given out."""


class NVMLError(Exception):
    pass


class FakeNvml:
    """What is used of pynvml. ``devices`` are uuid → (used bytes, pid → bytes), or an exception."""

    NVMLError = NVMLError

    def __init__(self, **devices: Any) -> None:
        self.devices: dict[str, Any] = {name.replace("_", "-"): value for name, value in devices.items()}
        self.refuses: set[str] = set()
        self.looks = 0

    def _call(self, name: str) -> None:
        if name in self.refuses:
            raise NVMLError(f"{name} Not Supported")

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlDeviceGetCount(self) -> int:
        return len([name for name in self.devices if name.startswith("GPU-")])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.looks += 1
        if index >= self.nvmlDeviceGetCount():
            raise NVMLError("Invalid Argument")
        return list(self.devices)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.devices:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._call("memory")
        return SimpleNamespace(used=self.devices[handle][0])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._call("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.devices[handle][1].items()]


def names(visible: str | None, nvml: FakeNvml) -> list[str]:
    return [one.name for one in Nvml(visible, nvml).look().devices]


def test_which_devices() -> None:
    nvml = FakeNvml(GPU_aaaa=(0, {}), GPU_bbbb=(0, {}), MIG_cccc=(0, {}))
    assert names(None, nvml) == ["GPU 0", "GPU 1"]
    assert names("1", nvml) == ["GPU 1"]
    assert names("1, GPU-aa,MIG-cccc", nvml) == ["GPU 1", "GPU-aa", "MIG-cccc"]
    assert names("0,-1,1", nvml) == ["GPU 0"], "CUDA stops there as well"
    for nothing in ("", "-1", "NoDevFiles"):
        look = Nvml(nothing, nvml).look()
        assert look.devices == ()
        assert look.absent == f"no GPU for this engine: CUDA_VISIBLE_DEVICES is {nothing!r}"
    (wrong,) = Nvml("GPU-zz", nvml).look().devices
    assert wrong == Device(name="GPU-zz", problem="Not Found")


def test_what_nvml_says() -> None:
    nvml = FakeNvml(GPU_a=(3 * GB, {7: 2 * GB, 8: None}))
    assert Nvml(None, nvml).look() == Look(
        devices=(Device(name="GPU 0", used=3 * GB, processes={7: 2 * GB, 8: 0}),)
    )
    nvml.refuses = {"processes"}
    (one,) = Nvml(None, nvml).look().devices
    assert (one.used, one.processes, one.problem) == (3 * GB, None, "processes: processes Not Supported")
    nvml.refuses = {"memory", "processes"}
    assert Nvml(None, nvml).look().devices[0].used is None


def test_nothing_there() -> None:
    assert Nvml(None, FakeNvml()).look() == Look(absent="no GPU on this machine")
    nvml = FakeNvml(GPU_a=(0, {}))
    nvml.refuses = {"init"}
    assert Nvml(None, nvml).look().absent.startswith("no GPU on this machine that NVML can see: ")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_NODES", ("/dev/null",))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "install failsoft with its extra gpu" in Nvml(None).look().absent


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="for a machine without a GPU")
@pytest.mark.parametrize("nodes", [(), ("/dev/null",)])
async def test_the_real_library_without_a_gpu(
    tag: Tag, nodes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_NODES", ("/dev/nvidiactl", *nodes))
    engine = await EngineProcess.spawn(SLEEP, env=tag.env)
    report = await engine.stop()
    why = " that NVML can see: NVML Shared Library Not Found" if nodes else ": there is no /dev/nvidiactl"
    assert report.gpu == "no GPU on this machine" + why
    assert "gpu" not in report.stages, "there was nothing to check"


async def check(nvml: FakeNvml, change: Any, *, exact: bool, timeout: float = 0.3, during: Any = None) -> str:
    """A check that begins with ``nvml`` as it is; ``change`` is what the engine leaves."""
    one = Check(Nvml(None, nvml), exact=exact)
    assert await one.absent() == ""
    if during is not None:
        during()
        one.stopping()
        assert one._during is not None
        await one._during
    change()
    return await one.released(TREE, timeout)


async def test_none_of_ours() -> None:
    nvml = FakeNvml(GPU_a=(0, {}), GPU_b=(GB, {1: GB}))
    grown = {"GPU-b": (9 * GB, {1: 9 * GB})}
    said = await check(nvml, lambda: nvml.devices.update(grown), exact=True)
    assert said == "GPU 0: none of our processes; GPU 1: none of our processes"


async def test_ours_linger_and_then_go() -> None:
    nvml = FakeNvml(GPU_a=(0, {}))
    pid = next(iter(TREE))
    tasks = []

    async def go() -> None:
        await until(lambda: nvml.looks > 2, what="seen before its start, and twice after its end")
        nvml.devices["GPU-a"] = (0, {})

    def change() -> None:
        nvml.devices["GPU-a"] = (GB, {pid: GB})
        tasks.append(asyncio.create_task(go()))

    assert await check(nvml, change, exact=True, timeout=30) == "GPU 0: none of our processes"
    await tasks[0]


async def test_ours_never_go() -> None:
    nvml = FakeNvml(GPU_a=(0, {}), GPU_b=(0, {}))
    left = {"GPU-b": (3 * GB, {1: GB, **dict.fromkeys(TREE, GB)})}
    with pytest.raises(CodedError, match="stage gpu: GPU 1 still has processes") as caught:
        await check(nvml, lambda: nvml.devices.update(left), exact=True)
    assert caught.value.code == "ENGINE.STOP_FAILED"
    assert caught.value.data == {
        "stage": "gpu",
        "device": "GPU 1",
        "pids": sorted(TREE),
        "bytes": 2 * GB,
    }


async def test_a_pid_that_is_used_again() -> None:
    nvml = FakeNvml(GPU_a=(0, {}))
    other = subprocess.Popen(SLEEP)  # noqa: ASYNC220 - some milliseconds in a test
    try:
        one = Check(Nvml(None, nvml), exact=True)
        await one.absent()
        nvml.devices["GPU-a"] = (GB, {other.pid: GB})
        began = psutil.Process(other.pid).create_time()
        assert await one.released({other.pid: began - 100}, 0.2) == "GPU 0: none of our processes"
        with pytest.raises(CodedError, match="stage gpu"):
            await one.released({other.pid: began}, 0.2)
    finally:
        other.kill()
        other.wait()


async def test_pids_of_the_host() -> None:
    """In a container: NVML's pids say nothing, not even when they are the same by chance."""
    nvml = FakeNvml(GPU_a=(GB, {77: GB}))
    back = {"GPU-a": (2 * GB + MARGIN, {77: 2 * GB, next(iter(TREE)): 0})}
    said = await check(nvml, lambda: nvml.devices.update(back), exact=False)
    assert "used memory is back" in said, "the growth of one that was there before is not ours"
    assert "not this container's" in said
    nvml = FakeNvml(GPU_a=(GB, {77: GB}))
    held = {"GPU-a": (3 * GB, {77: GB, 78: 2 * GB})}
    with pytest.raises(CodedError, match="2147483648 bytes more in use") as caught:
        await check(nvml, lambda: nvml.devices.update(held), exact=False)
    assert (caught.value.data["pids"], caught.value.data["bytes"]) == ([], 2 * GB)


async def test_a_container_whose_pids_nvml_knows() -> None:
    nvml = FakeNvml(GPU_a=(0, {}))
    pid = next(iter(TREE))
    said = await check(
        nvml,
        lambda: nvml.devices.update({"GPU-a": (5 * GB, {99: 5 * GB})}),
        exact=False,
        during=lambda: nvml.devices.update({"GPU-a": (GB, {pid: GB})}),
    )
    assert said == "GPU 0: none of our processes", "another's memory does not matter then"


async def test_mig_lists_no_processes() -> None:
    nvml = FakeNvml(GPU_a=(0, {}))
    nvml.refuses = {"processes"}
    said = await check(nvml, lambda: None, exact=True)
    assert said.startswith("GPU 0: its used memory is back to what it was before the start (NVML lists no")
    nvml.refuses = {"processes", "memory"}
    said = await check(nvml, lambda: None, exact=True)
    assert said.startswith("GPU 0 not checked: "), "never a success that was not seen"


async def test_a_device_that_was_there_and_cannot_be_asked_any_more() -> None:
    nvml = FakeNvml(GPU_a=(0, {}))
    with pytest.raises(CodedError, match="GPU 0 cannot be asked any more: "):
        await check(nvml, lambda: nvml.refuses.update({"memory", "processes"}), exact=True)


async def test_nvml_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LOOK_TIMEOUT", 0.1)
    go_on = threading.Event()

    class Hanging(FakeNvml):
        def nvmlInit(self) -> None:
            go_on.wait(20)

    check = Check(Nvml(None, Hanging(GPU_a=(0, {}))), exact=True)
    assert await check.absent() == "GPUs not checked: NVML gave no answer within 0.1 s"
    assert await check.released({}, 0.1) == "GPUs not checked: NVML gave no answer within 0.1 s"
    go_on.set()


async def test_a_library_that_fails_in_its_own_way() -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise AttributeError("nvmlInit")

    assert await Check(Nvml(None, Broken())).absent() == "GPUs not checked: AttributeError: nvmlInit"


async def test_a_stop_has_the_stage(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "GPU_TIMEOUT", 0.3)
    nvml = FakeNvml(GPU_a=(0, {}))
    engine = await EngineProcess.spawn(SLEEP, env=tag.env, gpus=Nvml("0", nvml))
    report = await engine.stop()
    assert list(report.stages) == ["term", "confirm", "gpu", "tmp"]
    assert report.gpu == "GPU 0: none of our processes"
    engine = await EngineProcess.spawn(SLEEP, env=tag.env, gpus=Nvml("0", nvml))
    assert engine._traces.gpu is not None
    await engine._traces.gpu.absent()
    nvml.devices["GPU-a"] = (GB, {engine.pid: GB})
    with pytest.raises(CodedError, match="stage gpu") as caught:
        await engine.stop()
    assert caught.value.data["pids"] == [engine.pid]
    assert list(caught.value.data["stages"]) == ["term", "confirm", "gpu", "tmp"]
    nvml.devices["GPU-a"] = (0, {})
    assert (await engine.stop()).gpu == "GPU 0: none of our processes", "asked again"
