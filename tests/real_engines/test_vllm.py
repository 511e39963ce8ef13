"""A real vLLM on the CPU, killed part by part. Run by ``make test-vllm``: minutes, 3 GB of memory."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from dispatch.engines import EngineSpec, EngineStatus
from tests.dispatch.engines.processes import Tag
from tests.real_engines.killing import Case, Killer
from tests.real_engines.parts import Parts
from tests.real_engines.places import environment_of, tiny_model

BODY = {"model": "tiny", "prompt": "w1 w2 w3", "max_tokens": 1900, "ignore_eos": True, "n": 8}


def spec_of(folder: Path, model: Path, cache: Path, tag: Tag) -> EngineSpec:
    command = [
        *(str(folder / "bin" / "vllm"), "serve", str(model), "--served-model-name", "tiny"),
        *("--host", "{host}", "--port", "{port}", "--dtype", "float32", "--max-model-len", "2048"),
        *("--max-num-seqs", "16", "--enforce-eager"),
    ]
    return EngineSpec(
        command=tuple(command),
        api="openai",
        model="tiny",
        env={
            **tag.env,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",  # what its parts listen on for each other
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(cache),
        },
        start_timeout=600,
        canary_timeout=20,
        canary_interval=1,
        health_timeout=10,
        health_failures=2,
        probe_interval=0.5,
    )


async def still_healthy(status: EngineStatus) -> None:
    """The lie that the checks have to see through."""
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        for _ in range(3):
            assert (await client.get(f"{status.url}/health")).status_code == 200


@pytest.mark.vllm
async def test_vllm(tag: Tag, tmp_path: Path) -> None:
    folder = environment_of("vllm")
    model = tiny_model(tmp_path / "model", folder / "bin" / "python")
    spec = spec_of(folder, model, tmp_path / "cache", tag)
    killer = Killer(spec, Parts(folder), "/v1/completions", BODY)
    await killer.run(
        [
            Case("", signal.SIGKILL),
            Case("VLLM::EngineCore", signal.SIGKILL),
            Case("VLLM::Worker", signal.SIGKILL),
            Case("VLLM::EngineCore", signal.SIGSTOP, look=still_healthy),
            Case("guard", signal.SIGKILL),
        ]
    )
