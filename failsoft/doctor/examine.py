"""Running the checks: side by side, each with its deadline, none in the way of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from failsoft.doctor.finding import Check, Examined, Finding
from protocol.safe import clean


def examine(checks: Sequence[Check], examined: Examined) -> list[Finding]:
    """All findings, in the order of ``checks``. A check that raises or does not end is a finding
    itself. Takes as long as the slowest check, and its deadline at most."""
    began = time.monotonic()
    runs = [_Run(check, examined) for check in checks]
    return [finding for run in runs for finding in run.findings(began)]


class _Run:
    """One check in its thread. A daemon: one that hangs, in a file system that is gone, say, cannot be
    ended, and must not keep the command from ending."""

    def __init__(self, check: Check, examined: Examined) -> None:
        self._check, self._examined = check, examined
        self._found: list[Finding] = []
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"doctor {check.name}")
        self._thread.start()

    def findings(self, began: float) -> list[Finding]:
        check = self._check
        self._thread.join(max(0.0, began + check.deadline - time.monotonic()))
        if not self._thread.is_alive():
            return self._found
        hangs = Finding(
            check=check.name,
            severity="warning",
            what=f"not checked: no answer within {check.deadline:g} s",
            fix="what it looks at hangs (a file system, a driver, Ray): `dmesg -T`, then try again",
        )
        return [hangs]

    def _work(self) -> None:
        try:
            self._found = self._check.run(self._examined)
        except Exception as exc:  # noqa: BLE001 - a check that fails is a finding, and stops no other one
            what = f"not checked: the check failed with {type(exc).__name__}: {clean(exc, 300)}"
            fix = "this is failsoft's own fault unless the text says otherwise: report it"
            self._found = [Finding(check=self._check.name, severity="warning", what=what, fix=fix)]
