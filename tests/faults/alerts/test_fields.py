"""Fields: lookup, matching, and summaries that are safe whatever the event holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.alerts.fields import MAX_SHOWN, MAX_SUMMARY, Matcher, Template, is_path, lookup, shown
from tests.faults.alerts.helpers import event


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("event", "x"),
        ("data.a", 1),
        ("data.b.c", "deep"),
        ("data.d.e", "dotted"),
        ("data.none", None),
        ("data.a.b", None),
        ("code", None),
    ],
)
def test_lookup(path: str, value: object) -> None:
    assert lookup(event("x", data={"a": 1, "b": {"c": "deep"}, "d.e": "dotted"}), path) == value


def test_lookup_survives_data_of_another_shape() -> None:
    assert lookup({"data": "text"}, "data.x") is None
    assert lookup({"data": [1]}, "data.0") is None
    assert lookup({}, "data.x") is None


@pytest.mark.parametrize(
    "path", ["data", "data.", "data..x", "nope", "", "event.x", "data.x[0]", "__class__"]
)
def test_what_is_no_path(path: str) -> None:
    assert not is_path(path)


@pytest.mark.parametrize(
    ("globs", "matches"),
    [
        ({"code": ("ACTOR.*",)}, True),
        ({"code": ("actor.*",)}, False),
        ({"code": ("NODE.*", "ACTOR.D?ED")}, True),
        ({"code": ("ACTOR.DIE",)}, False),
        ({"id": ("*",)}, False),
        ({"pid": ("7",)}, True),
        ({"data.ok": ("true",)}, True),
        ({"data.list": ("*",)}, False),
        ({"code": ("*",), "data.ok": ("false",)}, False),
        ({"detail": ("*second*",)}, True),
    ],
)
def test_matching(globs: dict[str, tuple[str, ...]], matches: bool) -> None:
    one = event("e", code="ACTOR.DIED", pid=7, detail="first\nsecond", data={"ok": True, "list": ["x"]})
    assert Matcher.of(globs).matches(one) is matches


def test_a_template_renders_fields_and_literal_braces() -> None:
    made = Template.parse("{key}: {data.n} of {{x}} {code}")
    assert made.render(event("e", key="poster/0", data={"n": 3})) == "poster/0: 3 of {x} -"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{0}",
        "{nope}",
        "{detail.__class__}",
        "{data[x]}",
        "{pid:>999999999}",
        "{key!r}",
        "{",
        "}",
        "{key",
    ],
)
def test_a_template_with_anything_but_field_names_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|use"):
        Template.parse(text)


def test_foreign_text_is_shown_as_plain_text() -> None:
    made = Template.parse("{detail}")
    shown_text = made.render(event("e", detail="{key.__class__} \x1b[31m\nred\u202e \ud800"))
    assert shown_text == "{key.__class__}  [31m red   "


def test_cut_values_stay_different() -> None:
    a, b = shown("x" * 1000 + "a"), shown("x" * 1000 + "b")
    assert a != b
    assert len(a) == len(b) == MAX_SHOWN


@given(st.text(), st.text())
def test_any_text_renders_within_its_limit(detail: str, key: str) -> None:
    text = Template.parse("{detail}{key}" * 5).render(event("e", detail=detail, key=key))
    assert len(text) <= MAX_SUMMARY
    text.encode()
