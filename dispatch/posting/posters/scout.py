"""The scout: which nodes of the cluster are alive, and which of them are about to go.

``ray.nodes()`` asks the GCS and blocks the calling thread until it answers, however long that takes.
So a tiny actor asks, and the caller awaits the actor with a deadline: while the GCS is away only the
actor hangs. What that leaves on the caller's loop does not block (measured with Ray 2.60, the GCS
stopped): a call to an actor, creating one of a class that was created before, and ``ray.kill``. The
first look of a process exports the actor's class through the GCS and blocks like that, so it belongs
into a start.

Ray itself bears no longer absence: after 60 seconds without a GCS (RAY_gcs_rpc_server_reconnect_timeout_s)
it ends the driver's process and all raylets. A GCS that was restarted without lasting tables refuses this
driver for good ("WrongClusterID"): its actors go on, and none can be made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import psutil
import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dispatch.posting.posters.session import Session
from dispatch.processes import see_gone
from dispatch.roles.policy import Role, options_for

PATIENCE: Final = 30.0
"""Seconds after which an actor that does not answer is replaced. It may only be waiting for the GCS; but
a GCS that lost its tables also lost the actor, and then nothing else would ever end the call."""
MISSES: Final = 2
"""Looks in a row that must miss a node before it counts as gone: a GCS that has just been restarted may
not have heard of every node yet."""


class Node(msgspec.Struct, frozen=True):
    """An alive node. ``draining``: Ray is about to take it away and schedules nothing there any more."""

    id: str
    host: str
    draining: bool = False


class Nodes(msgspec.Struct, frozen=True):
    """The alive nodes, in a stable order."""

    alive: tuple[Node, ...] = ()

    @property
    def open(self) -> tuple[str, ...]:
        """Ids of the nodes that take posters."""
        return tuple(node.id for node in self.alive if not node.draining)


class Change(msgspec.Struct, frozen=True):
    """What is new: nodes that ``joined`` (one may be draining already), that ``left``, that began
    ``draining``; and how it stands now."""

    nodes: Nodes
    joined: tuple[Node, ...] = ()
    left: tuple[Node, ...] = ()
    draining: tuple[Node, ...] = ()


class View:
    """What is held to be true, from looks that may be wrong: a node is gone after `MISSES` looks in a
    row without it, and one that drains does so until it is gone, since Ray takes no drain back."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        self._nodes = {node.id: node for node in nodes.alive} if nodes is not None else {}
        self._misses: dict[str, int] = {}

    @property
    def nodes(self) -> Nodes:
        return _in_order(self._nodes.values())

    def see(self, seen: Nodes) -> Change | None:
        """Take in one look; what it changes, if anything."""
        joined: list[Node] = []
        left: list[Node] = []
        draining: list[Node] = []
        for node in seen.alive:
            self._misses.pop(node.id, None)
            before = self._nodes.get(node.id)
            if before is None:
                joined.append(node)
            elif node.draining and not before.draining:
                draining.append(node)
            elif before.draining:
                continue
            self._nodes[node.id] = node
        for id in self._nodes.keys() - {node.id for node in seen.alive}:
            self._misses[id] = self._misses.get(id, 0) + 1
            if self._misses[id] >= MISSES:
                del self._misses[id]
                left.append(self._nodes.pop(id))
        if not (joined or left or draining):
            return None
        return Change(self.nodes, tuple(joined), _in_order(left).alive, tuple(draining))


class Sight(msgspec.Struct, frozen=True):
    """What the actor answers: what it sees, and who it is. The pid counts only with its start time."""

    nodes: Nodes
    pid: int
    create_time: float


class Eye:
    """The actor. It holds nothing, so that a lost one is replaced by making another."""

    async def look(self) -> Sight:
        """Ask the GCS. This blocks the actor's loop on purpose: nothing else runs there."""
        answer: Any = ray.nodes()  # type: ignore[no-untyped-call]  # Ray gives it no types
        going = draining_nodes()
        alive = [
            Node(one["NodeID"], one["NodeManagerAddress"], one["NodeID"] in going)
            for one in answer
            if one["Alive"]
        ]
        return Sight(_in_order(alive), os.getpid(), psutil.Process().create_time())


class Scout:
    """Learns what the cluster is without ever blocking the event loop. Make it where Ray is initialised,
    use it from one loop, and `close` it."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._session = Session()
        self._call: asyncio.Task[Sight | Exception] | None = None
        self._since = 0.0  # when the call was made, in loop time
        self._sight: Sight | None = None  # the present actor's last answer
        self._closed = False

    async def look(self, timeout: float) -> Nodes | None:
        """The alive nodes as they are now, or None when that cannot be learned within ``timeout``
        seconds: then the caller keeps what it has."""
        try:
            async with asyncio.timeout(timeout):
                return await self._look()
        except TimeoutError:
            return None

    async def watch(
        self, interval: float, timeout: float, known: Nodes | None = None
    ) -> AsyncIterator[Change]:
        """Look every ``interval`` seconds, each time for at most ``timeout``, and yield what changes
        from ``known`` on; without it the first change is that all nodes join. Ends after `close`."""
        loop = asyncio.get_running_loop()
        view = View(known)
        while not self._closed:
            due = loop.time() + interval
            seen = await self.look(timeout)
            change = view.see(seen) if seen is not None else None
            if change is not None:
                yield change
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def close(self) -> None:
        """Leave no actor. Idempotent."""
        self._closed = True
        sight = self._sight
        self._drop()
        if sight is None:
            return
        # The kill goes through the GCS, which may be away; the actor runs on this node.
        await see_gone(sight.pid, sight.create_time)

    async def _look(self) -> Nodes | None:
        for _ in range(2):  # the second time with a new actor, when the old one turns out to be dead
            # Without this check Ray would start a new cluster of its own accord.
            if self._closed or self._session.ended() is not None:
                return None
            try:
                call = self._ask()
            except Exception:  # noqa: BLE001 - whatever Ray has against an actor now, it cannot be learned
                return None
            await asyncio.wait({call})  # leaves the call alone when the time is up
            if call.cancelled():
                return None
            answer = call.result()
            if isinstance(answer, RayTaskError):
                return None  # the actor lives, and the GCS did not tell it
            if isinstance(answer, Exception):
                if self._call is call:
                    self._drop()
                continue
            self._sight = answer
            own = self._session.node
            # Without this process's own node the list is no news: either the GCS has not yet heard from
            # the nodes again, or the own raylet is dead, and with it everything that this process owns.
            return answer.nodes if any(node.id == own for node in answer.nodes.alive) else None
        return None

    def _ask(self) -> asyncio.Task[Sight | Exception]:
        """The call under way, or a new one. Never a second beside it: while the GCS is away they would
        only queue up. Nor one that has ended before: what it tells may be old."""
        loop = asyncio.get_running_loop()
        if self._call is not None and not self._call.done():
            if loop.time() - self._since < PATIENCE:
                return self._call
            self._drop()
        if self._actor is None:
            here = self._session.node
            # Not soft: without resources to ask for, Ray places a soft one on any node for as long as a node
            # that has just joined does not know the others, and there it would keep a drain from ending.
            where = NodeAffinitySchedulingStrategy(here, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": where, **options_for(Role.OWNER)}
            self._actor = _actor_class().options(**options).remote()
        self._since = loop.time()
        self._call = asyncio.create_task(_answer(self._actor))
        return self._call

    def _drop(self) -> None:
        """Give the actor up."""
        if self._call is not None:
            self._call.cancel()
        if self._actor is not None and self._session.ended() is None:
            with contextlib.suppress(Exception):  # Ray refuses to kill what it does not know
                ray.kill(self._actor, no_restart=True)
        self._actor = self._call = self._sight = None


async def _answer(actor: Any) -> Sight | Exception:
    try:
        sight: Sight = await actor.look.remote()
    except Exception as exc:  # noqa: BLE001 - Ray raises a bare Exception for an actor that it does not know
        return exc  # as a value: nobody may be waiting for it any more
    return sight


@functools.cache
def _actor_class() -> Any:
    """One for the process: each new one is exported through the GCS, which blocks while that is away."""
    remote: Any = ray.remote
    return remote(Eye)


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray drains; none where this Ray does not tell. Blocks like ``ray.nodes()``."""
    try:
        from ray._private.state import state
    except ImportError:
        return frozenset()
    ask = getattr(state, "get_draining_nodes", None)
    return frozenset(ask()) if ask is not None else frozenset()


def _in_order(nodes: Any) -> Nodes:
    return Nodes(tuple(sorted(nodes, key=lambda node: node.id)))
