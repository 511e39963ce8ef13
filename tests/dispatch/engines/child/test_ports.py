from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dispatch.engines.child import ports
from dispatch.engines.child.process import EngineProcess
from protocol import CodedError
from tests.dispatch.engines.processes import SLEEP, Tag, fake_engine
from tests.support.wait import until, until_sync

HOLDER = """
import json, os, random, sys
from dispatch.engines.child import ports
random.seed(7)
uid, candidates, names = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
if uid:
    os.setgroups([])
    os.setuid(uid)
ports._candidates = lambda: candidates
for _ in sys.stdin:
    with ports.reserve(names) as reserved:
        print(json.dumps(reserved.numbers), flush=True)
        sys.stdin.readline()
    print("{}", flush=True)
"""
"""Reserves ports at each first line that it reads, and releases them at each second."""

THREE_PORTS = """
import socket, sys, time
held = []
for port in sys.argv[1:]:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", int(port)))
    one.listen()
    held.append(one)
print("bound", flush=True)
time.sleep(1000)
"""


class Holder:
    def __init__(self, candidates: list[int], *names: str, uid: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(uid), json.dumps(candidates), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def numbers(self) -> list[int]:
        assert self.process.stdout is not None
        return list(json.loads(self.process.stdout.readline()).values())


@contextmanager
def holders(count: int, candidates: list[int], *names: str, uid: int = 0) -> Iterator[list[Holder]]:
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(Holder(candidates, *names, uid=uid))
            stack.enter_context(made[-1].process)
            stack.callback(made[-1].process.kill)
        yield made


def names_held() -> set[int]:
    """The ports that are reserved in this network namespace, as the kernel lists them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {int(line.rpartition("-")[2]) for line in lines if "@failsoft-port-" in line}


def free(count: int) -> list[int]:
    """Ports that are free now, for a test's own small range."""
    with ports.reserve([f"p{n}" for n in range(count - 1)]) as reserved:
        return sorted(reserved.numbers.values())


# -- reserving


def test_reserved_ports_can_be_bound() -> None:
    with ports.reserve(("nccl", "grpc")) as reserved, ExitStack() as stack:
        assert list(reserved.numbers) == ["port", "nccl", "grpc"]
        assert len(set(reserved.numbers.values())) == len(reserved.descriptors) == 3
        assert set(reserved.numbers.values()) <= names_held()
        for port in reserved.numbers.values():
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", port))
            one.listen()
        numbers = set(reserved.numbers.values())
    assert not numbers & names_held()
    assert reserved.descriptors == ()
    reserved.release()


def test_ipv6() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with ports.reserve((), "::1") as reserved, socket.socket(socket.AF_INET6) as one:
        one.bind(("::1", reserved.numbers["port"]))


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", "bücher..de"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(CodedError) as caught:
        ports.reserve((), host)
    assert caught.value.code == "CONFIG.INVALID"
    assert host in caught.value.detail


@pytest.mark.parametrize(
    ("ephemeral", "aside", "spans"),
    [
        ("32768\t60999\n", "\n", "20000 to 32767, 61000 to 65535"),
        ("32768 60999", "20000-29999,65000,65535", "30000 to 32767, 61000 to 64999, 65001 to 65534"),
        ("10000 65535", "", "20000 to 65535"),
        ("1024 64999", "", "65000 to 65535"),
        ("10000 65535", "20000-65535", "20000 to 65535"),
        (None, None, "20000 to 32767, 61000 to 65535"),
    ],
)
def test_which_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ephemeral: str | None, aside: str | None, spans: str
) -> None:
    for name, text in (("ip_local_port_range", ephemeral), ("ip_local_reserved_ports", aside)):
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(ports, "_SYSCTL", tmp_path)
    assert ports._spans(ports._candidates()) == spans


def test_this_machines_ephemeral_ports_are_left_to_outgoing_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = ports._candidates()
    assert min(candidates) >= ports.LOWEST
    if not (low <= ports.LOWEST and high == 65535):
        assert not [port for port in candidates if low <= port <= high]


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener on one address, on another interface, and a connection in TIME_WAIT."""
    local, other, waiting, good = candidates = free(4)
    monkeypatch.setattr(ports, "_candidates", lambda: candidates)
    with ExitStack() as stack:
        for address in (("127.0.0.1", local), ("127.0.0.2", other), ("127.0.0.1", waiting)):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            one.listen()
        client = socket.create_connection(("127.0.0.1", waiting))
        served, _ = one.accept()
        served.close()  # the side that closes first keeps the TIME_WAIT, and here that is the server's port
        client.close()
        one.close()
        with pytest.raises(OSError, match="in use"), socket.socket() as probe:
            probe.bind(("127.0.0.1", waiting))
        with ports.reserve(()) as reserved:
            assert reserved.numbers["port"] == good


def test_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = free(3)
    monkeypatch.setattr(ports, "_candidates", lambda: candidates)
    with ports.reserve(("a", "b")), pytest.raises(CodedError) as caught:
        ports.reserve(())
    assert caught.value.code == "ENGINE.PORT_TAKEN"
    assert str(candidates[0]) in caught.value.detail
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CodedError):
        ports.reserve(("a", "b", "c"))
    # Others of this process, Ray for one, may just have some open.
    until_sync(lambda: len(os.listdir("/proc/self/fd")) <= len(before), what="what it had got is given back")
    assert not set(candidates) & names_held()


def test_descriptors_running_out_is_not_taken_for_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ports, "_lock", full)
    with pytest.raises(OSError, match="Too many"):
        ports.reserve(())


def test_the_last_port_is_avoided_while_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    last, other = candidates = free(2)
    monkeypatch.setattr(ports, "_candidates", lambda: candidates)
    for _ in range(10):
        with ports.reserve((), avoid=(last,)) as reserved:
            assert reserved.numbers["port"] == other
    with ports.reserve(("second",), avoid=(last,)) as reserved:
        assert set(reserved.numbers.values()) == {last, other}


def test_reservers_with_one_seed_do_not_collide() -> None:
    """P4: 20 processes with the same seed, 3 ports each of 64, 20 times over."""
    candidates = free(64)
    with holders(20, candidates, "nccl", "grpc") as made:
        collisions = 0
        for _ in range(20):
            for one in made:
                one.tell()
            taken = Counter(port for one in made for port in one.numbers())
            assert taken.total() == 60
            collisions += taken.total() - len(taken)
            for one in made:
                one.tell()
            assert [one.numbers() for one in made] == [[]] * 20, "all are released before the next round"
    print(f"20 processes, 20 rounds, 1200 ports reserved of {len(candidates)}: {collisions} collisions")
    assert collisions == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as another user")
def test_another_users_reservation_counts() -> None:
    candidates = free(2)
    with holders(1, candidates, uid=65534) as (other,), holders(1, candidates) as (ours,):
        for one in (other, ours):
            one.tell()
        assert {*other.numbers(), *ours.numbers()} == set(candidates)


# -- as long as the guard


async def test_a_reservation_lives_as_long_as_the_guard(tag: Tag) -> None:
    with ports.reserve(("nccl",)) as reserved:
        numbers = set(reserved.numbers.values())
        engine = await EngineProcess.spawn(SLEEP, env=tag.env, reserved=reserved)
    assert numbers <= names_held(), "ours are closed, the guard's are not"
    # It opens libraries for a moment while it starts.
    await until(lambda: len(os.listdir(f"/proc/{engine.pid}/fd")) == 3, what="the engine has none of them")
    await engine.stop()
    await until(lambda: not numbers & names_held(), 5)  # the guard ends just after the stop


async def test_a_killed_guard_holds_nothing(tag: Tag) -> None:
    with ports.reserve(()) as reserved:
        numbers = set(reserved.numbers.values())
        engine = await EngineProcess.spawn(SLEEP, env=tag.env, reserved=reserved)
    os.kill(engine.guard_pid, signal.SIGKILL)
    await engine.wait(5)
    await until(lambda: not numbers & names_held(), 5)
    await engine.stop()


async def _one_engine(tag: Tag) -> tuple[EngineProcess, list[int]]:
    with ports.reserve(("nccl", "grpc")) as reserved:
        numbers = list(reserved.numbers.values())
        argv = (sys.executable, "-I", "-S", "-c", THREE_PORTS, *map(str, numbers))
        return await EngineProcess.spawn(argv, env=tag.env, reserved=reserved, timeout=30), numbers


async def start_together(tag: Tag, engines: int, rounds: int) -> None:
    """Start ``engines`` of three ports each at once, ``rounds`` times, and count the collisions."""
    collisions = failed = 0
    began = time.monotonic()
    for _ in range(rounds):
        made = await asyncio.gather(*(_one_engine(tag) for _ in range(engines)))
        taken = Counter(port for _, numbers in made for port in numbers)
        collisions += taken.total() - len(taken)
        for engine, _ in made:
            await until(lambda: engine.last_lines or not engine.alive, 30)  # noqa: B023 - called at once
            failed += engine.last_lines != ("bound",)
        await asyncio.gather(*(engine.stop() for engine, _ in made))
    print(
        f"{engines} engines of 3 ports at once, {rounds} rounds: {collisions} collisions, {failed} that did "
        f"not bind all of theirs ({time.monotonic() - began:.1f} s)"
    )
    assert collisions == failed == 0


@pytest.mark.timeout(120)
async def test_engines_started_at_once(tag: Tag) -> None:
    await start_together(tag, engines=20, rounds=3)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_twenty_engines_twenty_rounds(tag: Tag) -> None:
    await start_together(tag, engines=20, rounds=20)


# -- taken all the same, and whose


@pytest.mark.parametrize(
    ("status", "line", "taken"),
    [
        (98, "", True),
        # uvicorn, and vLLM and SGLang with it
        (
            1,
            "ERROR: [Errno 98] error while attempting to bind on address ('::', 1): address already in use",
            True,
        ),
        (1, "OSError: [Errno 98] Address already in use", True),
        (1, "OSError: [Errno 98] Adresse déjà utilisée", True),
        (1, "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5557')", True),
        (1, "ValueError: metrics_port at 40290 is not available in 30 seconds.", True),
        # torch's store
        (1, "failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use).", True),
        (1, "listen tcp 127.0.0.1:8080: bind: address already in use", True),
        (101, 'Os { code: 98, kind: AddrInUse, message: "Address already in use" }', True),
        (1, "Error: Adresse wird bereits verwendet (os error 98)", True),
        (1, "main: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", True),
        (1, "node: listen EADDRINUSE: :::8080", True),
        (1, "Port 8000 is already in use, trying port 8001", False),
        (1, "RuntimeError: CUDA out of memory, errno 980", False),
        (None, "", False),
    ],
)
def test_says_taken(status: int | None, line: str, taken: bool) -> None:
    assert ports.says_taken(status, ("loading", line, "Traceback")) is taken


async def test_another_programs_port_is_not_the_engines(tag: Tag) -> None:
    """While our engine loads, somebody else's server on its port must not pass for it."""
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        engine = await EngineProcess.spawn(SLEEP, env=tag.env)
        assert not await asyncio.to_thread(ports.listens, engine.guard_pid, port)
        assert ports.elsewhere(engine.guard_pid, port) == ""
        await engine.stop()
    (port,) = free(1)
    command = [text.replace("{port}", str(port)) for text in fake_engine()]
    wrapped = ("sh", "-c", '"$@"; true', "sh", *command)  # the server is a grandchild of the guard
    engine = await EngineProcess.spawn(wrapped, env=tag.env)
    await until(lambda: ports.listens(engine.guard_pid, port), 15)
    assert not ports.listens(engine.guard_pid, port + 1)
    assert ports.listening(engine.guard_pid) == {port}
    assert ports.elsewhere(engine.guard_pid, 8000) == f"; it listens on {port}, not on 8000"
    await engine.stop()


def test_a_guard_that_is_gone() -> None:
    assert not ports.listens(2**22 + 1, 80)
    assert ports.listening(2**22 + 1) == set()
