"""What travels between a pool and a poster: many requests in one call, many answers in one reply.

Neither order nor delivery is taken for granted: an async actor keeps no order of calls, and a call or its
reply may be lost while its poster lives on (ray's ActorUnavailableError). So attempts are numbered and a
number seen before is not run again, and replies are numbered and kept by the poster until acknowledged.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import msgspec

from dispatch.posting.request import Answer, Item
from faults import name_of
from protocol import CodedError

LARGE: Final = 100_000
"""Bytes of a message from which it goes through the object store, by reference. Ray itself draws the
line there (``max_direct_call_object_size``)."""

Outcome = Answer | CodedError


class Message(msgspec.Struct, array_like=True):
    """To the poster: ``items`` with what is left of each one's deadline, the numbers of the replies that
    came, and whether a reply may have been lost (``again``: send anew what was not acknowledged)."""

    items: list[tuple[Item, float]]
    acknowledged: list[int]
    again: bool


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def unpack(message: bytes) -> Message:
    """The message that `pack` packed."""
    return _decoder.decode(message)


def pack_reply(number: int, outcomes: list[tuple[int, Outcome]]) -> bytes:
    """A reply's number and the outcomes of attempts, by their numbers. One that cannot be packed goes as the
    error that says so, and takes no other with it."""
    # Pickled, because JSON holds what msgpack cannot: integers of any size, and lone surrogates.
    rows: list[Any] = [_row(attempt, one) for attempt, one in outcomes]
    try:
        return pickle.dumps((number, rows), pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - too deep a nesting, no memory: whatever it is, found row by row
        rows = [_packable(row) for row in rows]
        return pickle.dumps((number, rows), pickle.HIGHEST_PROTOCOL)


def _row(attempt: int, one: Outcome) -> Any:
    if isinstance(one, CodedError):
        return attempt, one
    return attempt, one.status, one.headers, one.data, one.seconds


def _packable(row: Any) -> Any:
    try:
        pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
    except Exception as exc:  # noqa: BLE001 - whatever it is, its caller has to hear of it
        code = name_of(exc) or "UPSTREAM.BAD_BODY"
        detail = f"the reply cannot be handed on from the poster: {type(exc).__name__}: {exc}"
        return row[0], CodedError(code, detail)
    return row


def unpack_reply(reply: bytes) -> tuple[int, list[tuple[int, Outcome]]]:
    """The number and the outcomes that `pack_reply` packed."""
    number, rows = pickle.loads(reply)  # noqa: S301 - from our own poster, as Ray unpickles all it carries
    return number, [(row[0], row[1] if len(row) == 2 else Answer(*row[1:])) for row in rows]
