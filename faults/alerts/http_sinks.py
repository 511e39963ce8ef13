"""Sinks that post JSON: a plain webhook, and Prometheus Alertmanager.

Only what may help is tried again, a bounded number of times: no connection, 429 and 5xx. Any other
4xx says that the body or the URL is wrong, which a repetition does not change; and a webhook whose
answer is lost may have acted, so it is not asked twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import httpx
import msgspec
import tenacity

from faults.alerts.engine import Alert, Change
from faults.alerts.rules import SinkSettings, check_url
from faults.alerts.sinks import Sink, Terminal
from protocol import CodedError, catalogue

ATTEMPTS: Final = 4
"""Most times that one body is posted."""
MAX_WAIT: Final = 10.0
"""Longest wait between two attempts, in seconds, also when a Retry-After asks for more."""
RESEND: Final = 30.0
"""Seconds between repetitions of firing alerts to Alertmanager."""
BATCH: Final = 200
"""Most alerts in one repetition's body."""
_TIMEOUT: Final = httpx.Timeout(5.0)
_ATTEMPT: Final = 15.0  # seconds for one attempt: httpx's own limits start anew with every byte
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BODY: Final = 300  # bytes of an answer that are kept for the message


class _Failed(CodedError):
    """A post that failed; ``again`` says whether to try once more, ``wait`` after how many seconds."""

    again: bool = False
    wait: float = 0.0


_BACKOFF: Final = tenacity.wait_exponential(multiplier=0.2, max=MAX_WAIT) + tenacity.wait_random(0.0, 0.2)


def _pause(state: tenacity.RetryCallState) -> float:
    failed = state.outcome.exception() if state.outcome is not None else None
    asked = failed.wait if isinstance(failed, _Failed) else 0.0
    return min(max(_BACKOFF(state), asked), MAX_WAIT)


class _HttpSink(Sink):
    """Posts JSON to one URL with finite timeouts and bounded repetitions."""

    idempotent = False

    def __init__(self, kind: str, url: str, path: str = "") -> None:
        try:
            parsed = check_url(url)
        except ValueError as exc:
            raise CodedError(
                "CONFIG.INVALID", f"{kind}: {exc}; write http://host:port, for example http://127.0.0.1:9093"
            ) from exc
        if path:
            parsed = parsed.copy_with(path=parsed.path.rstrip("/") + path)
        # The name goes into logs: without user, password and query, where secrets lie.
        super().__init__(f"{kind} {parsed.scheme}://{parsed.netloc.decode()}{parsed.path}")
        self._url = parsed
        self._client: httpx.AsyncClient | None = None

    async def opened(self) -> None:
        """Open the client. No connection is kept alive: alerts are rare, and a server closes an idle
        connection just when the next alert is written to it."""
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits)

    async def closed(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.aclose()

    async def post(self, body: Any) -> None:
        """Post ``body`` as JSON. Raises CodedError when the last attempt failed."""
        content = msgspec.json.encode(body)
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=_pause,
            retry=tenacity.retry_if_exception(lambda exc: isinstance(exc, _Failed) and exc.again),
            reraise=True,
        ):
            with attempt:
                await self._post_once(content)

    async def _post_once(self, content: bytes) -> None:
        assert self._client is not None, "start() comes before the first delivery"
        headers = {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(_ATTEMPT),
                self._client.stream("POST", self._url, content=content, headers=headers) as reply,
            ):
                if reply.is_success:
                    return
                said = b""
                async for piece in reply.aiter_bytes(_BODY):
                    said = piece
                    break
        except TimeoutError as exc:
            raise self._failed("TIMEOUT.READ", f"no answer within {_ATTEMPT} s", self.idempotent) from exc
        except httpx.HTTPError as exc:
            again = isinstance(exc, _UNSENT) or (self.idempotent and isinstance(exc, httpx.TransportError))
            raise self._failed(_code_of(exc), f"{type(exc).__name__}: {exc}", again) from exc
        status = reply.status_code
        text = f"HTTP {status}: {said.decode('utf-8', 'replace')}"
        raise self._failed(
            _status_code(status), text, status == 429 or status >= 500, _retry_after(reply.headers)
        )

    def _failed(self, code: str, text: str, again: bool, wait: float = 0.0) -> _Failed:
        failed = _Failed(code, f"{self.name}: {text}")
        failed.again, failed.wait = again, wait
        return failed


def _code_of(exc: httpx.HTTPError) -> str:
    if isinstance(exc, httpx.ConnectTimeout | httpx.PoolTimeout):
        return "TIMEOUT.CONNECT"
    if isinstance(exc, httpx.TimeoutException):
        return "TIMEOUT.READ"
    return "TRANSPORT.CONNECT" if isinstance(exc, httpx.ConnectError) else "TRANSPORT.DISCONNECTED"


def _status_code(status: int) -> str:
    if status < 400:
        return "UPSTREAM.REDIRECT"
    if status == 429:
        return "BACKPRESSURE.RATE_LIMITED"
    return "REQUEST.REJECTED" if status < 500 else "UPSTREAM.SERVER_ERROR"


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that a Retry-After asks for; 0.0 for a date or anything else, which then has the
    ordinary wait."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


class Webhook(_HttpSink):
    """Posts ``{"version": "1", "status": "firing" | "resolved", "alert": {…}}``, the alert being
    `Alert` with its field names; times are unix seconds."""

    def __init__(self, url: str) -> None:
        super().__init__("webhook", url)

    async def deliver(self, change: Change) -> None:
        """Post the change."""
        status = "firing" if change.kind == "fired" else "resolved"
        await self.post({"version": "1", "status": status, "alert": change.alert})


class Alertmanager(_HttpSink):
    """Posts to Alertmanager's API v2, ``POST <base>/api/v2/alerts`` (its openapi.yaml; and
    prometheus.io/docs/alerting/latest/clients: "expected to continuously re-send alerts as long as
    they are still active").

    A firing alert is repeated every ``resend`` seconds with ``endsAt`` four times that ahead, as
    Prometheus does: when this process dies, or a resolve is lost, Alertmanager resolves by itself.
    For the same reason nothing is sent at `close` for what still fires. A resolved alert is sent
    with ``endsAt`` now. Only what fires is kept, so the engine's cap on groups bounds it."""

    idempotent = True  # the labels are the identity: the same alert twice is one alert

    def __init__(self, base_url: str, *, resend: float = RESEND) -> None:
        super().__init__("alertmanager", base_url, "/api/v2/alerts")
        if not (math.isfinite(resend) and resend > 0):
            raise CodedError(
                "CONFIG.INVALID", f"alertmanager: resend {resend} is not a number of seconds above 0"
            )
        self.resend_every = resend
        self._active: dict[tuple[object, ...], Alert] = {}

    def put(self, change: Change) -> None:
        """Take a change. What fires is noted here and not on delivery, so that a repetition makes
        up for a delivery that was dropped or failed."""
        alert = change.alert
        key = (alert.rule, *alert.group.items())
        if change.kind == "fired":
            self._active[key] = alert
        else:
            self._active.pop(key, None)
        super().put(change)

    async def deliver(self, change: Change) -> None:
        """Post the change."""
        await self.post([self._wire(change.alert)])

    async def resend(self) -> None:
        """Repeat everything that fires."""
        active = list(self._active.values())
        for start in range(0, len(active), BATCH):
            await self.post([self._wire(alert) for alert in active[start : start + BATCH]])

    def _wire(self, alert: Alert) -> dict[str, Any]:
        # Alertmanager's own clock decides what is over, so both ends are of the wall clock; and it
        # refuses an alert that ends before it starts.
        now = time.time()
        ends = now if alert.resolved_at is not None else now + 4 * self.resend_every
        annotations = {
            "summary": alert.summary,
            "detail": alert.detail,
            "id": alert.id,
            "runbook": _runbook(alert),
        }
        return {
            "labels": labels_of(alert),
            "annotations": {name: text for name, text in annotations.items() if text},
            "startsAt": _rfc3339(min(alert.fired_at, now)),
            "endsAt": _rfc3339(ends),
        }


def labels_of(alert: Alert) -> dict[str, str]:
    """The labels that identify an alert: alertname, code, key, run, severity, and the fields it is
    grouped by (``data.x`` becomes ``data_x``: a label's name has letters, digits and ``_``).
    Empty ones are left out, for Alertmanager takes an empty label as a missing one."""
    labels = {path.replace(".", "_").replace("-", "_"): value for path, value in alert.group.items()}
    labels |= {"code": alert.code or "", "key": alert.key or "", "run": alert.run or ""}
    labels |= {"alertname": alert.rule, "severity": alert.severity}
    return {name: value for name, value in sorted(labels.items()) if value}


def _runbook(alert: Alert) -> str:
    try:
        return catalogue.entry(alert.code or "").runbook
    except ValueError:  # no code, or a foreign word in its place
        return ""


def _rfc3339(ts: float) -> str:
    return datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def build_sinks(
    settings: SinkSettings,
    *,
    webhook: Sequence[str] = (),
    alertmanager: Sequence[str] = (),
    terminal: Terminal | None = None,
    resend: float = RESEND,
) -> list[Sink]:
    """The sinks that a rules file names, and those given besides, each URL once. ``terminal`` stands
    in for the one that the file switches on; ``resend`` is in seconds."""
    sinks: list[Sink] = [terminal if terminal is not None else Terminal()] if settings.terminal else []
    sinks += [Webhook(url) for url in dict.fromkeys((*settings.webhook, *webhook))]
    sinks += [
        Alertmanager(url, resend=resend) for url in dict.fromkeys((*settings.alertmanager, *alertmanager))
    ]
    return sinks
