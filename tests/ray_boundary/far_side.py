"""The columns' far sides: tasks and actors that fail, plain and with `coded`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import ray

from faults import name_of
from protocol import coded
from tests.ray_boundary.shapes import raise_it

LONG: Final = 100.0
"""Seconds that any call may take, the start of twenty processes at once on a busy machine included."""
NAMESPACE: Final = "ray-boundary"
_named: Final = coded(name=name_of)


def run(shape: str) -> None:
    raise_it(shape)


def stream(shape: str) -> Iterator[int]:
    yield 1  # not `yield from (1, 2)`: Ray sends into the generator, and a tuple's iterator takes nothing
    yield 2
    raise_it(shape)


def takes(value: object) -> None:
    raise AssertionError(f"was run with {value!r}")


def by_actor(actor: Any, task: Any, shape: str) -> None:
    """The task of task → actor → task."""
    ray.get(actor.by_task.remote(task, shape), timeout=LONG)


def task(function: Any, named: bool) -> Any:
    """It as a task, with `coded` or without."""
    return ray.remote(num_cpus=0, max_retries=0)(_named(function) if named else function)


class Failing:
    """A sync actor, threaded with ``max_concurrency``. Fails in ``__init__`` where it is told to."""

    def __init__(self, shape: str = "") -> None:
        if shape:
            raise_it(shape)

    def run(self, shape: str) -> None:
        raise_it(shape)

    def stream(self, shape: str) -> Iterator[int]:
        yield 1
        yield 2
        raise_it(shape)

    def takes(self, value: object) -> None:
        raise AssertionError(f"was run with {value!r}")

    def by_task(self, task: Any, shape: str) -> None:
        ray.get(task.remote(shape), timeout=LONG)

    def through(self, below: list[Any], shape: str) -> Any:
        """Ask the first of ``below`` to ask the rest."""
        first, *rest = below
        return ray.get(first.through.remote(rest, shape) if rest else first.run.remote(shape), timeout=LONG)


class FailingAsync:
    """The same on a loop."""

    def __init__(self, shape: str = "") -> None:
        if shape:
            raise_it(shape)

    async def run(self, shape: str) -> None:
        raise_it(shape)

    async def stream(self, shape: str) -> AsyncIterator[int]:
        yield 1
        yield 2
        raise_it(shape)

    async def through(self, below: list[Any], shape: str) -> Any:
        first, *rest = below
        return await (first.through.remote(rest, shape) if rest else first.run.remote(shape))


@_named
class CodedFailing(Failing):
    pass


@_named
class CodedFailingAsync(FailingAsync):
    pass


class FarSide:
    """Everything that can fail, of one kind (``plain`` or ``coded``); started once and kept. The async
    actor has the kind's name, by which other drivers find it."""

    def __init__(self, kind: str) -> None:
        named = kind == "coded"
        self.run, self.stream = task(run, named), task(stream, named)
        self.takes, self.by_actor = task(takes, named), task(by_actor, named)
        self.Sync: Any = ray.remote(num_cpus=0)(CodedFailing if named else Failing)
        self.Async: Any = ray.remote(num_cpus=0)(CodedFailingAsync if named else FailingAsync)
        self.sync = self.Sync.remote()
        self.threaded = self.Sync.options(max_concurrency=4).remote()
        self.asynchronous = self.Async.options(name=kind, namespace=NAMESPACE).remote()
        self.middle = self.Async.remote()

    def close(self) -> None:
        actors: tuple[Any, ...] = (self.sync, self.threaded, self.asynchronous, self.middle)
        for actor in actors:
            ray.kill(actor)
