"""Chaos: fixtures, and the tally of actors that were really killed, which must not be zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.tally import Tally
from tests.support.fixtures import events, make_pool, quiet_loop, shared_witness, witness

__all__ = ["events", "make_pool", "quiet_loop", "shared_witness", "tally", "witness"]

TALLY = Tally()
HERE = Path(__file__).parent
_ran: set[str] = set()


@pytest.fixture
def tally() -> Tally:
    return TALLY


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and "tests/chaos/" in report.nodeid:
        _ran.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _ran and TALLY.killed == 0 and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _ran and TALLY.killed == 0:
        return
    terminalreporter.write_line(f"actors really killed: {TALLY.killed}")
    if TALLY.killed == 0:
        terminalreporter.write_line("chaos that killed nothing proves nothing: failed")
