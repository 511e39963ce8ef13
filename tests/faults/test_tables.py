"""Every exception that Ray and the HTTP clients export has a row of its own, and every row is right."""

from __future__ import annotations

import importlib
from types import ModuleType

import aiohttp
import httpx
import pytest
import ray.exceptions

from faults import Blame, Kind, Outcome, classify_status
from faults.classify import TABLE
from faults.http_faults import STATUS, status_code
from faults.meanings import BY_CODE, BY_FAMILY, meaning
from faults.ray_faults import NESTED, TEXT_ONLY
from faults.text_faults import BUILTIN
from faults.torch_faults import TORCH
from protocol import Code, Family, catalogue


def full(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(one) for one in cls.__subclasses__()))


def exceptions_of(module: ModuleType) -> list[type]:
    """What ``module`` exports, and what its package derives from that."""
    package = module.__name__.partition(".")[0]
    exported = {
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    below = set().union(*(subclasses(one) for one in exported))
    ours = {one for one in exported | below if one.__module__.partition(".")[0] == package}
    # Ray makes a class for each cause that it carries: RayTaskError(ValueError).
    return sorted((one for one in ours if "(" not in one.__name__), key=full)


@pytest.mark.parametrize("module", [ray.exceptions, httpx, aiohttp], ids=lambda m: m.__name__)
def test_every_exception_has_a_row_of_its_own(module: ModuleType) -> None:
    classes = exceptions_of(module)
    assert len(classes) > 25, "the enumeration itself is broken"
    unmapped = [full(one) for one in classes if full(one) not in TABLE]
    assert not unmapped, f"{module.__name__} raises these and faults has no row for them: {unmapped}"


# Names of older releases (ray>=2.50, aiohttp>=3.11), which newer ones lack.
OLDER = {"aiohttp.http_websocket.WebSocketError", "ray.exceptions.PlasmaObjectNotAvailable"}


# Those of PyTorch and vLLM are compared with the real ones where these are (tests/real_engines).
@pytest.mark.parametrize("name", sorted(TABLE.keys() - TORCH.keys()))
def test_every_row_names_a_class_that_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    cls = getattr(importlib.import_module(module), attribute, None)
    if cls is None and name in OLDER:
        return
    assert isinstance(cls, type)
    assert issubclass(cls, BaseException)


@pytest.mark.parametrize(
    "table",
    [TABLE, STATUS, NESTED, BUILTIN, BY_CODE],
    ids=["TABLE", "STATUS", "NESTED", "BUILTIN", "BY_CODE"],
)
def test_every_row_leads_to_a_code_of_the_catalogue(table: dict[object, object]) -> None:
    for row in table if table is BY_CODE else table.values():
        assert Code(row) in catalogue, row  # type: ignore[arg-type]
    assert all(Code(code) in catalogue for code in TEXT_ONLY)


def test_every_family_has_a_meaning() -> None:
    assert set(BY_FAMILY) == set(Family)
    for entry in catalogue:
        kind, blame, outcome = meaning(entry.code)
        assert isinstance(kind, Kind)
        assert isinstance(blame, Blame)
        assert outcome == Outcome(entry.outcome)
    assert meaning(Code("ENGINE.NEVER_SEEN"))[2] is Outcome.UNKNOWN


def test_what_is_named_nested_is_blamed_so() -> None:
    for nested in NESTED.values():
        assert meaning(Code(nested))[1] is Blame.NESTED


# -- statuses

NOT_A_FAILURE = range(100, 300)
NEVER_AGAIN = {"REQUEST", "TRANSPORT"}  # TRANSPORT.PROXY for 407


@pytest.mark.parametrize("status", range(100, 600))
def test_every_status(status: int) -> None:
    fault = classify_status(status, {}, "the body")
    if status in NOT_A_FAILURE:
        assert fault is None
        assert status_code(status) is None
        return
    assert fault is not None
    assert (fault.status, fault.evidence) == (status, "the body")
    assert fault.code in catalogue
    advice = catalogue.entry(fault.code).advice
    if status in (408, 425, 429):
        assert advice in ("wait", "retry_elsewhere")
        assert fault.code.family in ("BACKPRESSURE", "TIMEOUT")
    elif status < 400:
        assert (fault.code, advice) == ("UPSTREAM.REDIRECT", "give_up")
    elif status < 500:
        assert advice == "give_up"
        assert fault.code.family in NEVER_AGAIN
    elif status in (503, 529):
        assert (fault.kind, fault.outcome, advice) == (Kind.BACKPRESSURE, Outcome.NOT_RUN, "wait")
    else:
        assert (fault.kind, advice) == (Kind.SERVER_ERROR, "retry_elsewhere")
        assert fault.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (301, "UPSTREAM.REDIRECT"),
        (400, "REQUEST.REJECTED"),
        (401, "REQUEST.UNAUTHORIZED"),
        (403, "REQUEST.UNAUTHORIZED"),
        (404, "REQUEST.NOT_FOUND"),
        (405, "REQUEST.NOT_FOUND"),
        (407, "TRANSPORT.PROXY"),
        (408, "TIMEOUT.READ"),
        (409, "REQUEST.REJECTED"),
        (413, "REQUEST.TOO_LARGE"),
        (418, "REQUEST.REJECTED"),
        (422, "REQUEST.REJECTED"),
        (429, "BACKPRESSURE.RATE_LIMITED"),
        (500, "UPSTREAM.SERVER_ERROR"),
        (501, "UPSTREAM.SERVER_ERROR"),
        (502, "UPSTREAM.BAD_GATEWAY"),
        (503, "BACKPRESSURE.OVERLOADED"),
        (504, "UPSTREAM.BAD_GATEWAY"),
        (599, "UPSTREAM.SERVER_ERROR"),
    ],
)
def test_the_statuses_that_matter(status: int, code: str) -> None:
    assert status_code(status) == code
