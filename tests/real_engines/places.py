"""Where the real engines of the tests are, and their specs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dispatch.engines import EngineSpec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVERS = Path(sys.prefix) / "engines"
"""llama.cpp's server and sglang-router, with what they import; made by ``make test``."""


def with_servers() -> dict[str, str]:
    """The environment of a program that imports from `SERVERS`. Their absence fails the test, for a
    skipped check is no check."""
    if not (SERVERS / ".installed").exists():
        made = SERVERS.relative_to(ROOT) if SERVERS.is_relative_to(ROOT) else SERVERS
        pytest.fail(
            f"llama.cpp and sglang-router are not installed; run: make {made}/.installed", pytrace=False
        )
    return {"PYTHONPATH": str(SERVERS), "OMP_NUM_THREADS": "1"}


def environment_of(engine: str) -> Path:
    """The folder that ``make test-vllm`` or ``make test-sglang`` has filled."""
    folder = ROOT / f".venv-{engine}"
    if not (folder / ".installed").exists():
        pytest.fail(f"{engine} is not installed; run: make test-{engine}", pytrace=False)
    return folder.resolve()


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def tiny_gguf(path: Path, *flags: str) -> Path:
    """Make a model for llama.cpp."""
    script = str(HERE / "tiny_gguf.py")
    subprocess.run(
        [sys.executable, script, path, *flags], env={**os.environ, **with_servers()}, timeout=50, check=True
    )
    return path


def tiny_model(path: Path, python: Path) -> Path:
    """Make a model for vLLM and SGLang, with the Python of either's environment."""
    script = str(HERE / "tiny_model.py")
    subprocess.run([python, script, path], env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=120, check=True)
    return path


def llama_spec(model: Path, env: dict[str, str], **fields: Any) -> EngineSpec:
    """llama.cpp's server on ``model``, with deadlines short enough for a test."""
    defaults: dict[str, Any] = {
        "start_timeout": 40.0,
        "canary_timeout": 5.0,
        "term_timeout": 1.0,
        "health_timeout": 1.0,
        "probe_interval": 0.1,
    }
    command = (
        sys.executable,
        str(HERE / "llama_server.py"),
        str(model),
        "--host",
        "{host}",
        "--port",
        "{port}",
    )
    return EngineSpec(command=command, api="openai", env={**with_servers(), **env}, **{**defaults, **fields})
