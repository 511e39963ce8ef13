"""Ray's own retries: whether ``retry_exceptions`` sees a CodedError, and which occurrence is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from ray.exceptions import RayTaskError

from faults import classify
from protocol import CodedError, read
from tests.ray_boundary.attempts import callables
from tests.ray_boundary.near_side import failure_of
from tests.ray_boundary.shapes import ABORTED, RefitAborted

RETRIES: Final = 2
WHERE: Final = ("task", "coded task", "sync actor", "async actor")


class Row(NamedTuple):
    where: str
    listed: bool | tuple[type[Exception], ...]
    how: str
    attempts: int

    def __str__(self) -> str:
        listed = self.listed if isinstance(self.listed, bool) else [one.__name__ for one in self.listed]
        return f"{self.where} - {self.how}, retry_exceptions={listed}"


ROWS: Final = (
    *(
        Row(where, listed, how, attempts)
        for where in WHERE
        for listed, how, attempts in (
            ((CodedError,), "coded", 3),
            ((CodedError,), "subclass", 3),
            ((RefitAborted,), "subclass", 3),
            ((KeyError, RefitAborted), "coded", 1),
            ((ValueError,), "coded", 1),
            (True, "coded", 3),
            (False, "coded", 1),
        )
    ),
    # Who names failures with `coded` lists CodedError: that is what leaves the function.
    Row("coded task", (CodedError,), "foreign", 3),
    Row("coded task", (ValueError,), "foreign", 1),
    Row("task", (CodedError,), "foreign", 1),
    # A worker that dies is another matter than what it raises: its retry raises, and is not retried.
    Row("task", False, "die first", 2),
)
SUCCEEDS: Final = tuple(Row(where, (CodedError,), "succeed second", 2) for where in WHERE)


@pytest.fixture(scope="module")
def running(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> dict[Row, tuple[Any, Path]]:
    """All at once, for Ray waits a second before each retry."""
    far = callables()
    made: dict[Row, tuple[Any, Path]] = {}
    for row in (*ROWS, *SUCCEEDS):
        path = tmp_path_factory.mktemp("attempts") / "ids"
        limit = "max_task_retries" if "actor" in row.where else "max_retries"
        listed = row.listed if isinstance(row.listed, bool) else list(row.listed)
        call = far[row.where].options(**{limit: RETRIES, "retry_exceptions": listed})
        made[row] = call.remote(str(path), row.how), path
    return made


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_the_list_sees_coded_errors_and_the_last_occurrence_is_left(
    running: dict[Row, tuple[Any, Path]], row: Row
) -> None:
    ref, path = running[row]
    exc = await failure_of(ref)
    ids = path.read_text().split()
    assert len(ids) == row.attempts
    assert len(set(ids)) == row.attempts, "each is an occurrence of its own"
    assert isinstance(exc, RayTaskError)
    if row.how == "foreign":
        assert read(exc).code == ("TASK.FAILED" if row.where == "coded task" else None)
        return
    assert isinstance(exc, CodedError)
    assert read(exc).code == classify(exc).code == ABORTED
    assert read(exc).id == classify(exc).id == ids[-1], "the last attempt's"


@pytest.mark.parametrize("row", SUCCEEDS, ids=str)
async def test_a_retry_that_succeeds_leaves_no_failure(
    running: dict[Row, tuple[Any, Path]], row: Row
) -> None:
    ref, path = running[row]
    assert await ref == 2
    assert len(path.read_text().split()) == row.attempts
