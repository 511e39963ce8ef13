"""Rules files: what is read, and that everything else is one error with place and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.alerts import default_rules, load_rules, parse_rules
from faults.alerts.rules import MAX_FILE
from protocol import CodedError
from tests.faults.alerts.helpers import POSTER, died, event

FULL = """
[sinks]
terminal = false
webhook = ["http://127.0.0.1:1/hook"]
alertmanager = ["https://am.example.org/base"]

[[rule]]
name = "failing"
type = "frequency"
match = { event = ["sample.*", "group.failed"], level = "error", data.kind = "reward", "data.n" = "3" }
group_by = ["run", "data.task"]
resolve = { event = "run.ended" }
count = 3
within = 60
severity = "info"
summary = "{run}: {data.task}"
"""


def test_a_full_file() -> None:
    file = parse_rules(FULL, "full.toml")
    (rule,) = file.rules
    assert (rule.name, rule.type, rule.count, rule.within, rule.resolve_after) == (
        "failing",
        "frequency",
        3,
        60.0,
        60.0,
    )
    assert rule.group_by == ("run", "data.task")
    assert dict(rule.match.globs) == {
        "event": ("sample.*", "group.failed"),
        "level": ("error",),
        "data.kind": ("reward",),
        "data.n": ("3",),
    }
    assert rule.match.matches(event("sample.failed", level="error", data={"kind": "reward", "n": 3}))
    assert file.sinks.terminal is False
    assert file.sinks.webhook == ("http://127.0.0.1:1/hook",)


def test_defaults() -> None:
    file = parse_rules('[[rule]]\nname = "a"\ntype = "any"\nmatch = { event = "*" }\n')
    (rule,) = file.rules
    assert (rule.group_by, rule.resolve, rule.resolve_after, rule.severity) == ((), None, None, "warning")
    assert file.sinks.terminal is True
    assert rule.summary.render(died()) == "poster.died poster/0 killed"


def test_the_default_rules() -> None:
    names = [rule.name for rule in default_rules().rules]
    assert names == ["poster-died", "engine-died", "samples-failing", "pool-error"]


RULE = '[[rule]]\nname = "a"\ntype = "any"\nmatch = { event = "x" }\n'
FREQUENCY = '[[rule]]\nname = "a"\ntype = "frequency"\nmatch = { event = "x" }\n'

BAD = {
    "syntax": ("a = 1\nb = [\n", "line 3"),
    "syntax in a line": (RULE + "oops\n", "line 5"),
    "twice": ("a = 1\na = 2\n", "line 2"),
    "empty": ("", "[[rule]]"),
    "top level": (RULE + "[other]\nx = 1\n", "'other'"),
    "rule is no list": ("rule = 3\n", "'rule'"),
    "unknown key": (RULE + "serverity = 'info'\n", "did you mean 'severity'?"),
    "missing name": ('[[rule]]\ntype = "any"\nmatch = { event = "x" }\n', "rule 1, key 'name': is missing"),
    "bad name": (RULE.replace('"a"', '"a b"'), "rule 1, key 'name'"),
    "long name": (RULE.replace('"a"', f'"{"a" * 65}"'), "rule 1, key 'name'"),
    "no type": ('[[rule]]\nname = "a"\nmatch = { event = "x" }\n', "rule 1 ('a'), key 'type'"),
    "bad type": (RULE.replace('"any"', '"all"'), "'type'"),
    "second rule": (RULE + RULE, "rule 2 ('a'), key 'name'"),
    "match is text": (RULE.replace('{ event = "x" }', '"x"'), "'match'"),
    "match is empty": (RULE.replace('{ event = "x" }', "{}"), "'match'"),
    "match of a number": (RULE.replace('"x"', "3"), "'match.event'"),
    "match of no pattern": (RULE.replace('"x"', "[]"), "'match.event'"),
    "match of mixed": (RULE.replace('"x"', '["x", 3]'), "'match.event'"),
    "match of an unknown field": (RULE.replace("event =", "evnt ="), "did you mean 'event'?"),
    "match of data": (RULE.replace("event =", "data ="), "'data' is no field"),
    "match of a table": (RULE.replace('"x"', "{}"), "'match.event'"),
    "match of a date": (RULE.replace('"x"', "2020-01-01"), "'match.event'"),
    "match of a deep fixed key": (RULE.replace("event =", "event.x ="), "'event.x' is no field"),
    "resolve": (RULE + 'resolve = { nope = "x" }\n', "key 'resolve'"),
    "resolve_after negative": (RULE + "resolve_after = -1\n", "'resolve_after'"),
    "resolve_after nan": (RULE + "resolve_after = nan\n", "'resolve_after'"),
    "resolve_after inf": (RULE + "resolve_after = inf\n", "'resolve_after'"),
    "resolve_after huge": (RULE + f"resolve_after = 1{'0' * 400}\n", "'resolve_after'"),
    "resolve_after bool": (RULE + "resolve_after = true\n", "'resolve_after'"),
    "number of 5000 digits": (RULE + f"resolve_after = 1{'0' * 5000}\n", "line"),
    "group_by text": (RULE + 'group_by = "key"\n', "'group_by'"),
    "group_by unknown": (RULE + 'group_by = ["kee"]\n', "did you mean 'key'?"),
    "severity": (RULE + 'severity = "bad"\n', "'severity'"),
    "summary field": (RULE + 'summary = "{nope}"\n', "'summary'"),
    "summary brace": (RULE + 'summary = "{"\n', "'summary'"),
    "any with count": (RULE + "count = 3\n", "'count'"),
    "any with within": (RULE + "within = 3\n", "'within'"),
    "frequency without count": (FREQUENCY + "within = 3\n", "'count'"),
    "frequency without within": (FREQUENCY + "count = 3\n", "'within'"),
    "count zero": (FREQUENCY + "within = 3\ncount = 0\n", "'count'"),
    "count large": (FREQUENCY + "within = 3\ncount = 10001\n", "'count'"),
    "count float": (FREQUENCY + "within = 3\ncount = 2.5\n", "'count'"),
    "within zero": (FREQUENCY + "within = 0\ncount = 2\n", "'within'"),
    "sink unknown": ("[sinks]\nslack = 'x'\n" + RULE, "'slack'"),
    "sink url": ("[sinks]\nwebhook = ['ftp://x']\n" + RULE, "'webhook'"),
    "sink url without host": ("[sinks]\nalertmanager = ['http://']\n" + RULE, "'alertmanager'"),
    "sink url odd": ("[sinks]\nalertmanager = ['http://a:b:c']\n" + RULE, "'alertmanager'"),
    "sink url with a port too high": ("[sinks]\nwebhook = ['http://a:90930']\n" + RULE, "1 to 65535"),
    "sinks is a list": ("sinks = []\n" + RULE, "'sinks'"),
    "nested": ("a = " + "[" * 5000 + "\n", "nested"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_error(text: str, says: str) -> None:
    with pytest.raises(CodedError) as caught:
        parse_rules(text, "my.toml")
    error = caught.value
    assert error.code == "CONFIG.INVALID"
    assert error.detail.startswith("my.toml")
    assert says in error.detail
    assert "\n" not in error.detail
    assert ";" in error.detail, "a remedy follows the complaint"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"# ok\n# \xff\n")
    (tmp_path / "large").write_bytes(b"#" * (MAX_FILE + 1))
    for name, says in {
        "none": "No such file",
        ".": "directory",
        "latin": "line 2",
        "large": "larger",
    }.items():
        with pytest.raises(CodedError) as caught:
            load_rules(tmp_path / name)
        assert caught.value.code == "CONFIG.INVALID"
        assert says in caught.value.detail
    with pytest.raises(CodedError, match="null"):
        load_rules("a\0b")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(POSTER)
    assert [rule.name for rule in load_rules(tmp_path / "r.toml").rules] == ["poster-died"]


def _parses_or_says_why(text: str) -> None:
    error = None
    try:
        parse_rules(text)
    except CodedError as exc:
        error = exc
    assert error is None or (error.code == "CONFIG.INVALID" and error.detail)


@given(st.text())
def test_no_text_raises_anything_else(text: str) -> None:
    _parses_or_says_why(text)


@given(st.data())
def test_no_damage_to_a_good_file_raises_anything_else(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(FULL)))
    end = data.draw(st.integers(start, min(len(FULL), start + 20)))
    _parses_or_says_why(FULL[:start] + data.draw(st.text(max_size=5)) + FULL[end:])


_KEYS = [
    "name",
    "type",
    "match",
    "group_by",
    "resolve",
    "resolve_after",
    "severity",
    "summary",
    "count",
    "within",
]
_WORDS = st.sampled_from(
    ["any", "frequency", "event", "data.x", "key", "{key}", "{", "[a-", "[!", "[[z-a]*", "info", ""]
)
_LEAVES = _WORDS | st.text(max_size=5) | st.booleans() | st.integers() | st.floats()
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["event", "code", "data", "x", "nope"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


@given(
    st.dictionaries(st.sampled_from(_KEYS), _VALUES),
    st.dictionaries(st.sampled_from(["webhook", "terminal"]), _VALUES),
)
def test_no_values_raise_anything_else(rule: dict[str, Any], sinks: dict[str, Any]) -> None:
    good = {"name": "a", "type": "any", "match": {"event": "x"}}
    lines = [f"{key} = {_toml(value)}" for key, value in (good | rule).items()]
    _parses_or_says_why(f"sinks = {_toml(sinks)}\n[[rule]]\n" + "\n".join(lines))


@given(st.lists(st.text(max_size=20), min_size=1, max_size=3), st.text(max_size=40))
def test_any_glob_compiles_and_matches_without_raising(globs: list[str], text: str) -> None:
    match = _toml({"detail": globs})
    (rule,) = parse_rules(f'[[rule]]\nname = "a"\ntype = "any"\nmatch = {match}\n').rules
    rule.match.matches(event("e", detail=text))
