"""engines: inference servers as processes that are started, checked, and never left behind.

An engine (SGLang, vLLM, any server with their HTTP interface) is somebody else's program: it
ignores TERM, forks, freezes, and answers /health while it generates nothing. Here it gets a guard
that ends everything below it (`guard`, `process`), a supervisor that holds its resources in Ray and
takes it through its start (`supervisor`, `probe`, `ports`), and a fleet that restarts what goes down
and knows at each moment which engines may be used (`fleet`, `keeper`). The embedded engine in
`embedded` is a real server without a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.engines.fleet import EngineFleet
    from dispatch.engines.keeping.supervisor import EngineSupervisor
    from dispatch.engines.spec import EngineSpec, EngineStatus, embedded_spec

__all__ = ["EngineFleet", "EngineSpec", "EngineStatus", "EngineSupervisor", "embedded_spec"]

_HOME = {
    "EngineFleet": "fleet",
    "EngineSpec": "spec",
    "EngineStatus": "spec",
    "EngineSupervisor": "keeping.supervisor",
    "embedded_spec": "spec",
}


def __getattr__(name: str) -> object:
    # Lazy (PEP 562): the embedded engine is a module of this room, and must not wait for Ray's import.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
