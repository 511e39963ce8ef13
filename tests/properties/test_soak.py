"""The soak: every property with 200,000 examples (`make soak`; hours)."""

from __future__ import annotations

import pytest

from tests.properties import (  # noqa: F401 - importing them is what fills PROPERTIES
    test_carrier_properties,
    test_hostile_properties,
    test_safe_properties,
    test_token_properties,
    test_transport_properties,
)
from tests.properties.examples import PROPERTIES, SOAK, soak


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_two_hundred_thousand_examples(name: str) -> None:
    assert SOAK >= 200_000
    soak(name)
