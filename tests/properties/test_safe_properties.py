"""What a failure carries is safe to carry: JSON, bounded, and without the secrets that have a known place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import msgspec
from hypothesis import strategies as st

from protocol import CodedError, defuse, scan
from protocol.safe import MAX_DEPTH, MAX_ITEMS, MAX_TEXT, cap, clean, json_safe, scrub
from tests.properties.examples import prop
from tests.properties.hostile import CONTAINERS, VALUES, panicking_values, values
from tests.properties.strategies import PIECES, UNSIGNED, tokens
from tests.properties.test_hostile_properties import answered

# -- JSON-safe and bounded

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**62, max_value=2**70),
    st.floats(),
    st.text(max_size=10),
    st.binary(max_size=4),
)
plain = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(), st.none()), inner, max_size=3),
        st.tuples(inner),
    ),
    max_leaves=6,
)


def encodable(made: Any) -> None:
    text = json.dumps(made, allow_nan=False)
    assert json.loads(text) == made
    assert msgspec.json.decode(msgspec.json.encode(made)) == made


def bounded(made: Any, depth: int = MAX_DEPTH) -> None:
    if isinstance(made, dict):
        assert depth > 0
        assert len(made) <= MAX_ITEMS + 1
        for key, value in made.items():
            assert type(key) is str
            assert len(key) <= 128
            bounded(value, depth - 1)
    elif isinstance(made, list):
        assert depth > 0
        assert len(made) <= MAX_ITEMS + 1
        for value in made:
            bounded(value, depth - 1)
    elif isinstance(made, str):
        assert len(made) <= MAX_TEXT
    else:
        assert made is None or type(made) in (bool, int, float)


@prop(plain)
def test_plain_values_become_json(value: Any) -> None:
    made = json_safe(value)
    encodable(made)
    bounded(made)
    assert json_safe(made) == made or "token" in str(made) or depth_of(made) == MAX_DEPTH


def depth_of(made: Any) -> int:
    inner = made.values() if isinstance(made, dict) else made if isinstance(made, list) else ()
    return 1 + max(map(depth_of, inner), default=0) if isinstance(made, dict | list) else 0


# Not in wide lists: their product is a matter of time and of memory, see test_bounds.
containers = st.lists(st.sampled_from(sorted(CONTAINERS.keys() - {"wide list"})), max_size=3)


@prop(values, containers)
def test_hostile_values_become_json(value: str, put_into: list[str]) -> None:
    thing = VALUES[value]()
    for name in put_into:
        thing = CONTAINERS[name](thing)
    made = answered(json_safe, thing)
    encodable(made)
    bounded(made)


@prop(values, containers)
def test_hostile_values_become_text(value: str, put_into: list[str]) -> None:
    becomes_text(value, put_into)


@prop(panicking_values, containers)
def test_values_that_panic_become_json_and_text(value: str, put_into: list[str]) -> None:
    becomes_text(value, put_into)
    thing = VALUES[value]()
    for name in put_into:
        thing = CONTAINERS[name](thing)
    encodable(answered(json_safe, thing))


def becomes_text(value: str, put_into: list[str]) -> None:
    thing = VALUES[value]()
    for name in put_into:
        thing = CONTAINERS[name](thing)
    made = answered(clean, thing)
    assert type(made) is str
    assert made.encode().decode() == made


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(
                    "Authorization",
                    ": ",
                    "Bearer ",
                    "basic ",
                    "bearer",
                    "api-key",
                    "x-api-key=",
                    "Cookie: ",
                    "a=b; ",
                ),
                *(
                    "https://",
                    "redis://:",
                    "user:pw@",
                    "@",
                    "/",
                    "?",
                    "&",
                    "token=",
                    "signature=",
                    "'",
                    '"',
                    "[redacted]",
                ),
                *(
                    "API_KEY=",
                    "HF_TOKEN: ",
                    "SECRET",
                    "abcdefgh",
                    "negotiate ",
                    "set-cookie",
                    "\n",
                    " ",
                    "{",
                    "}",
                    ",",
                    "b'",
                ),
                *(";", "proxy-authorization", "x" * 600, "s" * 5000),
            ]
        ),
        st.text(max_size=4),
        st.sampled_from(PIECES),
    ),
    max_size=10,
).map("".join)


@prop(texts)
def test_scrubbing_twice_is_scrubbing_once(text: str) -> None:
    once = scrub(text)
    assert scrub(once) == once


@prop(texts, st.integers(64, 10_000))
def test_cut_to_the_limit(text: str, limit: int) -> None:
    made = cap(text, limit)
    assert len(made) <= limit
    assert made == text or (len(text) > limit and "characters cut" in made)
    cleaned = clean(text, limit)
    assert len(cleaned) <= limit
    assert cleaned.encode().decode() == cleaned


@prop(st.lists(st.one_of(tokens, st.sampled_from(PIECES), texts), max_size=5).map("".join))
def test_cleaning_does_not_arm_what_was_dead(text: str) -> None:
    dead = defuse(text)
    for made in (clean(dead), clean(dead, 128), scrub(dead), cap(dead, 100)):
        assert scan(made, key=UNSIGNED) == []


# -- secrets

_URLSAFE: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/="
secrets = st.builds(
    # Marked at both ends, so that a piece that is found came out of it and not of the place or of what
    # we print ourselves ("[5949 characters cut]").
    lambda text, times: f"Zq7{text * times}7qZ",
    st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=8, max_size=24),
    st.sampled_from([1, 1, 1, 40, 300]),
)

PLACES: Final[tuple[str, ...]] = (
    # the headers that authorize, as programs print them
    *(
        "Authorization: Bearer {}",
        "authorization: bearer {}",
        "AUTHORIZATION: BEARER {}",
        "Authorization: {}",
    ),
    *("Authorization: Basic {}", "Authorization: Token {}", "Proxy-Authorization: Basic {}", "Bearer {}"),
    *(
        "Authorization:Bearer {}",
        "Authorization = Bearer {}",
        "authorization=Bearer {}",
        "Authorization:  {}",
    ),
    *("{{'Authorization': 'Bearer {}'}}", '{{"authorization": "Bearer {}"}}', '{{"authorization":"{}"}}'),
    *("(b'Authorization', b'Bearer {}')", "('authorization', 'Bearer {}')", "[b'authorization', b'{}']"),
    *(
        "Headers({{'host': 'h', 'authorization': 'Bearer {}'}})",
        "x-api-key: {}",
        "X-API-Key: {}",
        "api-key: {}",
    ),
    *("{{'x-api-key': '{}'}}", "-H 'Authorization: Bearer {}'", 'curl -H "x-api-key: {}" http://h/'),
    *(
        "> Authorization: Bearer {}\r\n> Accept: */*",
        "Authorization: Digest {}",
        "Authorization: Negotiate {}",
    ),
    # cookies
    *(
        "Cookie: session={}",
        "cookie: a=b; session={}; c=d",
        "Set-Cookie: id={}; Path=/; HttpOnly",
        "cookie={}",
    ),
    *("{{'Cookie': 'session={}'}}", '{{"set-cookie": "id={}; Path=/"}}', "(b'Cookie', b'session={}')"),
    # URLs
    *(
        "http://user:{}@host/path",
        "https://user:{}@host:8000/v1",
        "redis://:{}@host:6379/0",
        "https://{}@host/",
    ),
    *(
        "postgresql+asyncpg://u:{}@db/x",
        "error at http://u:{}@h: refused",
        "'http://u:{}@h/'",
        "http://u:p@{}@h/",
    ),
    *(
        "http://h/?token={}",
        "http://h/?a=b&access_token={}&c=d",
        "https://h/?api_key={}",
        "https://h/?apikey={}",
    ),
    *("https://h/?X-Amz-Signature={}&x=y", "https://h/?password={}", "GET /v1?hf_token={} HTTP/1.1"),
    *("https://h/?client_secret={}#frag", "'https://h/?token={}'"),
    # variables
    *(
        "OPENAI_API_KEY={}",
        "HF_TOKEN={}",
        "export WANDB_API_KEY={}",
        "AWS_SECRET_ACCESS_KEY={}",
        "DB_PASSWORD={}",
    ),
    *("environ({{'HF_TOKEN': '{}', 'HOME': '/root'}})", '{{"OPENAI_API_KEY": "{}"}}', "MY_CREDENTIALS={}"),
    *("env: RAY_AUTH_TOKEN={} PATH=/bin", 'HF_TOKEN="{}"', "HF_TOKEN='{}'"),
)

AROUND: Final[dict[str, Callable[[str], str]]] = {
    "bare": lambda t: t,
    "in a line": lambda t: f"2026-01-01 ERROR engine said: {t} (request 7)",
    "between lines": lambda t: f"first\n{t}\nlast",
    "repr": repr,
    "json": json.dumps,
    "an exception's": lambda t: str(ValueError(t)),
    "a key error's": lambda t: str(KeyError(t)),
    "long": lambda t: "x " * 1500 + t + " y" * 1500,
}


@prop(secrets, st.sampled_from(PLACES), st.sampled_from(sorted(AROUND)))
def test_a_secret_in_a_known_place_does_not_come_out(secret: str, place: str, around: str) -> None:
    text = AROUND[around](place.format(secret))
    for made in (scrub(text), clean(text), clean(text, 128), json_safe({"detail": text})["detail"]):
        gone(secret, made)
    gone(secret, CodedError("TASK.FAILED", text, {"said": [text]}).__str__())


def gone(secret: str, text: str) -> None:
    assert secret[:7] not in text
    assert secret[-8:] not in text
    assert quote(secret) not in text


NAMES: Final = (
    *("authorization", "Authorization", "Proxy-Authorization", "cookie", "Set-Cookie", "password", "passwd"),
    *("secret", "client_secret", "token", "access_token", "api_key", "apiKey", "api-key", "x-api-key"),
    *("credential", "HF_TOKEN", "OPENAI_API_KEY", "aws_credentials"),
)


structured = st.lists(
    st.sampled_from(["list", "tuple", "dict", "dict by number", "problem", "data"]), max_size=5
)


@prop(secrets, st.sampled_from(NAMES), structured)
def test_a_secret_under_a_name_does_not_come_out(secret: str, name: str, put_into: list[str]) -> None:
    thing: Any = {"before": 1, name: secret, "after": [2]}
    for container in put_into:
        thing = CONTAINERS[container](thing)
    gone(secret, json.dumps(answered(json_safe, thing)))
