"""roles: who is restarted, by whom, and when.

A restarted actor is a new one under an old name: its constructor has run again, and whatever it had is gone.
For an actor that has nothing that does not matter, and Ray may restart it at any time (`policy`). The ranks
of a training group have everything in common, so one of them alone is never restarted: the group fails as a
whole, and is restarted as a whole, by an explicit call, under a new epoch (`group`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.roles.epoch import Limits
    from dispatch.roles.group import TrainingGroup
    from dispatch.roles.policy import Role, options_for
    from dispatch.roles.rank import Rendezvous
    from dispatch.roles.states import State

__all__ = ["Limits", "Rendezvous", "Role", "State", "TrainingGroup", "options_for"]

_HOME = {
    "Limits": "epoch",
    "Rendezvous": "rank",
    "Role": "policy",
    "State": "states",
    "TrainingGroup": "group",
    "options_for": "policy",
}


def __getattr__(name: str) -> object:
    # Lazy (PEP 562): who only asks for a role's options does not pay for Ray's import.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
