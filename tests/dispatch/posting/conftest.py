"""Fixtures for posting: a witness, a pool on the session's Ray, and its events."""

from tests.support.fixtures import events, make_pool, quiet_loop, shared_witness, witness

__all__ = ["events", "make_pool", "quiet_loop", "shared_witness", "witness"]
