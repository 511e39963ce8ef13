"""The watcher inside a running program."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from faults.alerts import AlertWatcher, Change, Sink, Webhook
from faults.alerts import watcher as watcher_module
from protocol import CodedError, Events
from tests.faults.alerts.helpers import POSTER, Recorder, append, died, ready, rules, until


class Kept(Sink):
    def __init__(self) -> None:
        super().__init__("kept")
        self.seen: list[Change] = []

    async def deliver(self, change: Change) -> None:
        self.seen.append(change)


async def test_follows_live_and_tells_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    now, kept = time.time(), Kept()
    async with AlertWatcher(path, rules(), [kept], poll_interval=0.01) as watcher:
        append(path, died(ts=now))
        assert await watcher.drain(10.0)
        assert [alert.key for alert in watcher.firing] == ["poster/0"]
        assert [change.kind for change in kept.seen] == ["fired"]
        append(path, ready(ts=now + 1.2))
        assert await watcher.drain(10.0)
        append(path, died("poster/1", ts=now + 2))  # seen on leaving
    assert watcher.summary() == [
        "alert poster-died fired for poster/0 (ACTOR.DIED), resolved after 1.2 s",
        "alert poster-died fired for poster/1 (ACTOR.DIED), still firing",
    ]
    assert kept.seen == watcher.history
    assert watcher.error is None


async def test_reads_what_our_own_events_write(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with AlertWatcher(path, rules(), poll_interval=0.01) as watcher:
        with Events.to_file(path, run="r7", role="driver") as events:
            error = CodedError("ACTOR.DIED", "exit signal 9")
            events.emit("poster.died", level="error", error=error, key="poster/3")
        assert await watcher.drain(10.0)
    (change,) = watcher.history
    assert (change.alert.id, change.alert.run, change.alert.code) == (error.id, "r7", "ACTOR.DIED")
    assert change.alert.summary == "poster/3 died: exit signal 9"


async def test_drain_does_not_wait_for_the_poll(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with AlertWatcher(path, rules(), poll_interval=3600.0) as watcher:
        append(path, died(ts=time.time()))
        assert await watcher.drain(10.0)
        assert len(watcher.history) == 1


async def test_silence_resolves_while_no_event_comes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    text = POSTER.replace("severity", "resolve_after = 0.05\nseverity")
    async with AlertWatcher(path, rules(text), poll_interval=0.01) as watcher:
        append(path, died(ts=time.time()))
        await until(lambda: [change.kind for change in watcher.history] == ["fired", "resolved"])


async def test_a_replay_ends_by_itself_and_by_its_own_clock(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    text = POSTER.replace("severity", "resolve_after = 60.0\nseverity")
    append(path, died(ts=1000.0), died("poster/1", ts=1050.0))
    async with AlertWatcher(path, rules(text), follow=False) as watcher:
        await watcher.wait()
    assert len(watcher.firing) == 2
    append(path, died("poster/2", ts=1070.0))
    async with AlertWatcher(path, rules(text), follow=False) as watcher:
        await watcher.wait()
    assert [alert.key for alert in watcher.firing] == ["poster/1", "poster/2"]


async def test_drain_gives_up_at_its_deadline(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with Recorder() as server:
        server.gate.clear()
        sink = Webhook(server.url)
        async with AlertWatcher(path, rules(), [sink], poll_interval=0.01, close_deadline=0.2) as watcher:
            append(path, died())
            assert not await watcher.drain(0.2)
    assert sink.stats.unsent == 1
    assert len(watcher.history) == 1


async def test_a_bug_in_watching_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    append(path, died())
    kept = Kept()
    async with AlertWatcher(path, rules(), [kept]) as watcher:
        monkeypatch.setattr(watcher.engine, "feed", lambda event: 1 / 0)
        await watcher.wait()
        assert await watcher.drain(5.0), "there is nothing left to wait for"
    assert watcher.error is not None
    assert watcher.error.code == "INTERNAL.BUG"


async def test_a_missing_file_in_a_replay_is_told(tmp_path: Path) -> None:
    async with AlertWatcher(tmp_path / "none", rules(), follow=False) as watcher:
        await watcher.wait()
    assert watcher.error is not None
    assert watcher.error.code == "CONFIG.INVALID"


async def test_cancelling_the_run_still_closes_the_sinks(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    kept = Kept()
    inside = asyncio.Event()

    async def program() -> None:
        async with AlertWatcher(path, rules(), [kept], poll_interval=0.01):
            append(path, died(ts=time.time()))
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(program())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(kept.seen) == 1
    assert len(asyncio.all_tasks()) == 1


async def test_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "MAX_HISTORY", 4)
    path = tmp_path / "events.jsonl"
    append(path, *(one for n in range(5) for one in (died(f"poster/{n}"), ready(f"poster/{n}"))))
    async with AlertWatcher(path, rules(), follow=False) as watcher:
        await watcher.wait()
    assert [change.alert.key for change in watcher.history] == ["poster/3"] * 2 + ["poster/4"] * 2
    assert watcher.fired == 5
