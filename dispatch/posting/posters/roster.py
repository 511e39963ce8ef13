"""The roster: which posters a pool has, and who of them serves.

It follows the cluster: a node that joins gets posters, one that drains is left in peace once its work is
done, one that is gone loses them; and whenever a poster comes, goes or falters, the capacity is split anew.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from dispatch.posting.admission import Admission
from dispatch.posting.posters.keeper import Keeper
from dispatch.posting.posters.lane import Lane, State
from dispatch.posting.posters.local import LocalLane
from dispatch.posting.posters.scout import Change, Node, Scout
from dispatch.posting.posters.session import Session
from protocol import CodedError, Events

LOOK_EVERY: Final = 2.0
"""Seconds between two looks at the cluster."""
LOOK_TIMEOUT: Final = 5.0
DRAIN: Final = 30.0
"""Seconds that work on a draining node may take to end; what is left then is sent again elsewhere."""


class Roster:
    """See the module. ``make`` makes the keeper of a new poster from its key, its node and whom to tell of
    changes; ``local`` is the local client, None where it must not serve. ``remote`` is set while posters
    serve."""

    def __init__(
        self,
        posters_per_node: int,
        make: Callable[[str, str, Callable[[], None]], Keeper],
        admission: Admission[Lane],
        local: LocalLane | None,
        events: Events,
    ) -> None:
        self.keepers: list[Keeper] = []
        self.remote = asyncio.Event()
        self._posters_per_node = posters_per_node
        self._make = make
        self._admission = admission
        self._local = local
        self._events = events
        self._numbers = itertools.count()
        self._session = Session()
        self._scout = Scout()
        self._following: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()
        self._full = False
        self._ended = False

    async def start(self, nodes: Sequence[str]) -> None:
        """Posters for ``nodes``; waits until each serves or has failed once. Raises the first one's error
        where the settings let none start."""
        for node in nodes:
            self._add(node, self._posters_per_node)
        await asyncio.gather(*(keeper.settled.wait() for keeper in self.keepers))
        refused = [keeper.refused for keeper in self.keepers if keeper.refused is not None]
        if refused and len(refused) == len(self.keepers):
            raise refused[0]
        self.resplit()
        self._following = asyncio.create_task(self._follow())

    async def end(self) -> None:
        """Close every poster."""
        self._ended = True
        self.remote.set()  # whoever waits for a poster hears from the admission that none will come
        tasks = {*self._draining, *([self._following] if self._following is not None else [])}
        for task in tasks:
            task.cancel()
        closed = CodedError("POOL.CLOSED", "the pool was closed with the request in flight")
        await asyncio.gather(self._scout.close(), *(keeper.end(closed) for keeper in self.keepers))
        if tasks:
            await asyncio.wait(tasks)

    def resplit(self) -> None:
        """Give the capacity to the posters that serve now, or to the local client when none does."""
        if self._ended:
            return
        over = self._session.ended()
        if over is not None:
            self._admission.serve(())
            self._admission.close(over)  # whoever waits or comes from now on hears of it
            self.remote.set()
            return
        serving: list[Lane] = [
            keeper.lane
            for keeper in self.keepers
            if keeper.lane is not None and keeper.lane.state is State.SERVING and not keeper.leaving
        ]
        was_local = self._local is not None and self._local in self._admission.lanes
        if serving:
            self.remote.set()
            if was_local:
                self._events.emit("pool.remote", key="pool", detail="a poster is healthy again")
        elif self._local is not None and all(keeper.settled.is_set() for keeper in self.keepers):
            serving = [self._local]
            self.remote.clear()
            if not was_local:
                self._events.emit(
                    "pool.local",
                    level="warning",
                    key="pool",
                    code="POOL.NO_POSTER",
                    detail="no poster is healthy: posting from the pool's own process until one is",
                )
        self._admission.serve(serving)

    def _add(self, node: str, number: int) -> None:
        """So many more posters for ``node``, as far as there is a share for each."""
        for _ in range(number):
            if len(self._staying()) >= self._admission.concurrency:
                if not self._full:
                    self._full = True
                    self._events.emit(
                        "pool.full",
                        level="warning",
                        key="pool",
                        detail=f"concurrency {self._admission.concurrency} leaves no share for more posters: "
                        f"nodes that join get none until others go",
                    )
                return
            keeper = self._make(f"poster/{next(self._numbers)}", node, self.resplit)
            self.keepers.append(keeper)
            keeper.begin()

    def _staying(self) -> list[Keeper]:
        return [keeper for keeper in self.keepers if not keeper.leaving]

    async def _follow(self) -> None:
        async for change in self._scout.watch(LOOK_EVERY, LOOK_TIMEOUT):
            self._take(change)

    def _take(self, change: Change) -> None:
        if self._session.ended() is not None:
            return
        have = {keeper.node for keeper in self.keepers}
        for node in change.joined:
            if node.id not in have and not node.draining:
                self._tell("pool.node_joined", node)
        for node in (*change.draining, *change.left):
            gone = node in change.left
            leaving = [k for k in self.keepers if k.node == node.id and (gone or not k.leaving)]
            if leaving:
                self._tell("pool.node_left" if gone else "pool.node_draining", node)
            for keeper in leaving:
                keeper.leaving = True
                task = asyncio.create_task(self._leave(keeper, 0.0 if gone else DRAIN))
                self._draining.add(task)
                task.add_done_callback(self._draining.discard)
        there = Counter(keeper.node for keeper in self._staying())
        for id in change.nodes.open:  # those too for which there was no share when they joined
            self._add(id, self._posters_per_node - there[id])
        self.resplit()

    async def _leave(self, keeper: Keeper, patience: float) -> None:
        await keeper.drained(patience)
        await keeper.end(CodedError("ACTOR.DIED", f"{keeper.key} went with its node {keeper.node}"))
        if keeper in self.keepers:
            self.keepers.remove(keeper)
        self.resplit()

    def _tell(self, event: str, node: Node) -> None:
        self._events.emit(event, key=node.id, detail=f"node {node.host}", node_host=node.host)
