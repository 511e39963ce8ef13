"""How many actors were really killed: an actor counts once its very process is known to be gone."""

from __future__ import annotations

from dispatch.processes import same_process


class Tally:
    """Processes of actors that a test saw alive, and later saw gone (pid and start time)."""

    def __init__(self) -> None:
        self._gone: set[tuple[int, float]] = set()

    @property
    def killed(self) -> int:
        return len(self._gone)

    def gone(self, pid: int, create_time: float) -> bool:
        """Whether that process is gone; if so it is counted, once."""
        if same_process(pid, create_time) is not None:
            return False
        self._gone.add((pid, create_time))
        return True
