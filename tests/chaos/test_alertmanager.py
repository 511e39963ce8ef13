"""A poster is killed, and the person on call hears of it: once, by name, and again when it is over."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from chaos import strike
from dispatch.posting.posters.keeper import Recreation
from faults import Backoff
from faults.alerts import AlertWatcher, build_sinks, parse_rules
from tests.faults.alerts.alertmanager import RealAlertmanager
from tests.support.events import EventFile
from tests.support.fixtures import MakePool
from tests.support.wait import until
from tests.support.witness import Witness

RULES = """
[[rule]]
name = "poster-died"
type = "any"
match = { event = "poster.died" }
group_by = ["key"]
resolve = { event = "poster.ready" }
summary = "{key} died: {detail}"

[sinks]
alertmanager = ["URL"]
"""
# Alertmanager tells of a new alert after its group_wait: the poster must be away for longer than that.
AWAY = Recreation(Backoff(3.0, 3.0), budget=1000)


@pytest.mark.timeout(90)
async def test_a_killed_posters_alert_fires_once_and_resolves(
    tmp_path: Path, make_pool: MakePool, witness: Witness, events: EventFile
) -> None:
    async with RealAlertmanager(tmp_path) as real:
        rules = parse_rules(RULES.replace("URL", real.url))
        sinks = build_sinks(rules.sinks)
        async with (
            make_pool(concurrency=8, posters_per_node=2, recreation=AWAY) as pool,
            AlertWatcher(events.path, rules, sinks),
        ):
            injury = strike(pool.stats().posters, signal.SIGKILL, state="serving")
            posts = [pool.post(witness.url("ok", "delay=0.05"), {"n": n}) for n in range(100)]
            replies = await asyncio.gather(*posts)
            firing = await real.wait_for("firing", deadline=20.0, alertname="poster-died", key=injury.key)
            assert firing["labels"]["code"] == "ACTOR.DIED"
            await until(lambda: pool.stats().recreated == 1, 30.0, "the poster was replaced")
            resolved = await real.wait_for("resolved", deadline=20.0, alertname="poster-died", key=injury.key)
            assert resolved["labels"]["code"] == "ACTOR.DIED"
            assert resolved["startsAt"] == firing["startsAt"], "it is the same alert that resolved"
    assert len(replies) == 100
    # One notification of each kind: fired once, resolved once.
    assert len(real.alerts("firing", key=injury.key)) == 1
    assert len(real.alerts("resolved", key=injury.key)) == 1
