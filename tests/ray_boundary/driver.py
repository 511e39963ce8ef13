"""A driver of its own: connects to a running Ray by the address that it is given (``ray://`` for Ray
Client), has everything fail there, and prints as JSON what it reads."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, Final

import ray

from faults import classify
from protocol import CodedError, code_of, read
from tests.ray_boundary.far_side import LONG, NAMESPACE, CodedFailing, Failing, run, task
from tests.ray_boundary.shapes import KILLED
from tests.ray_boundary.values import echo

SHAPES: Final = (
    "coded error",
    "coded subclass",
    "coded subclass the caller lacks",
    "coded error from a foreign one",
    "ordinary",
    "keyword-only arguments",
    "fails on load",
    "group in a group",
)
HEAVY: Final = "text of 20 MB"
KINDS: Final = ("plain", "coded")
"""Kinds of far sides; the running Ray has an actor of this name for each, in `NAMESPACE`."""


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=LONG)


def told(ref: Any) -> dict[str, Any]:
    """What is read of the failure that ``ref`` ends with."""
    try:
        got = get(ref)
    except Exception as exc:  # noqa: BLE001 - whatever arrives is what is looked at
        found, fault = read(exc), classify(exc)
        return {
            "type": type(exc).__name__,
            "is_coded": isinstance(exc, CodedError),
            "code": code_of(exc),
            "id": found.id,
            "trust": found.trust,
            "detail": found.detail,
            "data": found.data,
            "means": [str(fault.code), str(fault.blame), str(fault.outcome), fault.trust],
        }
    return {"answered": repr(got)}


def failures() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each failure by where and as what it is raised."""
    for kind in KINDS:
        called, actor = task(run, kind == "coded"), ray.get_actor(kind, NAMESPACE)
        started = ray.remote(num_cpus=0)(CodedFailing if kind == "coded" else Failing)
        made: Any = started.remote("coded error")
        for shape in (*SHAPES, HEAVY):
            yield f"{kind} task: {shape}", told(called.remote(shape))
        for shape in SHAPES:
            yield f"{kind} actor: {shape}", told(actor.run.remote(shape))
        yield f"{kind} init: coded error", told(made.run.remote("ordinary"))
    doomed: Any = ray.remote(num_cpus=0)(Failing).remote()
    yield KILLED, told(doomed.run.remote(KILLED))
    error = CodedError("ENGINE.EXITED", "a value", {"status": 3})
    arrived = get(echo.remote(error))
    yield "value", {"equal": arrived == error, "stored": get(ray.put(error)) == error}


def main(address: str) -> None:
    ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    try:
        print(json.dumps(dict(failures())), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
