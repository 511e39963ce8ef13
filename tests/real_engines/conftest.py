from __future__ import annotations

from pathlib import Path

import pytest

from tests.dispatch.engines.conftest import events, tag
from tests.real_engines.places import tiny_gguf

__all__ = ["events", "tag"]


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for llama.cpp that makes thousands of tokens a second."""
    return tiny_gguf(tmp_path_factory.mktemp("models") / "quick.gguf")


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with which a request of 2,000 tokens takes many seconds."""
    return tiny_gguf(tmp_path_factory.mktemp("models") / "slow.gguf", "--hidden", "512", "--layers", "8")
