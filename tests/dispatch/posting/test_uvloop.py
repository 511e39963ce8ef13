"""uvloop: Ray gives it to every async actor as soon as it can be imported, as it can where vLLM or SGLang
are installed. It was reported that awaiting a call on an actor that was just killed hangs under it
(miles#1279): not so with Ray 2.60 and uvloop 0.23, in the driver and in the actors, which this holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.witness import ROOT, Witness

APART = ROOT / ".venv" / "uvloop"


@pytest.mark.timeout(300)
def test_nothing_hangs_on_an_actor_killed_a_moment_ago(witness: Witness) -> None:
    assert APART.is_dir(), "uvloop is not there: run `make test`, which installs it beside the other packages"
    done = subprocess.run(
        [sys.executable, "-m", "tests.dispatch.posting.uvloop_drive", witness.url("ok", "delay=1")],
        cwd=ROOT,
        # A second, Ray's own, is short for the word that an actor is dead: what waited for it is unavailable.
        env={
            **os.environ,
            "PYTHONPATH": str(APART),
            "RAY_timeout_ms_task_wait_for_death_info": "10000",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["driver_loop"], seen["actor_loop"]) == ("uvloop", "uvloop")
    calls = seen["calls"]
    # One that reaches its actor before `ray.kill` does is answered.
    assert calls.keys() <= {"ActorDiedError", "answered"}
    assert sum(calls.values()) == 9 * 6
    assert calls["ActorDiedError"] >= 9 * 3, "those that were under way"
    assert seen["pool"] == {"failed": [], "succeeded": 96, "balanced": True}
