"""When a process counts as ended: not before its sockets are closed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from dispatch.processes import is_alive, see_gone
from tests.support.wait import until_sync

# Its first thread ends, another one lives on: so is every process for a while that a SIGKILL ends.
WITHOUT_ITS_FIRST_THREAD = """
import ctypes, socket, sys, threading, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@dataclass
class Ending:
    """A process in that state, and the other end of a connection of its."""

    pid: int
    created: float
    peer: socket.socket

    def hung_up(self) -> bool:
        try:
            return self.peer.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def ending() -> Iterator[Ending]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD, str(server.getsockname()[1])]
        with subprocess.Popen(command) as child:
            try:
                server.settimeout(20)
                peer, _ = server.accept()
                process = psutil.Process(child.pid)
                until_sync(lambda: process.status() == psutil.STATUS_ZOMBIE)
                with peer:
                    yield Ending(child.pid, process.create_time(), peer)
            finally:
                child.kill()


def test_a_process_whose_first_thread_has_ended_is_alive_while_another_runs(ending: Ending) -> None:
    assert not ending.hung_up()
    assert is_alive(ending.pid, ending.created)
    os.kill(ending.pid, signal.SIGKILL)
    until_sync(lambda: not is_alive(ending.pid, ending.created))
    assert ending.hung_up()
    assert psutil.pid_exists(ending.pid)  # nobody has waited for it: a zombie, of which nothing is left


async def test_it_is_killed_and_seen_to_go(ending: Ending) -> None:
    async with asyncio.timeout(20):
        assert await see_gone(ending.pid, ending.created)
    assert ending.hung_up()
