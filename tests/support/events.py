"""Reading back the events that a pool wrote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from protocol.events import KEYS


class EventFile:
    """The events of one file, each checked to have exactly the fixed keys."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[dict[str, Any]]:
        out = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            event = json.loads(line)
            assert tuple(event) == KEYS, f"keys of {event}"
            out.append(event)
        return out

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.all() if event["event"] in names]

    def retries(self) -> Counter[str]:
        """How often each request was sent again, by request id."""
        return Counter(event["key"] for event in self.named("post.retried"))
