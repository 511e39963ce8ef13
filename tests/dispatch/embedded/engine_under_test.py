"""A real embedded engine in its own process, for any test that needs one.

    with EngineUnderTest.start("--faults", "--token-rate", "500") as engine:
        httpx.post(engine.url + "/generate", json={"text": "The harbour"})
        engine.counts()["in_flight"]

Leaving the block kills the process if it still runs, so that a failed test leaves nothing behind. Every wait
has a deadline in seconds.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, Self

import httpx

START_DEADLINE = 20.0
STOP_DEADLINE = 10.0
WAIT_DEADLINE = 10.0


def wait_until(condition: Callable[[], Any], what: str, deadline: float = WAIT_DEADLINE) -> Any:
    """Poll until the condition holds and return its value; the failure names what was waited for."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what}")
        time.sleep(0.005)


class EngineUnderTest:
    """One engine process. `url`, `port` and `pid` are known once `start` returns."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.host = ""
        self.port = 0
        self._stderr = stderr
        self._stdout = b""
        # trust_env=False: a proxy set in the environment must not stand between a test and its engine.
        self.client = httpx.Client(timeout=WAIT_DEADLINE, trust_env=False)

    @classmethod
    def start(cls, *flags: str, port: int = 0, wait: bool = True) -> Self:
        """Start an engine and wait for its line; `wait=False` returns at once, before it listens."""
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        command = [sys.executable, "-m", "dispatch.engines.embedded", "--port", str(port), *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
        engine = cls(process, stderr)
        if port:
            engine.host, engine.port = "127.0.0.1", port
        if wait:
            try:
                engine.wait_listening()
            except BaseException:
                engine.close()
                raise
        return engine

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_listening(self, deadline: float = START_DEADLINE) -> None:
        """Read stdout up to the line that says where it listens."""
        stdout = self.process.stdout
        assert stdout is not None
        end = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._stdout:
                assert selector.select(max(0.0, end - time.monotonic())), f"no line within {deadline} s"
                part = os.read(stdout.fileno(), 4096)
                assert part, f"the engine ended before it listened: {self.stderr()}"
                self._stdout += part
        words = self._stdout.split(b"\n", 1)[0].decode().split()
        assert words[:2] == ["listening", "on"], words
        self.host, _, port = words[2].rpartition(":")
        self.port = int(port)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, json={} if body is None else body, **options)

    def generate(
        self, text: str = "The harbour", *, rid: str | None = None, **sampling: Any
    ) -> httpx.Response:
        """One whole generation with an SGLang body; `sampling` are its sampling_params."""
        return self.post("/generate", {"text": text, "rid": rid, "sampling_params": sampling})

    def open_request(self, path: str, body: Any = None) -> socket.socket:
        """Send a request on a bare socket and hand that back, so that the test decides when its client is
        gone. A GET without a body, else a POST."""
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = socket.create_connection((self.host, self.port), WAIT_DEADLINE)
        connection.sendall(head.encode() + data)
        return connection

    def counts(self) -> dict[str, Any]:
        """The witness: what the server saw. See `dispatch/engines/embedded/witness.py`."""
        return dict(self.get("/counts").raise_for_status().json())

    def loads(self) -> dict[str, Any]:
        return dict(self.get("/v1/loads").raise_for_status().json())

    def faults(self, kind: str, **options: Any) -> None:
        """Arm one fault (the engine needs `--faults`)."""
        self.post("/faults", {"kind": kind, **options}).raise_for_status()

    def clear_faults(self) -> None:
        self.client.delete(self.url + "/faults").raise_for_status()

    def wait_counts(self, deadline: float = WAIT_DEADLINE, **expected: int) -> dict[str, Any]:
        """Poll until the named counts have these values; the counts then."""
        seen: dict[str, Any] = {}

        def reached() -> bool:
            seen.update(self.counts())
            return all(seen[name] == value for name, value in expected.items())

        wait_until(reached, f"counts {expected}", deadline)
        return seen

    def stderr(self) -> str:
        """All that the process has written to stderr so far."""
        # pread: the child shares this descriptor's offset, so seeking here would move where it writes.
        descriptor = self._stderr.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, deadline: float = STOP_DEADLINE) -> int:
        """The exit status once the process has ended."""
        return self.process.wait(deadline)

    def stop(self, deadline: float = STOP_DEADLINE) -> int:
        """Ask it to end (SIGTERM), wait, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(deadline)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_DEADLINE)

    def close(self) -> None:
        """Leave no process, pipe or temporary file. A stopped (SIGSTOP) process dies here too."""
        if self.process.poll() is None:
            self.kill()  # first: a test's threads may still wait for an answer
        self.client.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
