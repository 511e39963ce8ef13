"""Placement: the bundles that a training group's ranks run in, made, had and removed for certain.

Ray's functions for placement groups ask the GCS and block their caller until it answers, so they run in
tasks, which are awaited with a deadline like everything else. A placement group that a task made belongs to
the job: it goes when the driver does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayError

from dispatch.engines.keeping.calls import call
from dispatch.tasks import task_of
from protocol import CodedError

ASK: Final = 15.0
"""Seconds for one question to the GCS, the start of a worker that asks it included."""
REMOVE: Final = 10.0
"""Seconds within which a removed placement group must be known to be gone."""


class Placement:
    """One placement group: a bundle a rank. ``group`` is Ray's, once there is one."""

    def __init__(self, name: str, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        self._prefix = name
        self._name = ""
        self._bundles = [dict(bundle) for bundle in bundles]
        self._strategy = strategy
        self._making: Any = None
        self.group: Any = None

    async def have(self, timeout: float) -> Any:
        """The placement group, with all of its bundles on nodes. The one that there is, if it is still
        there; bundles of a node that died are placed anew by Ray.

        Raises CodedError after ``timeout`` seconds, naming the resources: TASK.UNSCHEDULABLE where no node
        could ever have them, TIMEOUT.DEADLINE where others have them."""
        if not ray.is_initialized():
            raise CodedError("POOL.MISUSE", "a training group needs Ray: call ray.init() first")
        end = time.monotonic() + timeout
        if self.group is not None and (await self._ask(_state))[0] == "REMOVED":
            self.group = None
        if self.group is None:
            self._name = f"{self._prefix}.{secrets.token_hex(4)}"  # Ray takes a name once
            self._making = task_of(_make).remote(self._name, self._bundles, self._strategy)
            self.group = await call(
                self._making, min(ASK, timeout), "TIMEOUT.DEADLINE", f"{self._name}: not made"
            )
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                await self.group.ready()
        except TimeoutError:
            raise await self._not_had(timeout) from None
        except RayError as exc:
            raise CodedError.from_exception(exc, "TASK.UNSCHEDULABLE") from exc
        return self.group

    async def remove(self) -> None:
        """Remove it, and see that it is gone. Idempotent; nothing is left to do once Ray was shut down.
        Raises CodedError TIMEOUT.DEADLINE where it is still there."""
        if self._making is None or not ray.is_initialized():
            return
        # One that is being made still must be there before it can be removed.
        await asyncio.wait({asyncio.ensure_future(_settled(self._making))}, timeout=ASK)
        state, _ = await self._ask(_remove)
        if state != "REMOVED":
            raise CodedError("TIMEOUT.DEADLINE", f"placement group {self._name} is still {state}")
        self.group = self._making = None

    async def _not_had(self, timeout: float) -> CodedError:
        state, scheduling = await self._ask(_state)
        wanted = ", ".join(_words(bundle) for bundle in self._bundles)
        total, free = await call(
            task_of(_resources).remote(), ASK, "TIMEOUT.DEADLINE", "the cluster's resources are not known"
        )
        facts = {"bundles": self._bundles, "total": total, "free": free, "state": state}
        return CodedError(
            "TASK.UNSCHEDULABLE" if scheduling == "INFEASIBLE" else "TIMEOUT.DEADLINE",
            f"placement group {self._name} ({self._strategy}) was not placed within {timeout:g} s ({state}, "
            f"{scheduling}): wants {wanted}; the cluster has {_words(total)}, free {_words(free)}",
            facts,
        )

    async def _ask(self, question: Callable[[str], tuple[str, str]]) -> tuple[str, str]:
        late = f"placement group {self._name}: no answer from the GCS"
        found: tuple[str, str] = await call(
            task_of(question).remote(self._name), REMOVE + ASK, "TIMEOUT.DEADLINE", late
        )
        return found


async def _settled(ref: Any) -> None:
    try:
        await ref
    except RayError:
        return  # it was not made: nothing to remove


def _make(name: str, bundles: list[dict[str, float]], strategy: str) -> Any:
    return ray.util.placement_group(bundles, strategy=strategy, name=name)


def _state(name: str) -> tuple[str, str]:
    """State and scheduling state of the placement group ``name``; REMOVED where there is none."""
    rows: dict[str, Any] = ray.util.placement_group_table()
    for row in rows.values():
        if row["name"] == name and row["state"] != "REMOVED":
            return str(row["state"]), str(row["stats"]["scheduling_state"])
    return "REMOVED", ""


def _remove(name: str) -> tuple[str, str]:
    rows: dict[str, Any] = ray.util.placement_group_table()
    for row in rows.values():
        if row["name"] == name and row["state"] != "REMOVED":
            ray.util.remove_placement_group(ray.util.get_placement_group(name))
    end = time.monotonic() + REMOVE
    while (state := _state(name))[0] != "REMOVED" and time.monotonic() < end:
        time.sleep(0.02)
    return state


def _resources() -> tuple[dict[str, float], dict[str, float]]:
    total, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]  # Ray gives them no types
    return _plain(total), _plain(free)


def _plain(resources: Mapping[str, Any]) -> dict[str, float]:
    # Without what every node has of its own: its address, and the bundles' shadows.
    left_out = ("node:", "memory", "object_store_memory")
    return {
        name: float(amount)
        for name, amount in sorted(resources.items())
        if not name.startswith(left_out) and "_group_" not in name
    }


def _words(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"
