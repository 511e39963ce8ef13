"""A failure keeps its name, its occurrence and its facts through chains of up to four kinds of boundary."""

from __future__ import annotations

import logging
from itertools import cycle, permutations
from typing import Any

import pytest
import ray

from protocol import CodedError
from tests.matrix.chains import ADDRESS, KINDS, Chain, go
from tests.matrix.shapes import SHAPES

ALL = [chain for length in (2, 3, 4) for chain in permutations(KINDS, length)]
TWICE = [("ray", "ray", "http", "child"), ("http", "child", "http", "pool"), ("child", "child", "ray", "ray")]
# Connecting to Ray from a child costs seconds: those chains run with the long ones.
QUICK = [c for c in ALL if len(c) == 2 or "ray" not in c or not {"pool", "child"} & set(c[: c.index("ray")])]


def with_shapes(chains: list[Chain]) -> list[Any]:
    """Each chain with a shape, every shape in turn."""
    return [
        pytest.param(chain, shape, id=f"{'-'.join(chain)}-{shape}")
        for chain, shape in zip(chains, cycle(SHAPES), strict=False)
    ]


@pytest.fixture
def quiet(ray_local: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(ADDRESS, ray.get_runtime_context().gcs_address)
    caplog.set_level(logging.CRITICAL, "failsoft")  # the servers log each failure


def hold(chain: Chain, shape: str) -> None:
    with pytest.raises(CodedError) as caught:
        go(chain, shape)
    error, expected = caught.value, SHAPES[shape]
    assert error.code == expected.code
    assert error.trust is expected.trust
    assert error.token in str(error)
    if shape == "CodedError":
        assert (error.detail, error.data["signal"]) == ("signal 9", 9)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("chain", "shape"), with_shapes([*QUICK, TWICE[0]]))
def test_the_name_is_kept(quiet: None, chain: Chain, shape: str) -> None:
    hold(chain, shape)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("chain", "shape"), with_shapes([c for c in [*ALL, *TWICE] if c not in QUICK]))
def test_the_name_is_kept_where_a_child_connects_to_ray(quiet: None, chain: Chain, shape: str) -> None:
    hold(chain, shape)
