"""How many examples a property is tried with: the one place that says so.

`FAILSOFT_PROPERTY_EXAMPLES` (default 2,000) sets the number for an ordinary run; `make soak` tries each
property with `SOAK` of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from hypothesis import HealthCheck, given, seed, settings

VARIABLE: Final = "FAILSOFT_PROPERTY_EXAMPLES"
EXAMPLES: Final = int(os.environ.get(VARIABLE, "2000"))
SOAK: Final = 200_000
ROUND: Final = 10_000
"""Most examples that Hypothesis is asked for at once: it remembers the examples of one run, in memory."""

Property = Callable[..., None]
PROPERTIES: Final[dict[str, tuple[Property, tuple[Any, ...], dict[str, Any]]]] = {}
"""Every property by its name: the bare function and the strategies of its arguments."""


def prop(*positional: Any, **named: Any) -> Callable[[Property], Callable[[], None]]:
    """Make the function a test that tries `EXAMPLES` examples, and a soak of `SOAK` (see test_soak).

    The test tries the same examples each time, so that a red run is the change's doing and not the dice's;
    the soak looks somewhere else each time.
    """

    def decorate(bare: Property) -> Callable[[], None]:
        name = f"{bare.__module__.rpartition('.')[2]}::{bare.__name__}"
        assert name not in PROPERTIES, f"{name} is there twice: give each property a name of its own"
        PROPERTIES[name] = (bare, positional, named)
        made: Callable[[], None] = _settings(EXAMPLES, same_each_time=True)(given(*positional, **named)(bare))
        return made

    return decorate


def soak(name: str, examples: int = SOAK) -> None:
    """Try one property with ``examples`` examples, in rounds with fresh seeds; the seed is in the report
    of a failure."""
    bare, positional, named = PROPERTIES[name]
    for start in range(0, examples, ROUND):
        number = int.from_bytes(os.urandom(8), "big")
        size = min(ROUND, examples - start)
        try:
            seed(number)(_settings(size)(given(*positional, **named)(bare)))()
        except BaseException as exc:
            exc.add_note(f"{name}, examples {start} to {start + size}, seed {number}")
            raise


def _settings(examples: int, *, same_each_time: bool = False) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,  # the machine is shared: an example may wait for the CPU as long as it likes
        derandomize=same_each_time,
        # too_slow judges by the clock, as above; the other checks stay.
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
