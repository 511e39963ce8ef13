"""What travels between a pool and a poster comes back as it went, or as the error that says why not."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.posting.posters import wire
from dispatch.posting.posters.wire import pack_reply, unpack_reply
from dispatch.posting.request import Answer
from protocol import CodedError


def answer(data: Any) -> Answer:
    return Answer(200, {"content-type": "application/json"}, data, 0.1)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("data", [None, 2**80, "\ud800", {"a": [1.5, None, True]}, nested(50)], ids=type)
def test_a_reply_comes_as_it_went(data: Any) -> None:
    refused = CodedError("UPSTREAM.SERVER_ERROR", "no", {"status": 500})
    number, outcomes = unpack_reply(pack_reply(7, [(1, answer(data)), (2, refused)]))
    assert number == 7
    assert outcomes[0] == (1, answer(data))
    attempt, error = outcomes[1]
    assert attempt == 2
    assert isinstance(error, CodedError)
    assert (error.id, error.data) == (refused.id, refused.data)


@pytest.mark.parametrize(
    "bad",
    [answer(nested(20_000)), answer(lambda: None), CodedError("UPSTREAM.BAD_BODY", "x", {"f": lambda: None})],
    ids=["too deep", "no data", "an error's data"],
)
def test_one_that_cannot_be_packed_takes_no_other_with_it(bad: Any) -> None:
    number, outcomes = unpack_reply(pack_reply(3, [(1, answer("good")), (2, bad), (3, answer("too"))]))
    assert number == 3
    assert [outcomes[0], outcomes[2]] == [(1, answer("good")), (3, answer("too"))]
    attempt, error = outcomes[1]
    assert attempt == 2
    assert isinstance(error, CodedError)
    assert error.code == "UPSTREAM.BAD_BODY"


def test_memory_that_ends_while_packing_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    real = wire.pickle.dumps

    def short(value: Any, protocol: int) -> bytes:
        if "large" in repr(value):
            raise MemoryError
        return real(value, protocol)

    monkeypatch.setattr(wire.pickle, "dumps", short)
    _, outcomes = unpack_reply(pack_reply(1, [(1, answer("large")), (2, answer("small"))]))
    assert outcomes[1] == (2, answer("small"))
    assert isinstance(outcomes[0][1], CodedError)
    assert outcomes[0][1].code == "NODE.OUT_OF_MEMORY"
