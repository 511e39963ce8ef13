"""Spans of POSTs: what they hold, and what they never do."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from dispatch.posting.observe.tracing import Tracing, bare
from protocol import CodedError
from tests.support.witness import ROOT

URL = "http://user:secret@10.0.0.1:30000/generate?api_key=secret#part"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    assert "secret" not in span.to_json()
    return span


def test_a_reply(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracing = Tracing(tracer)
    span = tracing.begin(URL)
    assert exporter.get_finished_spans() == ()
    tracing.end(span, attempts=2, status=200)
    made = only(exporter)
    assert (made.name, made.kind, made.status.status_code) == ("POST", SpanKind.CLIENT, StatusCode.UNSET)
    assert dict(made.attributes or {}) == {
        "url.full": "http://10.0.0.1:30000/generate",
        "failsoft.attempts": 2,
        "http.response.status_code": 200,
    }
    assert made.events == ()


def test_a_failure_says_its_code_and_nothing_of_its_text(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    tracing = Tracing(tracer)
    error = CodedError("REQUEST.REJECTED", "HTTP 400: the secret prompt", {"status": 400})
    tracing.end(tracing.begin(URL), attempts=1, status=400, code=error.code)
    made = only(exporter)
    assert (made.status.status_code, made.status.description) == (StatusCode.ERROR, "REQUEST.REJECTED")
    assert dict(made.attributes or {}) == {
        "url.full": "http://10.0.0.1:30000/generate",
        "failsoft.attempts": 1,
        "failsoft.code": "REQUEST.REJECTED",
        "http.response.status_code": 400,
    }
    assert made.events == ()


def test_what_was_never_answered_has_no_status(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracing = Tracing(tracer)
    tracing.end(tracing.begin(URL), attempts=0, code="TIMEOUT.DEADLINE")
    made = only(exporter)
    assert "http.response.status_code" not in (made.attributes or {})
    assert (made.attributes or {})["failsoft.attempts"] == 0


def test_a_caller_that_went_away_is_no_error(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracing = Tracing(tracer)
    tracing.end(tracing.begin(URL), attempts=1, code="CANCEL.CALLER")
    made = only(exporter)
    assert made.status.status_code is StatusCode.UNSET
    assert (made.attributes or {})["failsoft.code"] == "CANCEL.CALLER"


def test_a_span_stands_below_the_callers(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracing = Tracing(tracer)
    with tracer.start_as_current_span("rollout") as outer:
        first, second = tracing.begin(URL), tracing.begin(URL)  # side by side, not one in the other
        tracing.end(first, attempts=1, status=200)
        tracing.end(second, attempts=1, status=200)
    posts = [span for span in exporter.get_finished_spans() if span.name == "POST"]
    assert [span.parent and span.parent.span_id for span in posts] == [outer.get_span_context().span_id] * 2


def test_without_a_tracer_nothing_is_made() -> None:
    tracing = Tracing()
    assert tracing.begin("not even a URL") is None
    tracing.end(None, attempts=1, status=200, code="TIMEOUT.DEADLINE")


def test_what_a_sampler_leaves_out_is_left_out(exporter: InMemorySpanExporter) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"))
    tracing.end(tracing.begin(URL), attempts=1, status=200)
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h/", "http://h/"),
        ("https://h:8000", "https://h:8000"),
        ("http://u:p@h/a/b", "http://h/a/b"),
        ("http://u:p@x@h/a", "http://h/a"),
        ("http://token@[::1]:30000/v1?x=1", "http://[::1]:30000/v1"),
        ("HTTP://H/a#b", "http://H/a"),
    ],
)
def test_the_url_that_is_shown(url: str, shown: str) -> None:
    assert bare(url) == shown


def test_the_api_is_loaded_only_when_it_is_used_and_missed_in_plain_words() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from dispatch.posting.observe.tracing import Tracing
Tracing().begin("http://h/")
try:
    Tracing.of_this_process()
except Exception as error:
    print(error.code, error.detail)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "CONFIG.INVALID tracing needs a package: pip install 'failsoft[otel]'"


def test_of_this_process_works_where_nothing_is_set_up() -> None:
    tracing = Tracing.of_this_process()
    tracing.end(tracing.begin("http://h/"), attempts=1, status=200)
