"""Far sides that take CodedErrors as values, raise on, and count their attempts."""

from __future__ import annotations

from typing import Any

import ray

from faults import name_of
from protocol import CodedError, coded
from tests.ray_boundary.far_side import LONG


class Holder:
    """Keeps what it is given."""

    def __init__(self, kept: object = None) -> None:
        self.kept = kept

    def keep(self, value: object) -> str:
        self.kept = value
        return str(value)

    def give(self) -> object:
        return self.kept

    def is_equal(self, value: object) -> bool:
        return self.kept == value

    def raise_kept(self) -> None:
        assert isinstance(self.kept, BaseException)
        raise self.kept


def start_holder() -> Any:
    return ray.remote(num_cpus=0)(Holder).remote()


@ray.remote(num_cpus=0)
def echo(value: object) -> object:
    return value


class Middle:
    """Calls another actor, and raises on what that raised."""

    async def again(self, below: Any, shape: str) -> None:
        try:
            await below.run.remote(shape)
        except Exception:
            raise

    async def another(self, below: Any, shape: str) -> None:
        try:
            await below.run.remote(shape)
        except Exception as exc:
            raise ValueError("the middle's own words") from exc

    async def another_coded(self, below: Any, shape: str) -> None:
        try:
            await below.run.remote(shape)
        except Exception as exc:
            raise CodedError("ENGINE.EXITED", "the middle's own words") from exc

    async def from_none(self, below: Any, shape: str) -> None:
        try:
            await below.run.remote(shape)
        except Exception:  # noqa: BLE001 - that the failure is dropped is the case under test
            raise ValueError("the middle's own words") from None

    async def returned(self, below: Any, shape: str) -> BaseException:
        """The failure as a value."""
        try:
            await below.run.remote(shape)
        except Exception as exc:  # noqa: BLE001 - whichever it is, it is the result
            return exc
        raise AssertionError("it answered")


@coded(name=name_of)
class CodedMiddle(Middle):
    pass


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=LONG)
