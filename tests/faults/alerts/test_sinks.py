"""Sinks against a real HTTP server: bodies, repetitions, and never holding anybody up."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import tenacity
from rich.console import Console

from faults.alerts import AlertEngine, Alertmanager, Change, Sink, Terminal, Webhook, build_sinks
from faults.alerts import http_sinks as http_sinks_module
from faults.alerts import sinks as sinks_module
from faults.alerts.http_sinks import ATTEMPTS, labels_of
from faults.alerts.rules import SinkSettings
from faults.alerts.sinks import summarise
from protocol import CodedError
from tests.faults.alerts.helpers import Recorder, died, ready, rules, until


def changes(*events: dict[str, Any]) -> list[Change]:
    engine = AlertEngine(rules().rules, clock=None)
    return [change for one in events for change in engine.feed(one)]


FIRED, RESOLVED = changes(died(), ready())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits between attempts."""
    monkeypatch.setattr(http_sinks_module, "_pause", tenacity.wait_none())


async def delivered(sink: Sink, *some: Change) -> Sink:
    await sink.start()
    for change in some:
        sink.put(change)
    await sink.close(10.0)
    return sink


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def test_the_webhooks_body() -> None:
    async with Recorder() as server:
        sink = await delivered(Webhook(server.url + "/hook"), FIRED, RESOLVED)
    assert sink.stats.delivered == 2
    assert server.paths == ["/hook", "/hook"]
    first, second = server.bodies
    assert (first["version"], first["status"]) == ("1", "firing")
    assert first["alert"]["code"] == "ACTOR.DIED"
    assert first["alert"]["group"] == {"key": "poster/0"}
    assert first["alert"]["resolved_at"] is None
    assert second["status"] == "resolved"
    assert second["alert"]["resolved_at"] - second["alert"]["fired_at"] == pytest.approx(1.2, abs=1e-3)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("statuses", "posts", "code"),
    [
        ([503, 500], 3, None),
        ([429], 2, None),
        ([500] * 9, ATTEMPTS, "UPSTREAM.SERVER_ERROR"),
        ([429] * 9, ATTEMPTS, "BACKPRESSURE.RATE_LIMITED"),
        ([400], 1, "REQUEST.REJECTED"),
        ([404], 1, "REQUEST.REJECTED"),
        ([302], 1, "UPSTREAM.REDIRECT"),
    ],
)
async def test_only_what_may_help_is_tried_again(statuses: list[int], posts: int, code: str | None) -> None:
    async with Recorder(*statuses) as server:
        sink = await delivered(Webhook(server.url), FIRED)
    assert len(server.bodies) == posts
    assert (sink.error.code if sink.error else None) == code
    assert (sink.stats.delivered, sink.stats.failed) == ((0, 1) if code else (1, 0))


@pytest.mark.usefixtures("quick")
async def test_a_server_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    sink = await delivered(Webhook(unused_url() + "/secret?token=hush"), FIRED, RESOLVED)
    assert sink.error is not None
    assert sink.error.code == "TRANSPORT.CONNECT"
    assert sink.stats.failed == 2
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "2 failed" in record.getMessage()
    assert "hush" not in record.getMessage()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("kind", "attempts"), [(Webhook, 1), (Alertmanager, ATTEMPTS)])
async def test_a_lost_answer_is_asked_for_again_only_where_that_is_harmless(
    kind: type[Webhook] | type[Alertmanager], attempts: int
) -> None:
    connections = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        sink = await delivered(kind(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), FIRED)
    assert connections == attempts
    assert sink.error is not None
    assert sink.error.code == "TRANSPORT.DISCONNECTED"


async def test_retry_after_is_heeded_up_to_a_limit() -> None:
    assert http_sinks_module._retry_after({"retry-after": "7"}) == 7.0
    assert http_sinks_module._retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert http_sinks_module._retry_after({"retry-after": "inf"}) == 0.0
    assert http_sinks_module._retry_after({}) == 0.0
    async with Recorder(429, headers={"retry-after": "0.3"}) as server:
        sink = await delivered(Webhook(server.url), FIRED)
    assert sink.stats.delivered == 1


async def test_a_slow_sink_holds_up_nobody_and_close_has_a_deadline() -> None:
    async with Recorder() as slow, Recorder() as quick_one:
        slow.gate.clear()
        sinks = [Webhook(slow.url), Webhook(quick_one.url)]
        for sink in sinks:
            await sink.start()
        for change in (FIRED, RESOLVED):
            for sink in sinks:
                sink.put(change)
        await until(lambda: sinks[1].stats.delivered == 2)
        await asyncio.gather(*(sink.close(0.1) for sink in sinks))
    assert sinks[0].stats.unsent == 2
    assert sinks[1].stats.delivered == 2


async def test_a_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_module, "QUEUE", 2)
    sink = Webhook(unused_url())
    for _ in range(5):
        sink.put(FIRED)
    assert sink.stats.dropped == 3
    await sink.close(0.0)
    assert sink.stats.unsent == 2


async def test_a_sink_with_a_bug_is_contained() -> None:
    class Broken(Sink):
        async def deliver(self, change: Change) -> None:
            raise KeyError("oops")

    sink = await delivered(Broken("broken"), FIRED, RESOLVED)
    assert sink.stats.failed == 2
    assert sink.error is not None
    assert sink.error.code == "INTERNAL.BUG"
    await sink.close()  # twice is once


@pytest.mark.usefixtures("quick")
async def test_alertmanagers_body_and_repetitions() -> None:
    async with Recorder(500, 500, 500, 500) as server:  # the first delivery fails altogether
        sink = Alertmanager(server.url + "/base/", resend=0.05)
        await sink.start()
        sink.put(FIRED)
        await until(lambda: len(server.bodies) >= ATTEMPTS + 2)
        sink.put(RESOLVED)
        await sink.flush()
        count = len(server.bodies)
        await sink.close(5.0)
    assert set(server.paths) == {"/base/api/v2/alerts"}
    assert sink.stats.failed == 1
    assert sink.stats.delivered == 1
    (first,), (last,) = server.bodies[0], server.bodies[count - 1]
    assert first["labels"] == last["labels"]
    assert first["labels"] == {
        "alertname": "poster-died",
        "code": "ACTOR.DIED",
        "key": "poster/0",
        "run": "r1",
        "severity": "critical",
    }
    assert first["annotations"]["id"] == "ABCD2345"
    assert first["annotations"]["summary"] == "poster/0 died: killed"
    assert "dmesg" in first["annotations"]["runbook"], "from the catalogue"
    for body in server.bodies:
        (alert,) = body
        assert datetime.fromisoformat(alert["startsAt"]) <= datetime.fromisoformat(alert["endsAt"])


async def test_alertmanager_gets_no_end_before_the_start_whatever_the_clock_says() -> None:
    ahead = changes(died(ts=4_000_000_000.0), ready(ts=4_000_000_001.0))
    async with Recorder() as server:
        await delivered(Alertmanager(server.url), *ahead)
    assert len(server.bodies) == 2
    for (alert,) in server.bodies:
        assert datetime.fromisoformat(alert["startsAt"]) <= datetime.fromisoformat(alert["endsAt"])


def test_labels_are_named_as_alertmanager_wants_and_never_empty() -> None:
    text = """
[[rule]]
name = "a"
type = "any"
match = { event = "*" }
group_by = ["data.task-1", "host"]
"""
    engine = AlertEngine(rules(text).rules, clock=None)
    (change,) = engine.feed({"event": "x", "data": {"task-1": "t"}, "code": None})
    assert labels_of(change.alert) == {"alertname": "a", "data_task_1": "t", "severity": "warning"}


@pytest.mark.parametrize(
    "url", ["", "nope", "ftp://x", "http://", "http://a:b:c", "http://a:90930", "http://a:0"]
)
@pytest.mark.parametrize("kind", [Webhook, Alertmanager])
def test_a_bad_url_is_a_clear_error(kind: type[Webhook] | type[Alertmanager], url: str) -> None:
    with pytest.raises(CodedError) as caught:
        kind(url)
    assert caught.value.code == "CONFIG.INVALID"


def test_a_bad_resend_is_a_clear_error() -> None:
    with pytest.raises(CodedError, match="resend"):
        Alertmanager("http://127.0.0.1:1", resend=0.0)


def test_names_hold_no_secrets() -> None:
    sink = Webhook("https://me:hush@hooks.example.org/a?token=hush")
    assert sink.name == "webhook https://hooks.example.org/a"


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone")
async def test_the_terminal_prints_one_plain_line_a_change() -> None:
    out = io.StringIO()
    some = changes(died(detail="[bold]not markup[/bold]\x1b[31m" + "x" * 200), ready())
    await delivered(Terminal(Console(file=out, width=80)), *some)
    first, second = out.getvalue().splitlines()
    assert first.startswith(
        "22:13:20 FIRING critical poster-died poster/0 (ACTOR.DIED): poster/0 died: [bold]not markup"
    )
    assert second == "22:13:21 RESOLVED poster-died poster/0 (ACTOR.DIED) after 1.2 s"
    assert "\x1b" not in out.getvalue()


async def test_a_terminal_that_is_gone_is_a_failed_sink() -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    sink = await delivered(Terminal(Console(file=Gone())), FIRED)
    assert sink.stats.failed == 1
    assert sink.error is not None
    assert sink.error.code == "NODE.IO"


def test_the_summary() -> None:
    some = changes(died(), ready(), died("poster/1"), died("poster/0"))
    assert summarise(some) == [
        "alert poster-died fired for poster/0 (ACTOR.DIED), resolved after 1.2 s",
        "alert poster-died fired for poster/1 (ACTOR.DIED), still firing",
        "alert poster-died fired for poster/0 (ACTOR.DIED), still firing",
    ]


def test_build_sinks_takes_each_url_once() -> None:
    settings = SinkSettings(terminal=True, webhook=("http://a/1",), alertmanager=("http://b",))
    made = build_sinks(settings, webhook=["http://a/1", "http://c"], alertmanager=["http://b"])
    assert [sink.name for sink in made] == [
        "terminal",
        "webhook http://a/1",
        "webhook http://c/",
        "alertmanager http://b/api/v2/alerts",
    ]
    assert build_sinks(SinkSettings(terminal=False)) == []
