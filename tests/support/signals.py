"""Signals in tests: what children inherit from a shell that started the tests in the background."""

from __future__ import annotations

import signal


def no_signal_ignored() -> None:
    """To run in a child before its program: a shell ignores INT and QUIT for what it starts in the
    background, nohup(1) ignores HUP, and so would everything below them."""
    for which in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(which, signal.SIG_DFL)
