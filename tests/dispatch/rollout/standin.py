"""A fleet that the test moves by hand: what routing needs of an `EngineFleet`, and no more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from dispatch.engines import EngineStatus
from protocol import Code


class StandIn:
    """What routing needs of a fleet, moved by hand."""

    def __init__(self, *engines: EngineStatus) -> None:
        self.now = {e.key: e for e in engines}
        self.reports: list[tuple[str, str]] = []
        self._callbacks: list[Callable[[EngineStatus], None]] = []

    def engines(self) -> tuple[EngineStatus, ...]:
        return tuple(self.now.values())

    def on_change(self, callback: Callable[[EngineStatus], None]) -> Callable[[], None]:
        self._callbacks.append(callback)

        def forget() -> None:
            with suppress(ValueError):
                self._callbacks.remove(callback)

        return forget

    def report(self, url: str, fault_code: Code | str) -> None:
        self.reports.append((url, str(fault_code)))

    def becomes(self, engine: EngineStatus) -> None:
        self.now[engine.key] = engine
        for callback in list(self._callbacks):
            callback(engine)

    @property
    def followers(self) -> int:
        return len(self._callbacks)


def engine(number: int, url: str, state: str = "ready", version: str | None = None) -> EngineStatus:
    return EngineStatus(key=f"engine/{number}", url=url, state=state, weight_version=version)  # type: ignore[arg-type]
