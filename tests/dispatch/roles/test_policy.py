"""The table of roles, and what Ray makes of it."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import ray

from dispatch.roles import Role, options_for
from dispatch.roles.policy import POLICIES


def test_every_role_has_a_row_with_a_reason() -> None:
    assert set(POLICIES) == set(Role)
    assert all(policy.why for policy in POLICIES.values())


def test_what_the_roles_allow() -> None:
    assert options_for(Role.STATELESS) == {"max_restarts": -1, "max_task_retries": 0}
    assert options_for("idempotent") == {"max_restarts": -1, "max_task_retries": 3}
    assert options_for(Role.OWNER) == options_for(Role.RANK) == {"max_restarts": 0, "max_task_retries": 0}
    with pytest.raises(ValueError, match="trainer"):
        options_for("trainer")


def test_what_is_sent_again_by_itself_can_end() -> None:
    """Ray: only what may be restarted may be retried, and an input that kills must not do so for ever."""
    for policy in POLICIES.values():
        assert policy.max_task_retries >= 0
        assert policy.max_restarts or not policy.max_task_retries


async def test_a_stateless_actor_comes_back_empty_and_an_idempotent_one_answers_the_lost_call(
    ray_local: None,
) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self) -> tuple[int, int]:
            self.count += 1
            return self.count, os.getpid()

    counter = ray.remote(num_cpus=0)(Counter)
    stateless = counter.options(**options_for(Role.STATELESS)).remote()
    idempotent = counter.options(**options_for(Role.IDEMPOTENT)).remote()
    for actor in (stateless, idempotent):
        await actor.add.remote()
        _, pid = await actor.add.remote()
        os.kill(pid, signal.SIGKILL)
    count, _ = await idempotent.add.remote()
    assert count == 1
    answers: list[int] = []
    while not answers:
        with contextlib.suppress(
            ray.exceptions.ActorUnavailableError
        ):  # being restarted: its caller's business
            answers.append((await stateless.add.remote())[0])
    assert answers == [1]
    for actor in (stateless, idempotent):
        ray.kill(actor)
