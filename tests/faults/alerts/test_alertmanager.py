"""Against a real Prometheus Alertmanager: what it notifies is what happened."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from faults.alerts import Alertmanager, AlertWatcher, default_rules
from tests.faults.alerts import alertmanager
from tests.faults.alerts.alertmanager import RealAlertmanager
from tests.faults.alerts.helpers import append, died, ready, until


async def test_fires_once_with_its_code_and_resolves(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with RealAlertmanager(tmp_path) as real:
        sink = Alertmanager(real.url, resend=0.5)
        async with AlertWatcher(path, default_rules(), [sink], poll_interval=0.02) as watcher:
            append(path, died(ts=time.time()), died(ts=time.time()))
            fired = await real.wait_for("firing", code="ACTOR.DIED", key="poster/0")
            assert fired["labels"]["alertname"] == "poster-died"
            assert fired["labels"]["severity"] == "warning"
            assert fired["annotations"]["id"] == "ABCD2345"
            append(path, ready(ts=time.time()))
            resolved = await real.wait_for("resolved", code="ACTOR.DIED", key="poster/0")
            assert resolved["labels"] == fired["labels"]
            assert await watcher.drain(10.0)
        assert (sink.stats.failed, sink.stats.resend_failed) == (0, 0)
        assert sink.error is None
        assert len(real.alerts("firing")) == 1, "told once, however often it is repeated"
        assert len(real.alerts("resolved")) == 1


async def test_repetitions_keep_it_firing_and_their_end_resolves_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, died(ts=time.time()))
    async with RealAlertmanager(tmp_path) as real:
        sink = Alertmanager(real.url, resend=0.75)  # it ends by itself 3 s after the last one
        start = time.monotonic()
        async with AlertWatcher(path, default_rules(), [sink], poll_interval=0.02):
            await real.wait_for("firing", key="poster/0")
            await until(lambda: time.monotonic() - start > 5.0)
            assert real.alerts("resolved") == [], "repeated, so still firing after 5 s"
        await real.wait_for("resolved", key="poster/0")


def test_a_missing_binary_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.fail.Exception, match="apt-get install"):
        alertmanager.binary()
