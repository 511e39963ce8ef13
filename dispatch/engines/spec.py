"""What an engine is (`EngineSpec`), how it stands (`EngineStatus`), how it ended (`ExitReport`,
`StopReport`): values, nothing that runs."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from protocol import CodedError

Api = Literal["sglang", "openai"]
State = Literal["starting", "canary", "ready", "suspect", "quarantined", "draining", "stopping", "dead"]
"""Only ``ready`` is routable. ``canary``: it answers, and has to show that it generates; ``suspect``: its
last check failed; ``quarantined``: alive but not allowed to serve; ``draining``: ends what it has begun;
``stopping``: being ended, or seen to have ended and being cleared away; ``dead``: nothing of it is left."""

KEY_NAMES: Final = ("FAILSOFT_KEY",)
"""Beginnings of the names of environment variables that hold our keys. They never enter an engine's
environment: what an engine can read, a model's tool call can read too."""
LOG_BYTES: Final = 64 * 1024 * 1024
LOG_FILES: Final = 3
LOG_STARTS: Final = 10
"""How large a file of an engine's output becomes, in bytes, how many of them one start keeps, and of how
many starts they are kept."""
_PORT_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_PORT_PLACE: Final = re.compile(r"\{port\.([^{}\s]*)\}")
_LEAST: Final = 0.0001
"""The smallest amount of a resource that Ray counts."""
_OTHERWISE: Final = {
    "CPU": "is num_cpus",
    "GPU": "is num_gpus",
    "memory": "is not to be had here",
    "object_store_memory": "is not to be had here",
}
"""Names that Ray does not take among ``resources``."""

_POSITIVE: Final = (
    *("start_timeout", "health_timeout", "canary_timeout", "kill_timeout"),
    *("probe_interval", "supervisor_timeout"),
)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its command and its deadlines. Times are seconds.

    ``command`` is argv; ``{port}`` and ``{host}`` are replaced in it (and in ``env``'s values), every
    other brace is left alone, since engines take JSON arguments. ``ports`` names further ports that
    the engine binds, for instance ``("nccl",)`` for ``{port.nccl}``: reserved together with the first,
    so that engines started at once cannot collide on any (verl#6448). The engine must stay in the
    foreground: a first process that ends counts as the engine's exit. ``env`` is added to the
    supervisor's environment, which keeps CUDA_VISIBLE_DEVICES as Ray set it.

    ``start_timeout`` bounds the whole start, port retries included. A running engine is out of use from
    the first failed check on, and replaced after ``health_failures`` of them in a row: ``/health`` every
    ``probe_interval``, and every ``canary_interval`` (0: never) proof of progress, since ``/health`` answers
    200 while a stopped worker generates nothing (vllm#39863). Progress is a counter of tokens that moves
    (``metrics_path``, where the engine has one), else a generation within ``canary_timeout``.

    ``drain_timeout`` is how long a drain waits for work that was begun, ``supervisor_timeout`` how long a
    supervisor may be silent before it is replaced together with its engine.

    With ``log_dir`` the engine's output goes to files there, one start's to at most ``log_files`` of
    at most ``log_bytes`` each, of which the one without a number is the newest; those of the last
    ``log_starts`` starts are kept. With ``private_tmp``, and unless ``env`` sets TMPDIR, each start gets a
    temporary directory of its own, which is removed after its end.

    Raises CodedError CONFIG.INVALID, one line, for values that cannot work.
    """

    command: tuple[str, ...]
    api: Api = "sglang"
    host: str = "127.0.0.1"
    env: dict[str, str] = {}
    cwd: str | None = None
    model: str = ""
    start_timeout: float = 120.0
    health_timeout: float = 2.0
    health_failures: int = 3
    canary_timeout: float = 10.0
    canary_interval: float = 10.0
    term_timeout: float = 5.0
    kill_timeout: float = 5.0
    probe_interval: float = 0.25
    metrics_path: str = "/metrics"
    drain_timeout: float = 30.0
    supervisor_timeout: float = 10.0
    num_cpus: float = 0.01
    num_gpus: float = 0.0
    resources: dict[str, float] = {}
    log_dir: str | None = None
    log_bytes: int = LOG_BYTES
    log_files: int = LOG_FILES
    log_starts: int = LOG_STARTS
    ports: tuple[str, ...] = ()
    private_tmp: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command or not all(_is_text(a) for a in self.command):
            raise _invalid("command", self.command, 'is argv, for instance ("vllm", "serve", …, "{port}")')
        if not isinstance(self.env, Mapping) or not all(
            _is_text(k) and _is_text(v) for k, v in self.env.items()
        ):
            raise _invalid("env", self.env, "maps names to texts")
        for name in self.env:
            if not name or "=" in name:
                raise _invalid("env", name, 'maps names without "=" to texts')
            if name.upper().startswith(KEY_NAMES):
                raise _invalid("env", name, "holds a key of ours, which no engine may see")
        if not any("{port}" in text for text in (*self.command, *self.env.values())):
            raise _invalid("command", " ".join(self.command), 'must say where the port goes: "{port}"')
        self._check_ports()
        if self.api not in ("sglang", "openai"):
            raise _invalid("api", self.api, 'is "sglang" or "openai"')
        if not _is_text(self.host) or not self.host:
            raise _invalid("host", self.host, "is the address that the engine binds")
        for name in _POSITIVE:
            self._number(name, "is seconds, more than 0", above=0.0)
        for name in ("term_timeout", "canary_interval", "drain_timeout"):
            self._number(name, "is seconds, 0 or more")
        for name in ("cwd", "log_dir"):
            path = getattr(self, name)
            if path is not None and not (isinstance(path, os.PathLike) or _is_text(path)):
                raise _invalid(name, path, "is the path of a folder")
        if not _is_text(self.metrics_path) or self.metrics_path[:1] not in ("", "/"):
            raise _invalid("metrics_path", self.metrics_path, 'is a path that begins with "/", or ""')
        self._check_resources()
        for name, least in (
            ("health_failures", 1),
            ("log_bytes", 65536),
            ("log_files", 1),
            ("log_starts", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise _invalid(name, value, f"is a whole number, {least} or more")

    def _check_ports(self) -> None:
        if not isinstance(self.ports, tuple | list) or not all(
            _is_text(name) and _PORT_NAME.fullmatch(name) and name != "port" for name in self.ports
        ):
            raise _invalid("ports", self.ports, 'is names of letters and digits, none of them "port"')
        texts = (*self.command, *self.env.values())
        placed = {name for text in texts for name in _PORT_PLACE.findall(text)}
        for name in sorted(placed - set(self.ports)):
            raise _invalid("ports", self.ports, f'must name "{name}", since {{port.{name}}} is used')
        for name in self.ports:
            if name not in placed:
                raise _invalid("ports", name, f"is used nowhere: write {{port.{name}}} in command or env")
        if len(set(self.ports)) < len(self.ports):
            raise _invalid("ports", self.ports, "names each port once")

    def _check_resources(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            if not _is_amount(getattr(self, name)):
                raise _invalid(name, getattr(self, name), f"is 0, or a number from {_LEAST} on")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise _invalid("num_gpus", self.num_gpus, "is a whole number where it is above 1")
        if not isinstance(self.resources, Mapping) or not all(map(_is_amount, self.resources.values())):
            raise _invalid("resources", self.resources, f"maps names to 0 or numbers from {_LEAST} on")
        for name in self.resources:
            if not _is_text(name) or not name:  # one without a name ends the driver: Ray aborts
                raise _invalid("resources", name, "maps names to numbers")
            if name in _OTHERWISE:
                raise _invalid("resources", name, f"holds custom resources alone ({name} {_OTHERWISE[name]})")

    def _number(self, name: str, rule: str, above: float | None = None) -> None:
        value = getattr(self, name)
        if not _is_number(value) or (above is not None and value <= above):
            raise _invalid(name, value, rule)

    def argv(self, ports: Mapping[str, int]) -> tuple[str, ...]:
        """The command for ``ports``: the number of ``port`` and of each name in `ports`."""
        return tuple(self._fill(text, ports) for text in self.command)

    def environment(self, ports: Mapping[str, int]) -> dict[str, str]:
        """``env`` for ``ports``."""
        return {name: self._fill(text, ports) for name, text in self.env.items()}

    def url(self, port: int) -> str:
        """Where clients reach the engine, without a slash at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

    def _fill(self, text: str, ports: Mapping[str, int]) -> str:
        text = text.replace("{port}", str(ports["port"])).replace("{host}", self.host)
        return _PORT_PLACE.sub(lambda found: str(ports[found[1]]), text)


class ExitReport(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine ended. One of ``status`` and ``signal`` is set, neither when the guard was
    killed and could not say. ``planned``: after a `stop`. ``seconds`` is how long it ran. ``oom`` is
    the evidence, in words, that the kernel's out-of-memory killer did it; empty when there is none.
    ``failure`` is what it left in its error file (`protocol.carriers.error_file`): code, id, detail, data,
    origin and chain; None when there is none, or no well-formed one."""

    status: int | None = None
    signal: int | None = None
    planned: bool = False
    guard_lost: bool = False
    seconds: float = 0.0
    last_lines: tuple[str, ...] = ()
    oom: str = ""
    failure: dict[str, Any] | None = None

    @property
    def how(self) -> str:
        """In words: ``exit status 1``, ``signal 9 (SIGKILL)``, and the evidence of `oom`."""
        if self.signal is not None:
            known = self.signal in set(signal.Signals)
            text = f"signal {self.signal}" + (f" ({signal.Signals(self.signal).name})" if known else "")
        elif self.status is not None:
            text = f"exit status {self.status}"
        else:
            text = "killed together with its guard"
        return f"{text}; {self.oom}" if self.oom else text


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine stands. ``since`` is when it came into this state, and ``create_time`` when
    its process began, both in unix seconds; ``stage`` says how far a start has come; ``code`` and
    ``detail`` are those of its last failure. ``supervisor_pid`` is the actor's process, on the host ``node``
    (Ray's ``node_id``) as the engine's. ``restarts`` counts what came after the first start.
    ``weight_version`` is the engine's own word, None when it has none. ``held``: why it is paused on
    purpose, "" when it is not: it takes no new work then, and is not asked for any. ``exit`` is how its
    last life ended."""

    key: str
    url: str = ""
    state: State = "starting"
    pid: int = 0
    create_time: float = 0.0
    node: str = ""
    node_id: str = ""
    supervisor_pid: int = 0
    supervisor_create_time: float = 0.0
    weight_version: str | None = None
    restarts: int = 0
    since: float = 0.0
    stage: str = ""
    code: str = ""
    detail: str = ""
    held: str = ""
    exit: ExitReport | None = None

    @property
    def routable(self) -> bool:
        """Whether it may be sent new work."""
        return self.state == "ready" and not self.held


class StopReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a stop did: seconds in each stage, in this order and as far as they applied: ``term``,
    ``kill``, ``confirm``, ``gpu``, ``ports``, ``shm``, ``tmp``. ``gpu`` says what was seen of the GPUs,
    or why nothing could be."""

    stages: dict[str, float] = {}
    exit: ExitReport | None = None
    gpu: str = ""


def embedded_spec(
    *,
    token_rate: float | None = None,
    start_delay: float | None = None,
    arguments: tuple[str, ...] = (),
    **fields: Any,
) -> EngineSpec:
    """The embedded engine as a spec: a real server with no GPU, for examples, tests and chaos runs.

    ``token_rate`` is tokens a second, ``start_delay`` seconds before it binds, ``arguments`` more of
    its own flags, ``fields`` those of `EngineSpec`, for instance ``api="openai"``."""
    command = [sys.executable, "-m", "dispatch.engines.embedded", "--port", "{port}"]
    if token_rate is not None:
        command += ["--token-rate", f"{token_rate:g}"]
    if start_delay is not None:
        command += ["--start-delay", f"{start_delay:g}"]
    fields.setdefault("start_timeout", 30.0)
    fields.setdefault("model", "embedded")
    return EngineSpec(command=(*command, *arguments), **fields)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float holds, 0 or more."""
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


def _is_amount(value: Any) -> bool:
    return _is_number(value) and (value == 0 or value >= _LEAST)


def _invalid(name: str, value: object, rule: str) -> CodedError:
    return CodedError("CONFIG.INVALID", f"engine spec: {name} {rule}, not {value!r:.200}", {"field": name})
