from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from dispatch.engines.routers import StaticRouter, static
from dispatch.files import write_atomic
from protocol import CodedError

URL = "http://127.0.0.1:30000"


class Disk:
    """Writes nothing before it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.free = threading.Event()
        self.written = threading.Event()
        monkeypatch.setattr(static, "write_atomic", self.write)

    def write(self, path: Path, data: bytes) -> None:
        self.reached.set()
        assert self.free.wait(30)
        write_atomic(path, data)
        self.written.set()


async def test_removed_while_it_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that goes down just after its canary: what told of it is cancelled, and its thread is not."""
    path = tmp_path / "urls.json"
    router = StaticRouter(path)
    disk = Disk(monkeypatch)
    adding = asyncio.create_task(router.add(URL))
    await asyncio.to_thread(disk.reached.wait)
    adding.cancel()
    await asyncio.wait({adding})
    removing = asyncio.create_task(router.remove(URL))
    await asyncio.sleep(0.05)  # for a removal that does not wait to be over
    disk.free.set()
    await removing
    await asyncio.to_thread(disk.written.wait)
    assert await router.urls() == ()
    assert json.loads(path.read_text()) == {"urls": []}


async def test_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "urls.json"
    router = StaticRouter(path, timeout=0.1)
    disk = Disk(monkeypatch)
    for ask in (router.add, router.remove):
        with pytest.raises(CodedError, match=r"TIMEOUT\.DEADLINE.* could not be written within 0\.1 s"):
            await ask(URL)
    disk.free.set()
    router._timeout = 20.0  # the disk works again, as fast as it can
    await router.add("http://b:1")
    assert await router.urls() == ("http://b:1",)
    assert json.loads(path.read_text()) == {"urls": ["http://b:1"]}


@pytest.mark.parametrize("name", ["", "/"])
def test_a_folder_is_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(CodedError, match="is a folder, name a file in it") as caught:
        StaticRouter(tmp_path / name)
    assert caught.value.code == "CONFIG.INVALID"
