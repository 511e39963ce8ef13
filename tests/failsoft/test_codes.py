"""``failsoft codes``: the catalogue, and the page that is made from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from failsoft.cli import app
from failsoft.cli.codes import as_dict, markdown
from protocol import Family, catalogue

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "codes.md"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["codes", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_page_is_the_catalogues() -> None:
    """A user's own codes, registered by other tests of this process, are no part of the page."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) >= 70
    assert set(rows) <= set(markdown().splitlines()), "write it anew with `make docs`"
    builtin = [line for line in markdown().splitlines() if line.startswith("| `")]
    from protocol.builtin_codes import ENTRIES

    assert [row.split("`")[1] for row in rows] == [
        row.split("`")[1] for row in builtin if row.split("`")[1] in {str(e.code) for e in ENTRIES}
    ]


def test_the_page_is_the_catalogues_to_the_byte() -> None:
    """In a process of its own, where nobody has registered anything; as `make docs` writes it."""
    done = subprocess.run(
        [sys.executable, "-m", "failsoft", "codes", "--markdown"], cwd=ROOT, capture_output=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == PAGE.read_bytes(), "write it anew with `make docs`"


def test_the_page_holds_every_code_once_in_whole_tables_by_family() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [str(entry.code) for entry in catalogue]
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)
    families = [line[3:] for line in markdown().splitlines() if line.startswith("## ")]
    assert families == [f for f in Family if any(entry.code.family is f for entry in catalogue)]


def test_all_as_json() -> None:
    status, out, _ = run("--json")
    assert status == 0
    assert {row["code"] for row in json.loads(out)} == {str(entry.code) for entry in catalogue}


@pytest.mark.parametrize("text", ["UPSTREAM.ABORTED", "upstream.aborted", " Upstream.Aborted "])
def test_one_code(text: str) -> None:
    status, out, _ = run(text)
    assert status == 0
    for part in ("UPSTREAM.ABORTED", "retry_elsewhere", catalogue.entry("UPSTREAM.ABORTED").runbook):
        assert part in out


def test_one_code_as_json() -> None:
    status, out, _ = run("node.io", "--json")
    assert status == 0
    assert json.loads(out) == as_dict(catalogue.entry("NODE.IO"))


@pytest.mark.parametrize(
    "text", ["NOPE", "NOPE.X", "UPSTREAM.", "UPSTREAM.NEVER_HEARD_OF", "x y", "", "a\nb", "\udcff"]
)
def test_what_is_no_code_gets_one_line(text: str) -> None:
    status, out, err = run(text)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("failsoft codes: ")


def test_the_list_names_every_code() -> None:
    _, out, _ = run()
    assert all(str(entry.code) in out for entry in catalogue)


@pytest.mark.parametrize("text", ["ENGINE", "engine", " Engine "])
def test_a_family_alone_lists_it(text: str) -> None:
    wanted = [entry for entry in catalogue if entry.code.family is Family.ENGINE]
    status, out, _ = run(text, "--json")
    assert status == 0
    assert json.loads(out) == [as_dict(entry) for entry in wanted]
    status, out, _ = run(text)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if "." in line.split()[0]] == [
        str(entry.code) for entry in wanted
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ENGINE.EXITD", "ENGINE.EXITED"),
        ("engin.exited", "ENGINE.EXITED"),
        ("refit_aborted", "WEIGHTS.REFIT_ABORTED"),
        ("UPSTREAM.ABORT", "UPSTREAM.ABORTED"),
    ],
)
def test_the_nearest_name_is_offered(text: str, meant: str) -> None:
    status, out, err = run(text)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "did you mean " in err
    assert meant in err


def test_what_is_like_nothing_gets_the_way_to_the_list() -> None:
    assert run("zebra")[2].endswith("; `failsoft codes` lists what there is\n")
