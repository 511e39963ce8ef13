"""The stage: a cluster, a driver with five engines, and each of them brought into its state."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from dispatch.engines.embedded.ngram import packaged_corpus
from tests.engine_matrix.expected import SERVES, STATES, State
from tests.engine_matrix.traces import Process, Traces, look, process, remove_litter, tagged
from tests.support.wait import until_sync
from tests.support.witness import ROOT

ENDLESS = {"text": "One, two,", "sampling_params": {"max_new_tokens": 1 << 20, "ignore_eos": True}}
SHORT = {"text": "One, two,", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
START = 60.0
"""Seconds for Ray, and for a driver with five new engines."""


class Program:
    """A child that answers in JSON lines. They are read by a thread, as they come."""

    def __init__(self, log: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.process = process(self.popen.pid, command[0].rpartition(".")[2])
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with suppress(
                ValueError, TypeError
            ):  # Ray prints things of its own, also in the middle of a line
                self.lines.append(dict(json.loads(line)))

    def send(self, **order: Any) -> None:
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):  # whoever waits for the effect says that it is gone
            self.popen.stdin.write(json.dumps(order) + "\n")
            self.popen.stdin.flush()

    def answer(self, n: int, timeout: float = START) -> dict[str, Any]:
        """The ``n``-th line."""
        until_sync(lambda: len(self.lines) > n or self.popen.poll() is not None, timeout, str(self.log))
        assert len(self.lines) > n, f"{self.process.name} ended: {self.log.read_text()[-2000:]}"
        return self.lines[n]

    def close(self, timeout: float) -> None:
        """End of its input, then KILL."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with suppress(BrokenPipeError):
            self.popen.stdin.close()
        self.process.send(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout)
        self.popen.kill()
        self.popen.wait(10)
        self._reader.join(10)
        self.popen.stdout.close()


class Request:
    """A request that is in flight until its engine ends it."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.ended = False
        self._arguments = (url + path, body)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        url, body = self._arguments
        with suppress(httpx.HTTPError):
            httpx.post(url, json=body, timeout=120.0, trust_env=False)
        self.ended = True


class Struck:
    """One engine in its state, at the moment before the signal."""

    def __init__(self, stage: Stage, state: State, tag: str) -> None:
        self.stage = stage
        self.state = state
        self.tag = tag
        self.key = f"engine/{STATES.index(state)}"
        self.traces = self._look()
        self.requests: list[Request] = []
        self._disk: int | None = None  # the write end of the weights that an update waits for

    def _look(self) -> Traces:
        restarted = self.stage.seen[self.key].engine if self.state == "starting" else None
        found = self.stage.seen[self.key] = _there(self.tag, self.key, restarted)
        return found

    @property
    def supervisor(self) -> Process:
        pid = self.stage.last(self.key)["supervisor_pid"]
        return process(pid, "supervisor")

    def enter(self) -> None:
        """Bring the engine, which is ready or starting, into its state."""
        url = self.traces.url
        if self.state in ("generating", "draining"):
            self.requests = [Request(url, "/generate", ENDLESS) for _ in range(2)]
            until_sync(lambda: _ask(url, "/v1/loads")["num_running"] == 2, 10, f"{self.key} generates")
        if self.state == "updating":
            self.stage.driver.send(do="hold", key=self.key)
            until_sync(lambda: self.stage.last(self.key)["held"], 10, f"{self.key} is held")
            weights = self.stage.folder / f"weights-{secrets.token_hex(4)}"
            os.mkfifo(weights)  # a slow disk: the update has begun and cannot go on
            _post(url, "/pause_generation", {})
            self.requests = [Request(url, "/update_weights_from_disk", {"model_path": str(weights)})]
            until_sync(lambda: self._open(weights), 10, f"{self.key} updates")
        if self.state == "draining":
            self.stage.driver.send(do="drain", key=self.key)

    def _open(self, weights: Path) -> bool:
        with suppress(OSError):  # ENXIO until somebody reads
            self._disk = os.open(weights, os.O_WRONLY | os.O_NONBLOCK)
        return self._disk is not None

    def leave(self) -> None:
        """End what the engine is in, as its client would."""
        url = self.traces.url
        with suppress(httpx.HTTPError):  # it may be gone
            if self.state in ("generating", "draining"):
                _post(url, "/abort_request", {"abort_all": True})
            if self._disk is not None:
                with suppress(OSError), os.fdopen(self._disk, "wb") as file:
                    self._disk = None
                    file.write(packaged_corpus().read_bytes()[:4096])
                until_sync(lambda: all(one.ended for one in self.requests), 10, f"{self.key} is updated")
                _post(url, "/continue_generation", {})
                self.stage.driver.send(do="release", key=self.key)


class Stage:
    """What the rounds share. What a wrong cell has spoilt is made anew for the next round."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="failsoft-kills-"))
        self.seen: dict[str, Traces] = {}
        self.spoilt = False
        # A folder of Ray's own: the cluster's address is written there, where nobody else's Ray finds it.
        self._ray = Path(tempfile.mkdtemp(prefix="fm-"))
        env = {"RAY_TMPDIR": str(self._ray)}
        self._nodes = Program(self.folder / "nodes.log", "tests.engine_matrix.nodes", env=env)
        self._asked = 0
        first = self._nodes.answer(0)
        self._address = first["address"]
        self.raylet = process(first["raylet"], "raylet")
        self._tags: list[str] = []
        self.driver = self._start_driver()

    def _start_driver(self) -> Program:
        run = secrets.token_hex(4)
        self.seen.clear()
        self._tags = [f"{run}-{state}" for state in STATES]
        return Program(
            self.folder / "driver.log",
            "tests.engine_matrix.driver",
            self._address,
            ",".join(self._tags),
            env={"RAY_TMPDIR": str(self._ray)},
        )

    def last(self, key: str) -> dict[str, Any]:
        """What the driver said about an engine at last."""
        return next((line for line in reversed(self.driver.lines) if line["key"] == key), {})

    def ready(self) -> bool:
        return all(self.last(f"engine/{n}").get("state") == "ready" for n in range(len(STATES)))

    def set_up(self) -> None:
        """All engines are ready."""
        if self.spoilt:
            self.renew()
        for n in range(len(STATES)):  # those that a drain has ended
            if self.last(f"engine/{n}").get("state") == "dead":
                self.driver.send(do="restart", key=f"engine/{n}")
        with suppress(AssertionError):
            until_sync(lambda: self.ready() or self.driver.popen.poll() is not None, START)
        states = {f"engine/{n}": self.last(f"engine/{n}") for n in range(len(STATES))}
        assert self.ready(), f"not all engines are ready: {states}\n{self.driver.log.read_text()[-3000:]}"

    def bring(self) -> list[Struck]:
        """Engines that are ready, each into its state."""
        struck = {
            state: Struck(self, state, self._tags[n]) for n, state in enumerate(STATES) if state != "starting"
        }
        starting = STATES.index("starting")
        key = f"engine/{starting}"
        self.seen[key] = _there(self._tags[starting], key)
        self.driver.send(do="restart", key=key)
        struck["generating"].enter()
        struck["starting"] = Struck(self, "starting", self._tags[starting])
        for state in ("updating", "draining"):  # last, for these two end by themselves
            struck[state].enter()
        return [struck[state] for state in STATES]

    def another_node(self) -> None:
        """Room for the engines of the node that is going to die."""
        self._asked += 1
        self._nodes.send(do="add")
        self._spare = process(self._nodes.answer(self._asked)["raylet"], "raylet")

    def move(self) -> None:
        """The engines are where the room was; the old node is dead for certain."""
        self.raylet.send(signal.SIGKILL)
        self.raylet = self._spare

    def renew(self) -> None:
        """Another driver with new engines; nothing is left of the old ones."""
        self.end_driver()
        self.driver = self._start_driver()
        self.spoilt = False

    def end_driver(self) -> None:
        self.driver.close(0.0 if self.spoilt else 20.0)
        for tag in self._tags:
            for pid in tagged(tag):
                with suppress(ProcessLookupError):
                    process(pid, "left over").send(signal.SIGKILL)
        for traces in self.seen.values():
            traces.remove()
        remove_litter({line["pid"] for line in self.driver.lines})

    def close(self) -> None:
        self.end_driver()
        self._nodes.close(30.0)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._ray, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def generates(url: str) -> bool:
    """Whether the engine there serves a request."""
    try:
        reply = httpx.post(f"{url}/generate", json=SHORT, timeout=3.0, trust_env=False)
        return reply.status_code == 200 and reply.json()["meta_info"]["completion_tokens"] == 2
    except (httpx.HTTPError, LookupError, ValueError):
        return False


def _post(url: str, path: str, body: dict[str, Any]) -> None:
    httpx.post(url + path, json=body, timeout=5.0, trust_env=False).raise_for_status()


def _ask(url: str, path: str) -> dict[str, Any]:
    with suppress(httpx.HTTPError):
        return dict(httpx.get(url + path, timeout=2.0, trust_env=False).json())
    return {"num_running": -1}


def _there(tag: str, key: str, restarted: Process | None = None) -> Traces:
    """The engine with this tag, as soon as it tells what it has; not the one that is being replaced."""
    found: list[Traces] = []

    def there() -> bool:
        traces = look(tag)
        if traces is not None and traces.engine != restarted:
            found.append(traces)
        return bool(found)

    until_sync(there, SERVES, f"{key} runs")
    return found[0]
