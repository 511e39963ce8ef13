"""One of several processes that share an events file: ``python -m tests.protocol.writer PATH NAME N``."""

from __future__ import annotations

import sys
from pathlib import Path

from protocol import CodedError, Events


def main(path: str, name: str, count: str) -> None:
    with Events.to_file(Path(path), run="r1", role=name) as events:
        for n in range(int(count)):
            events.emit("writer.wrote", key=f"{name}/{n}", detail="x" * (n % 4000), n=n)
        events.emit("writer.done", level="error", error=CodedError("TASK.FAILED", name))


if __name__ == "__main__":
    main(*sys.argv[1:])
