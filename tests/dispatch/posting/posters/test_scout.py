"""The scout learns what the cluster is, and waits for nobody; what it rests on is Ray's real behaviour.

Each cluster is that of a driver of its own (`cluster_drive`), run once; the tests read what it saw."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import GlobalState

from dispatch.posting.posters import scout as module
from dispatch.posting.posters.scout import MISSES, Change, Node, Nodes, Scout, View, draining_nodes
from dispatch.processes import is_alive
from tests.support.wait import until
from tests.support.witness import ROOT

A, B, C = (Node(letter * 56, f"10.0.0.{n}") for n, letter in enumerate("abc"))
B_DRAINS = Node(B.id, B.host, draining=True)
NO_CHANGE = None

pytestmark = pytest.mark.timeout(300)


def drive(scenario: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.dispatch.posting.posters.cluster_drive", scenario],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


# What is held to be true


def test_at_first_all_nodes_join() -> None:
    view = View()
    assert view.see(Nodes((A, B_DRAINS))) == Change(Nodes((A, B_DRAINS)), joined=(A, B_DRAINS))
    assert view.nodes.open == (A.id,)
    assert view.see(Nodes((A, B_DRAINS))) is NO_CHANGE


def test_only_what_is_new_is_a_change() -> None:
    view = View(Nodes((B, A)))
    assert view.nodes == Nodes((A, B))
    assert view.see(Nodes((A, B))) is NO_CHANGE
    assert view.see(Nodes((A, B, C))) == Change(Nodes((A, B, C)), joined=(C,))


def test_a_node_that_one_look_misses_is_not_gone() -> None:
    view = View(Nodes((A, B)))
    for _ in range(3):
        assert view.see(Nodes((A,))) is NO_CHANGE
        assert view.nodes == Nodes((A, B))
        assert view.see(Nodes((A, B))) is NO_CHANGE


def test_a_node_that_looks_in_a_row_miss_is_gone() -> None:
    view = View(Nodes((A, B)))
    for _ in range(MISSES - 1):
        assert view.see(Nodes((A,))) is NO_CHANGE
    assert view.see(Nodes((A,))) == Change(Nodes((A,)), left=(B,))
    assert view.see(Nodes((A,))) is NO_CHANGE


def test_a_drain_is_told_of_once_and_is_not_taken_back() -> None:
    view = View(Nodes((A, B)))
    assert view.see(Nodes((A, B_DRAINS))) == Change(Nodes((A, B_DRAINS)), draining=(B_DRAINS,))
    assert view.see(Nodes((A, B))) is NO_CHANGE  # a GCS that has just been restarted may not know
    assert view.nodes.open == (A.id,)
    for _ in range(MISSES - 1):
        view.see(Nodes((A,)))
    assert view.see(Nodes((A,))) == Change(Nodes((A,)), left=(B_DRAINS,))


def test_all_at_once() -> None:
    view = View(Nodes((A, B)))
    view.see(Nodes((B,)))
    assert view.see(Nodes((B_DRAINS, C))) == Change(
        Nodes((B_DRAINS, C)), joined=(C,), left=(A,), draining=(B_DRAINS,)
    )


# What Ray's private API is expected to be


def test_ray_tells_which_nodes_drain(ray_local: None) -> None:
    """Without it nodes that drain keep their posters until they are gone: then find what took its place."""
    assert callable(getattr(GlobalState, "get_draining_nodes", None))
    assert draining_nodes() == frozenset()


def test_a_ray_that_does_not_tell_drains_nothing(monkeypatch: pytest.MonkeyPatch, ray_local: None) -> None:
    monkeypatch.delattr(GlobalState, "get_draining_nodes")
    assert draining_nodes() == frozenset()
    monkeypatch.setitem(sys.modules, "ray._private.state", None)
    assert draining_nodes() == frozenset()


# One node


async def test_one_node(ray_local: None) -> None:
    scout = Scout()
    try:
        seen = await scout.look(30)
        assert seen is not None
        (node,) = seen.alive
        assert node.id == ray.get_runtime_context().get_node_id()
        assert node.host
        assert not node.draining
        changes: list[Change] = []

        async def follow(known: Nodes | None) -> None:
            async for change in scout.watch(0.02, 5.0, known):
                changes.append(change)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(None)), group.create_task(follow(seen))]
            await until(lambda: changes)
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
        assert changes == [Change(seen, joined=seen.alive)]
    finally:
        await scout.close()


async def test_a_watch_ends_with_its_scout(ray_local: None) -> None:
    scout = Scout()
    changes = []
    async with asyncio.timeout(30):
        async for change in scout.watch(0.02, 10.0):
            changes.append(change)
            await scout.close()
    assert len(changes) == 1


async def test_an_actor_that_does_not_answer_is_replaced(
    ray_local: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scout = Scout()
    try:
        before = await scout.look(30)
        stuck = scout._sight
        assert stuck is not None

        hangs = tmp_path / "hangs"

        def hang(self: Any, began: str) -> None:
            open(began, "w").close()
            time.sleep(600)

        hung = scout._actor.__ray_call__.options(num_returns=0)
        hung.remote(hang, str(hangs))
        await until(hangs.exists)  # ahead of the next look on the actor's only thread
        monkeypatch.setattr(module, "PATIENCE", 0.5)
        looks = [await scout.look(0.2) for _ in range(4)]
        assert looks[0] is None
        await until_seen(scout, before)
        assert scout._sight is not None
        assert scout._sight.pid != stuck.pid
        await until(lambda: not is_alive(stuck.pid, stuck.create_time))
    finally:
        await scout.close()


async def until_seen(scout: Scout, nodes: Nodes | None) -> None:
    async with asyncio.timeout(30):
        while await scout.look(10.0) != nodes:
            pass


# A cluster


@pytest.fixture(scope="module")
def membership() -> dict[str, Any]:
    return drive("membership")


def test_a_node_that_is_added_is_seen(membership: dict[str, Any]) -> None:
    assert membership["at_first"] == [membership["head"]]
    assert membership["joined_in_s"] < 5


def test_a_node_that_drains_is_seen_and_takes_no_posters(membership: dict[str, Any]) -> None:
    assert membership["drain"][0] == 0, membership["drain"]
    assert membership["draining_in_s"] < 5
    assert membership["open_while_draining"] == [membership["head"]]
    assert membership["alive_while_draining"] == sorted([membership["head"], membership["added"]])
    assert membership["busy"] == "still served"


def test_ray_ends_a_node_that_drains_once_it_is_idle(membership: dict[str, Any]) -> None:
    assert membership["drained_left_in_s"] < 15


def test_a_node_whose_processes_are_killed_is_seen_to_be_gone(membership: dict[str, Any]) -> None:
    assert membership["left_in_s"] < 15


def test_each_change_is_told_of_once(membership: dict[str, Any]) -> None:
    joined, left, draining = [1, 0, 0], [0, 1, 0], [0, 0, 1]
    assert membership["changes"] == [joined, joined, draining, joined, left, left]


def test_a_scout_whose_actor_died_gets_another(membership: dict[str, Any]) -> None:
    assert membership["after_its_actor_died"] == sorted([membership["head"], membership["added"]])


def test_close_leaves_no_actor(membership: dict[str, Any]) -> None:
    assert membership["actor_left"] is False
    assert membership["look_after_close"] is None


@pytest.fixture(scope="module")
def stopped() -> dict[str, Any]:
    return drive("stopped_gcs")


def test_while_the_gcs_is_stopped_nothing_is_known_and_nothing_waits(stopped: dict[str, Any]) -> None:
    assert len(stopped["looks"]) >= 3
    assert {str(nodes) for nodes, _ in stopped["looks"]} == {"None"}
    assert max(seconds for _, seconds in stopped["looks"]) < 3
    assert stopped["gap_s"] < 2, "a look that waits for the GCS waits for all of its standstill"


def test_while_the_gcs_is_stopped_actors_answer_and_new_ones_wait(stopped: dict[str, Any]) -> None:
    assert stopped["echo"] == "still there"
    assert stopped["late"] == "late"


def test_while_the_gcs_is_stopped_close_leaves_no_actor(stopped: dict[str, Any]) -> None:
    assert stopped["closed_actor_left"] is False


def test_when_the_gcs_goes_on_all_is_as_before(stopped: dict[str, Any]) -> None:
    assert stopped["same"] is True
    assert stopped["back_in_s"] < 5
    assert stopped["changes"] == 1


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ray keeps the GCS's tables in Redis, or since 2.60 in a folder."""
    tables: Path = tmp_path_factory.mktemp("gcs")
    return drive("restarted_gcs", RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(tables))


def test_while_the_gcs_is_dead_nothing_is_known_and_nothing_waits(restarted: dict[str, Any]) -> None:
    assert restarted["while_down"] == [None, None, None]
    assert restarted["echo"] == "still there"
    assert restarted["gap_s"] < 2


def test_a_restarted_gcs_changes_nothing(restarted: dict[str, Any]) -> None:
    assert restarted["same"] is True
    assert restarted["back_in_s"] < 15
    assert restarted["changes"] == 1
    assert restarted["echo_after"] == "as before"
    assert restarted["late"] == "late"
