"""A real SGLang on the CPU, killed part by part. Run by ``make test-sglang``: minutes, 3 GB of memory."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import psutil
import pytest

from dispatch.engines import EngineSpec, EngineStatus
from tests.dispatch.engines.processes import Tag
from tests.real_engines.killing import Case, Killer
from tests.real_engines.parts import Parts
from tests.real_engines.places import HERE, environment_of, tiny_model

BODY = {"text": "w1 w2 w3", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}


def spec_of(folder: Path, model: Path, cache: Path, tag: Tag) -> EngineSpec:
    command = [
        *(str(folder / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "{host}", "--port", "{port}", "--device", "cpu", "--dtype", "float32"),
        *(
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
            "--grammar-backend",
            "none",
        ),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--enable-metrics"),
        *("--context-length", "2048", "--max-total-tokens", "16384", "--max-running-requests", "16"),
        *("--mem-fraction-static", "0.3", "--grammar-backend", "none"),
    ]
    return EngineSpec(
        command=tuple(command),
        env={
            **tag.env,
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE / "sglang_stand_ins"),
            "XDG_CACHE_HOME": str(cache),
        },
        start_timeout=600,
        canary_timeout=20,
        canary_interval=1,
        health_timeout=10,
        health_failures=2,
        probe_interval=0.5,
    )


async def half_healthy(status: EngineStatus) -> None:
    """What does not ask the scheduler goes on answering."""
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        for path in ("/model_info", "/v1/loads", "/metrics"):
            assert (await client.get(status.url + path)).status_code == 200


@pytest.mark.sglang
async def test_sglang(tag: Tag, tmp_path: Path) -> None:
    folder = environment_of("sglang")
    others = [name for name in psutil.net_if_addrs() if name != "lo"]
    assert not others, (
        f"SGLang's scheduler listens on all interfaces, and here are {others}: use make test-sglang"
    )
    model = tiny_model(tmp_path / "model", folder / "bin" / "python")
    spec = spec_of(folder, model, tmp_path / "cache", tag)
    killer = Killer(spec, Parts(folder), "/generate", BODY)
    await killer.run(
        [
            Case("", signal.SIGKILL),
            Case("sglang::scheduler", signal.SIGKILL),
            Case("sglang::detokenizer", signal.SIGKILL),
            Case("sglang::scheduler", signal.SIGSTOP, look=half_healthy),
            Case("guard", signal.SIGKILL),
        ]
    )
