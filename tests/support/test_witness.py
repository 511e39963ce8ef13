"""The witness itself: what it counts as in flight at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.support.wait import until_sync
from tests.support.witness import Witness


@pytest.fixture
def witness() -> Iterator[Witness]:
    with Witness() as one:
        yield one


@contextlib.contextmanager
def stopped(witness: Witness) -> Iterator[None]:
    """It does nothing meanwhile; its kernel goes on taking what is sent to it."""
    os.kill(witness.pid, signal.SIGSTOP)
    try:
        until_sync(lambda: psutil.Process(witness.pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        os.kill(witness.pid, signal.SIGCONT)


def posted(witness: Witness) -> socket.socket:
    """A connection with a POST on it that is never answered."""
    connection = socket.create_connection(("127.0.0.1", witness.port))
    connection.sendall(b"POST /hang HTTP/1.1\r\nHost: witness\r\nContent-Length: 2\r\n\r\n{}")
    return connection


def test_all_that_are_there_at_once_are_its_peak(witness: Witness) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(posted(witness))
        until_sync(lambda: witness.counts()["in_flight"] == 5)
        assert witness.counts()["peak"] == 5
    until_sync(lambda: witness.counts()["in_flight"] == 0)
    with posted(witness):
        until_sync(lambda: witness.counts()["in_flight"] == 1)
        assert witness.counts()["peak"] == 5
        witness.reset()
        assert witness.counts()["peak"] == 1


def test_who_has_hung_up_before_it_was_read_is_not_there_with_who_came_then(witness: Witness) -> None:
    """The kernel has the whole of it, the end included, before the witness sees its beginning."""
    with posted(witness):
        until_sync(lambda: witness.counts()["in_flight"] == 1)
        with stopped(witness):
            for _ in range(3):
                posted(witness).close()
            later = posted(witness)
        with later:
            until_sync(lambda: witness.counts()["arrived"][""] == 5)
            until_sync(lambda: witness.counts()["in_flight"] == 2)
            assert witness.counts()["peak"] == 2
