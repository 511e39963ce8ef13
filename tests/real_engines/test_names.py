"""The names of faults' table of PyTorch and vLLM, compared with what the two really have."""

from __future__ import annotations

import json
import subprocess

import pytest

from faults.torch_faults import TORCH
from tests.real_engines.places import environment_of

# Run by the Python of vLLM's environment: the rows whose class is not there, and the exceptions of PyTorch's
# GPUs and ranks, each by its own name.
LOOK = """
import importlib, json, sys

def full(cls):
    return f"{cls.__module__}.{cls.__qualname__}"

def has(name):
    module, _, short = name.rpartition(".")
    cls = getattr(importlib.import_module(module), short, None)
    return isinstance(cls, type) and issubclass(cls, BaseException) and full(cls) == name

found = {
    full(one)
    for name in (
        "torch", "torch.cuda", "torch.distributed", "torch.multiprocessing.spawn",
        "torch.distributed.elastic.rendezvous.api",
        "torch.distributed.elastic.multiprocessing.errors",
    )
    for one in vars(importlib.import_module(name)).values()
    if isinstance(one, type) and issubclass(one, Exception) and one.__module__.startswith("torch")
}
print(json.dumps([[name for name in json.loads(sys.argv[1]) if not has(name)], sorted(found)]))
"""
OLDER = {"torch.cuda.OutOfMemoryError"}
OF_OTHER_THINGS = {"torch.FatalError", "torch.jit.Error"}


@pytest.mark.vllm
def test_every_row_and_every_class() -> None:
    python = environment_of("vllm") / "bin" / "python"
    done = subprocess.run(
        [python, "-W", "ignore", "-c", LOOK, json.dumps(sorted(TORCH))],
        capture_output=True,
        timeout=120,
        check=True,
    )
    absent, found = json.loads(done.stdout.splitlines()[-1])
    assert set(absent) == OLDER
    assert len(found) > 12
    assert set(found) - OF_OTHER_THINGS <= set(TORCH)
