"""Retry-After in seconds, as a date, and nonsense (H6)."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults import classify_status
from faults.http_faults import MAX_RETRY_AFTER, retry_after

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def http_date(seconds: float) -> str:
    return format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("5", 5.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("300", 300.0),
        ("86400", MAX_RETRY_AFTER),
        ("999999999", MAX_RETRY_AFTER),
        (http_date(20), 20.0),
        (http_date(0), 0.0),
        (http_date(-3600), 0.0),
        (http_date(86400), MAX_RETRY_AFTER),
        ("Thursday, 01-Jan-26 12:00:09 GMT", 9.0),  # RFC 850
        ("Thu Jan  1 12:00:09 2026", 9.0),  # asctime
    ],
)
def test_seconds_and_dates(value: str, seconds: float) -> None:
    assert retry_after({"retry-after": value}, NOW.timestamp()) == seconds


def test_a_date_without_a_zone_is_in_gmt_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as local:
        local.setenv("TZ", "America/New_York")
        time.tzset()
        for value in ("Thu Jan  1 12:00:09 2026", "Thu, 01 Jan 2026 12:00:09 -0000"):
            assert retry_after({"retry-after": value}, NOW.timestamp()) == 9.0
    time.tzset()


@pytest.mark.parametrize(
    "value",
    [
        "",
        "soon",
        "-1",
        "+5",
        "1e3",
        "5 s",
        "nan",
        "inf",
        "0x10",
        "1,5",
        "٣",
        "9" * 400,
        "\0",
        "Thu, 99 Foo 2026",
        "99",
    ],
)
def test_nonsense_is_none(value: str) -> None:
    expected = 99.0 if value == "99" else None
    assert retry_after({"retry-after": value}, NOW.timestamp()) == expected


def test_the_header_may_be_missing_or_written_otherwise() -> None:
    assert retry_after(None) is None
    assert retry_after({}) is None
    assert retry_after({"Retry-After": "5"}) == 5.0
    assert retry_after(httpx.Headers({"RETRY-AFTER": "5"})) == 5.0
    assert retry_after({"retry-after": 5}) == 5.0


def test_a_date_is_read_against_the_clock() -> None:
    value = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    seconds = retry_after({"retry-after": value})
    assert seconds is not None
    assert 40 < seconds <= 100


@given(st.text() | st.integers().map(str) | st.floats().map(str) | st.datetimes().map(format_datetime))
def test_anything_is_none_or_a_bounded_time(value: str) -> None:
    seconds = retry_after({"retry-after": value}, NOW.timestamp())
    assert seconds is None or 0 <= seconds <= MAX_RETRY_AFTER


def test_it_arrives_in_the_fault() -> None:
    fault = classify_status(503, {"retry-after": "7"})
    assert fault is not None
    assert fault.retry_after == 7.0
