"""The two dialects, as requests and as judged replies. A 200 is not a sample."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.engines.dialect import PATHS, Api, Generated, Sampling, read, request
from protocol import CodedError, mint, scan
from tests.dispatch.embedded.engine_under_test import EngineUnderTest

WHERE = "http://127.0.0.1:1/generate"
APIS: tuple[Api, ...] = ("sglang", "openai")


def sglang(text: Any = "abc", reason: Any = "stop", **meta: Any) -> dict[str, Any]:
    """An SGLang reply; its finish_reason is an object there."""
    finish = {"type": reason} if isinstance(reason, str) else reason
    return {"text": text, "meta_info": {"finish_reason": finish, "completion_tokens": 3, **meta}}


def openai(text: Any = "abc", reason: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}], **more}


def reply(api: Api, text: str = "abc", reason: Any = "stop") -> dict[str, Any]:
    return sglang(text, reason) if api == "sglang" else openai(text, reason)


def refused(api: Api, data: Any) -> CodedError:
    with pytest.raises(CodedError) as caught:
        read(api, data, WHERE)
    return caught.value


# ---- requests


def test_request_sglang() -> None:
    body = request(
        "sglang", "1 + 1 =", Sampling(7, 0.5, 0.9, ("\n",), 3), model="m", request_id="r", stream=True
    )
    assert body == {
        "text": "1 + 1 =",
        "rid": "r",
        "stream": True,
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["\n"],
            "sampling_seed": 3,
        },
    }


def test_request_openai() -> None:
    body = request(
        "openai", "1 + 1 =", Sampling(7, 0.5, 0.9, ("\n",), 3), model="m", request_id="r", stream=True
    )
    assert body == {
        "prompt": "1 + 1 =",
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "stop": ["\n"],
        "seed": 3,
        "stream": True,
    }


@pytest.mark.parametrize("api", APIS)
def test_request_leaves_out_what_was_not_asked_for(api: Api) -> None:
    body = request(api, "x", Sampling(), model="", request_id="r", stream=False)
    everything = {**body, **body.get("sampling_params", {})}
    assert not {"model", "stream", "stop", "seed", "sampling_seed"} & everything.keys()


@pytest.mark.parametrize("api", APIS)
def test_seed_zero_is_a_seed(api: Api) -> None:
    body = request(api, "x", Sampling(seed=0), model="", request_id="r", stream=False)
    everything = {**body, **body.get("sampling_params", {})}
    assert everything["sampling_seed" if api == "sglang" else "seed"] == 0


# ---- what is a sample


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("api", APIS)
def test_whole_reply(api: Api, reason: str) -> None:
    made = read(api, reply(api, "abc", reason), WHERE)
    assert (made.text, made.finish_reason) == ("abc", reason)


def test_counts_and_version() -> None:
    made = read("sglang", sglang(prompt_tokens=5, weight_version="v7"), WHERE)
    assert made == Generated("abc", "stop", 5, 3, "v7")
    made = read("openai", openai(usage={"prompt_tokens": 5, "completion_tokens": 3}), WHERE)
    assert made == Generated("abc", "stop", 5, 3, None)


@pytest.mark.parametrize("count", [None, "3", -1, True, 2.5, 2**80, []])
def test_a_count_that_is_none_is_zero(count: Any) -> None:
    """What is written must be readable: a count that no 64-bit reader takes is no count."""
    for api, data in (
        ("sglang", sglang(prompt_tokens=count)),
        ("openai", openai(usage={"prompt_tokens": count})),
    ):
        made = read(api, data, WHERE)  # type: ignore[arg-type]
        assert made.prompt_tokens == 0
        msgspec.json.encode(made)


def test_sglang_finish_reason_as_plain_text() -> None:
    """Older SGLang sends a word where the newer one sends an object."""
    assert read("sglang", {"text": "a", "meta_info": {"finish_reason": "length"}}, WHERE).text == "a"


def test_sglang_stream_is_cumulative() -> None:
    events = [sglang("a", None), sglang("ab", None), sglang("abc", "stop")]
    assert read("sglang", events, WHERE).text == "abc"


def test_openai_stream_is_deltas() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    made = read("openai", [openai("a", None), openai("b", None), openai("c", "length"), usage], WHERE)
    assert made == Generated("abc", "length", 2, 3)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_real_reply(api: Api, stream: bool, shared: EngineUnderTest) -> None:
    """The embedded engine's own replies, and a stream's text equal to the plain one's."""
    body = request(api, "The harbour", Sampling(24, 1.0, seed=5), model="m", request_id="r", stream=stream)
    answer = shared.post(PATHS[api], body).raise_for_status()
    if stream:
        lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        data: Any = [msgspec.json.decode(line) for line in lines]
    else:
        data = answer.json()
    plain = shared.generate("The harbour", max_new_tokens=24, seed=5).json()
    assert read(api, data, shared.url).text == plain["text"]


# ---- what is none


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_abort(api: Api, stream: bool) -> None:
    last = reply(api, "abc", "abort")
    error = refused(api, [reply(api, "ab", None), last] if stream else last)
    assert error.code == "UPSTREAM.ABORTED"
    assert WHERE in error.detail
    assert error.data["characters"] > 0  # how much was lost, and not the text: it is no sample


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_no_end(api: Api, stream: bool) -> None:
    last = reply(api, "abc", None)
    assert refused(api, [reply(api, "ab", None), last] if stream else last).code == "UPSTREAM.TRUNCATED"


@pytest.mark.parametrize("api", APIS)
def test_an_empty_stream(api: Api) -> None:
    assert refused(api, []).code == "UPSTREAM.TRUNCATED"


@pytest.mark.parametrize("where", ["alone", "first", "last"])
@pytest.mark.parametrize("api", APIS)
def test_error_under_200(api: Api, where: str) -> None:
    error, good = {"error": {"message": "CUDA is gone", "code": 500}}, reply(api)
    data = {"alone": error, "first": [error, good], "last": [good, error]}[where]
    found = refused(api, data)
    assert found.code == "UPSTREAM.STREAM_ERROR"
    assert "CUDA is gone" in found.detail


@pytest.mark.parametrize("api", APIS)
def test_an_error_of_null_is_none(api: Api) -> None:
    assert read(api, {**reply(api), "error": None}, WHERE).text == "abc"


@pytest.mark.parametrize("reason", ["error", "content_filter", "tool_calls", "weird"])
@pytest.mark.parametrize("api", APIS)
def test_an_end_that_is_no_sample(api: Api, reason: str) -> None:
    found = refused(api, reply(api, "abc", reason))
    assert found.code == "UPSTREAM.STREAM_ERROR"
    assert reason in found.detail


@pytest.mark.parametrize(
    "data",
    [None, 0, "text", {}, [1], [None], {"text": "a"}, {"choices": {}}, {"result": []}, [[]]],
    ids=repr,
)
@pytest.mark.parametrize("api", APIS)
def test_wrong_shape(api: Api, data: Any) -> None:
    found = refused(api, data)
    assert found.code == "UPSTREAM.BAD_BODY"
    assert WHERE in found.detail


@pytest.mark.parametrize("choice", [None, 3, {}, {"text": None}, {"message": {"content": "a"}}], ids=repr)
def test_openai_wrong_choice(choice: Any) -> None:
    assert refused("openai", {"choices": [choice]}).code == "UPSTREAM.BAD_BODY"


@pytest.mark.parametrize("meta", [None, 3, []], ids=repr)
def test_sglang_wrong_meta(meta: Any) -> None:
    assert refused("sglang", {"text": "a", "meta_info": meta}).code == "UPSTREAM.BAD_BODY"
    assert refused("sglang", {"text": 3, "meta_info": {}}).code == "UPSTREAM.BAD_BODY"


def test_the_other_dialect_is_a_wrong_shape() -> None:
    assert refused("sglang", openai()).code == "UPSTREAM.BAD_BODY"
    assert refused("openai", sglang()).code == "UPSTREAM.BAD_BODY"


@pytest.mark.parametrize("api", APIS)
def test_what_an_engine_says_cannot_pass_for_a_code(api: Api) -> None:
    """A policy that learns to print an infrastructure failure must not earn retries by it."""
    token = mint("NODE.PREEMPTED")
    for data in ({"error": token}, {"said": token}, reply(api, "abc", token), [token]):
        assert list(scan(refused(api, data).detail)) == []


@pytest.mark.parametrize("api", APIS)
def test_foreign_text_that_cannot_be_encoded(api: Api) -> None:
    """Python's lenient decoder lets halves of surrogate pairs, NaN and huge numbers through."""
    for odd in ("\ud800", math.nan, 10**400, {"\udfff": 1}):
        assert refused(api, {"error": odd}).code == "UPSTREAM.STREAM_ERROR"
        assert refused(api, {"said": odd}).code == "UPSTREAM.BAD_BODY"


@pytest.mark.parametrize("api", APIS)
def test_deep_nesting(api: Api) -> None:
    deep: Any = "x"
    for _ in range(900):  # as deep as the decoders let pass
        deep = [deep]
    assert refused(api, {"said": deep}).code == "UPSTREAM.BAD_BODY"


_texts = st.text(max_size=8) | st.sampled_from(["stop", "abort", "length", "\ud800"])
_names = st.sampled_from(
    [
        "text",
        "meta_info",
        "finish_reason",
        "type",
        "choices",
        "usage",
        "error",
        "prompt_tokens",
        "weight_version",
    ]
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names | _texts, inner, max_size=5),
    max_leaves=20,
)


def _object(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional={k: v | _json for k, v in fields.items()})


_end = _texts | st.none()
_nearly_sglang = _object(
    {
        "text": _texts,
        "meta_info": _object({"finish_reason": _end | _object({"type": _end})}),
        "error": st.none(),
    }
)
_nearly_openai = _object(
    {"choices": st.lists(_object({"text": _texts, "finish_reason": _end}), max_size=2), "error": st.none()}
)
_nearly = _json | _nearly_sglang | _nearly_openai


@given(api=st.sampled_from(APIS), data=_nearly | st.lists(_nearly, max_size=4))
def test_anything_is_a_sample_or_a_coded_error(api: Api, data: Any) -> None:
    try:
        made = read(api, data, WHERE)
    except CodedError as error:
        found = error
    else:
        found = None
    if found is not None:
        assert found.code.family == "UPSTREAM"
        msgspec.json.encode(found.detail)
    else:
        assert made.finish_reason in ("stop", "length")
        assert isinstance(made.text, str)
