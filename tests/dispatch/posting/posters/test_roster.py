"""Which nodes get posters, with keepers that only note what is asked of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from dispatch.posting.admission import Admission
from dispatch.posting.posters.roster import Roster
from dispatch.posting.posters.scout import Change, Node, Nodes
from protocol import CodedError, Events
from tests.support.wait import until

A, B, C = (Node(id, f"host-{id}") for id in "abc")


class NotedKeeper:
    """A keeper whose poster has work to end before it goes: until `gone` is set."""

    gone: asyncio.Event

    def __init__(self, key: str, node: str) -> None:
        self.key = key
        self.node = node
        self.lane = None
        self.leaving = False
        self.refused = None
        self.settled = asyncio.Event()
        self.settled.set()

    def begin(self) -> None:
        pass

    async def drained(self, timeout: float) -> None:
        await self.gone.wait()

    async def end(self, why: CodedError) -> None:
        pass


@pytest.fixture
def roster(ray_local: None, monkeypatch: pytest.MonkeyPatch) -> Roster:
    """Two posters a node, and places for four."""
    monkeypatch.setattr(NotedKeeper, "gone", asyncio.Event(), raising=False)
    make: Any = lambda key, node, changed: NotedKeeper(key, node)  # noqa: E731 - no Keeper, but used as one
    return Roster(2, make, Admission(4), None, Events())


def see(roster: Roster, *alive: Node, **change: Any) -> None:
    roster._take(Change(Nodes(alive), **change))


def staying(roster: Roster) -> Counter[str]:
    return Counter(keeper.node for keeper in roster.keepers if not keeper.leaving)


async def test_a_node_that_takes_the_place_of_a_leaving_one_gets_posters(roster: Roster) -> None:
    """Those that leave have no share any more, however long they take."""
    see(roster, A, B, joined=(A, B))
    draining = Node(B.id, B.host, draining=True)
    see(roster, A, draining, draining=(draining,))
    see(roster, A, draining, C, joined=(C,))
    assert staying(roster) == {A.id: 2, C.id: 2}
    NotedKeeper.gone.set()
    await until(lambda: len(roster.keepers) == 4)


async def test_a_node_for_which_there_was_no_place_gets_posters_when_there_is(roster: Roster) -> None:
    see(roster, A, B, joined=(A, B))
    see(roster, A, B, C, joined=(C,))
    assert staying(roster) == {A.id: 2, B.id: 2}
    see(roster, B, C, left=(A,))
    assert staying(roster) == {B.id: 2, C.id: 2}
    NotedKeeper.gone.set()
    await until(lambda: len(roster.keepers) == 4)
