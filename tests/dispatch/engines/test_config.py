"""The engines file: what it gives, and the one line that each mistake gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.engines.config import EnginesFile, parse_engines, read_engines
from protocol import CodedError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "engines.toml"
ENGINE = '[[engine]]\ncommand = ["serve", "{port}"]\n'


def parse(text: str) -> EnginesFile:
    return parse_engines(text, Path("/etc/engines.toml"))


def refused(text: str) -> str:
    with pytest.raises(CodedError) as caught:
        parse_engines(text, Path("engines.toml"))
    assert caught.value.code == "CONFIG.INVALID"
    assert "\n" not in caught.value.detail
    return caught.value.detail


def test_the_example() -> None:
    file = read_engines(EXAMPLE)
    assert file.fleet.name == "example"
    assert file.names == ("embedded/0", "embedded/1")
    assert file.specs[0] == file.specs[1]
    assert file.specs[0].command == (sys.executable, "-m", "dispatch.engines.embedded", "--port", "{port}")
    assert file.router.kind == "none"


def test_the_examples_comments_are_examples() -> None:
    """What is commented out there works as well."""
    lines = EXAMPLE.read_text().splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith(("# [[", "# [router"))]
    more = []
    for start in starts:
        for line in lines[start:]:
            if not line.startswith("# "):
                break
            more.append(line[2:])
    file = parse("\n".join([*lines, *more]))
    assert file.names[2:] == (*(f"sglang/{n}" for n in range(8)), "vllm")
    assert file.specs[-1].api == "openai"
    assert file.router.url == "http://127.0.0.1:30000"


def test_defaults_are_merged() -> None:
    file = parse(
        '[defaults]\nterm_timeout = 9\nnum_gpus = 1\nenv = { A = "1", B = "2" }\n'
        '[[engine]]\nname = "a"\ncommand = ["serve", "{port}"]\nnum_gpus = 0.5\nenv = { B = "3" }\n'
        '[[engine]]\nname = "b"\ncommand = ["serve", "{port}"]\n'
    )
    first, second = file.specs
    assert (first.term_timeout, first.num_gpus, first.env) == (9, 0.5, {"A": "1", "B": "3"})
    assert (second.term_timeout, second.num_gpus, second.env) == (9, 1, {"A": "1", "B": "2"})


def test_paths_start_from_the_files_folder() -> None:
    file = parse(
        '[fleet]\nlog_dir = "logs"\n[router]\nkind = "static"\nfile = "urls.json"\n'
        '[[engine]]\nname = "a"\ncommand = ["serve", "{port}"]\ncwd = "work"\n'
        '[[engine]]\nname = "b"\ncommand = ["serve", "{port}"]\nlog_dir = "/var/log"\n'
    )
    assert file.fleet.name == "engines"
    assert [spec.log_dir for spec in file.specs] == ["/etc/logs", "/var/log"]
    assert file.specs[0].cwd == "/etc/work"
    assert file.router.file == "/etc/urls.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "engines.toml: there is no engine; write at least one [[engine]] table"),
        ("[[engine]\n", "engines.toml: line 1, column 9: not TOML: "),
        ("x = 1\ny = [", "engines.toml: line 2: not TOML: "),
        ("[engin]\n", "engines.toml: engin: there is no such key; did you mean engine?"),
        ("engine = 3\n", "engines.toml: engine: is not a list of tables; "),
        ("fleet = 3\n" + ENGINE, "engines.toml: fleet: is not a table; write it as [fleet]"),
        ("defaults = 3\n" + ENGINE, "engines.toml: defaults: is not a table; write it as [defaults]"),
        (
            "[fleet]\nnam = 'x'\n" + ENGINE,
            "engines.toml: fleet.nam: there is no such key; did you mean name?",
        ),
        ("[fleet]\nname = 'a b'\n" + ENGINE, "engines.toml: fleet.name: 'a b' is not a name; "),
        ("[fleet]\nname = '../x'\n" + ENGINE, "engines.toml: fleet.name: '../x' is not a name; "),
        ("[fleet]\nrestart_backoff = [5, 1]\n" + ENGINE, "engines.toml: fleet.restart_backoff: "),
        ("[fleet]\nrestart_backoff = [1, inf]\n" + ENGINE, "engines.toml: fleet.restart_backoff: "),
        ("[fleet]\nrestart_backoff = 3\n" + ENGINE, "engines.toml: fleet.restart_backoff: Expected array"),
        ("[fleet]\nrestart_budget = 0\n" + ENGINE, "engines.toml: fleet.restart_budget: is not 0; "),
        ("[router]\nkind = 'sglang'\n" + ENGINE, "engines.toml: router.url: is missing; "),
        ("[router]\nkind = 'static'\n" + ENGINE, "engines.toml: router.file: is missing; "),
        ("[router]\nurl = 'http://x:1'\n" + ENGINE, 'engines.toml: router.url: belongs to kind = "sglang"'),
        ("[router]\nkind = 'sglang'\nurl = 'x:1'\n" + ENGINE, "engines.toml: router.url: 'x:1' is no URL; "),
        (
            '[router]\nkind = "static"\nfile = "a\\u0000b"\n' + ENGINE,
            "engines.toml: router.file: 'a\\x00b' is no path; name a file",
        ),
        ("[router]\nkind = 'nginx'\n" + ENGINE, "engines.toml: router.kind: Invalid enum value 'nginx'"),
        ("[defaults]\nnam = 'x'\n" + ENGINE, "engines.toml: defaults.nam: there is no such key"),
        ("[defaults]\ncount = 2\n" + ENGINE, "engines.toml: defaults.count: there is no such key"),
        (
            ENGINE + ENGINE.replace("engine]]", "engine]]\nname='b'\nterm_timout = 3"),
            "engines.toml: engine[1].term_timout: there is no such key; did you mean term_timeout?",
        ),
        (ENGINE + "term_timeout = 'x'\n", "engines.toml: engine[0].term_timeout: Expected float, got str; "),
        (
            ENGINE + "term_timeout = -1\n",
            "engines.toml: engine[0].term_timeout: is seconds, 0 or more, not -1",
        ),
        (
            "[defaults]\nterm_timeout = -1\n" + ENGINE,
            "engines.toml: defaults.term_timeout: is seconds, 0 or ",
        ),
        (ENGINE.replace("{port}", "{port}{port.x}"), "engines.toml: engine[0].ports: must name "),
        ("[defaults]\nterm_timeout = ''\n" + ENGINE, "engines.toml: defaults.term_timeout: Expected float"),
        (ENGINE + "env = { A = 1 }\n", "engines.toml: engine[0].env[...]: Expected str, got int; "),
        (ENGINE + "env = { FAILSOFT_KEY = 'hunter2' }\n", "engines.toml: engine[0].env: holds a key of ours"),
        (ENGINE + "count = 0\n", "engines.toml: engine[0].count: is not 0; "),
        (ENGINE + "count = true\n", "engines.toml: engine[0].count: is not True; "),
        (
            ENGINE + "count = 4096\n" + ENGINE + "name = 'b'\n",
            "engines.toml: engine: 4097 engines are too many",
        ),
        (ENGINE + "name = 3\n", "engines.toml: engine[0].name: 3 is not a name; "),
        (ENGINE + ENGINE, "engines.toml: engine[1].name: another engine is called 'engine'; "),
        (
            ENGINE + "name = 'a'\n" + ENGINE + "count = 2\n",
            "engines.toml: engine[1].name: engine/0 and so on are the keys of other engines; ",
        ),
        ("[[engine]]\nname = 'a'\n", "engines.toml: engine[0].command: is missing; write argv"),
        (
            "[[engine]]\ncommand = 'serve {port}'\n",
            "engines.toml: engine[0].command: Expected array, got str",
        ),
        (
            "[[engine]]\ncommand = ['serve']\n",
            "engines.toml: engine[0].command: must say where the port goes",
        ),
        (
            ENGINE + '"a\\nb" = 1\n',
            "engines.toml: engine[0].'a\\nb': there is no such key; the keys are name",
        ),
    ],
)
def test_a_mistake_gets_one_line(text: str, said: str) -> None:
    assert refused(text).startswith(said)


def test_a_secret_is_not_repeated() -> None:
    assert "hunter2" not in refused(ENGINE + "env = { FAILSOFT_KEY = 'hunter2' }\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def said(path: Path | str) -> str:
        with pytest.raises(CodedError) as caught:
            read_engines(path)
        return f"{caught.value.code} {caught.value.detail}"

    assert (
        said(tmp_path / "no.toml")
        == f"CONFIG.MISSING {tmp_path}/no.toml: there is no such file; give an engines file"
    )
    assert said(tmp_path).startswith(f"CONFIG.INVALID {tmp_path}: cannot be read: Is a directory; ")
    assert "cannot be read" in said("a\0b")
    file = tmp_path / "latin.toml"
    file.write_bytes(b"# a\n# \xe9\n")
    assert f"{file}: line 2: is not UTF-8" in said(file)
    file.write_bytes(b"#" * (1 << 20) + b"#")
    assert "is larger than" in said(file)


TEXTS = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.sampled_from([*ENGINE.split(), "\n", "[fleet]", "=", "3", "{}", "[", "]", "'", "name", "env"])
    ).map(" ".join),
)


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_file_or_one_line(text: str) -> None:
    error: CodedError | None = None
    try:
        parse(text)
    except CodedError as exc:
        error = exc
    assert error is None or (error.code == "CONFIG.INVALID" and "\n" not in error.detail)
