"""A span a POST, through the OpenTelemetry API, for programs that trace. Needs ``failsoft[otel]``.

A span holds where to, how often and how it ended; never a payload, a header, a reply or an error's text,
for those quote prompts. The pool asks for nothing where it has no `Tracing`::

    span = tracing.begin(url) if tracing is not None else None
    ...
    if span is not None:
        tracing.end(span, attempts=2, status=200)
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from dispatch.posting.request import KNOWN_URLS
from protocol import CodedError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

NAME: Final = "POST"
"""What every span is called: a URL in a span's name would make a kind of span of each."""


class Tracing:
    """Makes the spans, with ``tracer``; with None it makes none and needs no package.

    Raises CodedError CONFIG.INVALID where OpenTelemetry's API is not installed."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        if tracer is not None:
            trace = _api()
            self._client = trace.SpanKind.CLIENT
            self._failed = trace.StatusCode.ERROR

    @classmethod
    def of_this_process(cls) -> Self:
        """With the tracer of the provider that this process has set (none set: spans that nobody sees)."""
        return cls(_api().get_tracer("failsoft"))

    def begin(self, url: str) -> Span | None:
        """A span below the caller's current one. None where there is no tracer."""
        if self._tracer is None:
            return None
        return self._tracer.start_span(NAME, kind=self._client, attributes={"url.full": bare(url)})

    def end(self, span: Span | None, *, attempts: int, status: int | None = None, code: str = "") -> None:
        """The POST of ``span`` has ended: with a reply, or with the failure ``code``. ``status`` is the
        last HTTP status, where one came."""
        if span is None:
            return
        span.set_attribute("failsoft.attempts", attempts)
        if status:
            span.set_attribute("http.response.status_code", status)
        if code:
            span.set_attribute("failsoft.code", str(code))
            if not code.startswith("CANCEL."):  # its caller went away: nothing has failed
                span.set_status(self._failed, str(code))
        span.end()


@lru_cache(KNOWN_URLS)
def bare(url: str) -> str:
    """``url`` without credentials, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _api() -> Any:
    try:
        from opentelemetry import trace
    except ImportError as exc:
        detail = "tracing needs a package: pip install 'failsoft[otel]'"
        raise CodedError.from_exception(exc, "CONFIG.INVALID", detail) from exc
    return trace
