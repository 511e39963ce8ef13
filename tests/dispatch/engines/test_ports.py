from __future__ import annotations

import asyncio
import socket

import pytest

from dispatch.engines.child import ports
from dispatch.engines.child.process import EngineProcess
from tests.dispatch.engines.processes import Tag, fake_engine
from tests.support.wait import until


def test_free_port_can_be_bound() -> None:
    port = ports.free_port()
    with socket.socket() as one:
        one.bind(("127.0.0.1", port))


def test_free_ports_do_not_follow_a_seed() -> None:
    """P4: two starts with the same seed."""
    assert len({ports.free_port() for _ in range(8)}) > 1


@pytest.mark.parametrize(
    ("status", "lines", "taken"),
    [
        (98, (), True),
        (1, ("ERROR: [Errno 98] error while attempting to bind: address already in use",), True),
        (1, ("OSError: [Errno 98] Address already in use", "Traceback"), True),
        (1, ("out of memory",), False),
        (None, (), False),
    ],
)
def test_says_taken(status: int | None, lines: tuple[str, ...], taken: bool) -> None:
    assert ports.says_taken(status, lines) is taken


async def test_another_programs_port_is_not_the_engines(tag: Tag) -> None:
    """While our engine loads, somebody else's server on its port must not pass for it."""
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        engine = await EngineProcess.spawn(("sleep", "1000"), env=tag.env)
        assert not await asyncio.to_thread(ports.listens, engine.guard_pid, port)
        await engine.stop()
    port = ports.free_port()
    command = [text.replace("{port}", str(port)) for text in fake_engine()]
    wrapped = ("sh", "-c", '"$@"; true', "sh", *command)  # the server is a grandchild of the guard
    engine = await EngineProcess.spawn(wrapped, env=tag.env)
    await until(lambda: ports.listens(engine.guard_pid, port), 15)
    assert not ports.listens(engine.guard_pid, port + 1)
    await engine.stop()


def test_a_guard_that_is_gone() -> None:
    assert not ports.listens(2**22 + 1, 80)
