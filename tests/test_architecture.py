"""The shape of the repository: the one direction, the rooms' front pages, short modules, no registry."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("protocol", "faults", "dispatch", "chaos", "failsoft")
# The rooms that others import from, each with a short list of names.
FRONT = (
    "protocol", "faults", "faults.alerts", "dispatch", "dispatch.posting", "dispatch.engines",
    "dispatch.roles", "dispatch.rollout", "chaos",
)  # fmt: skip
MAX_NAMES = 14
MAX_LINES = 450
PAGES = sorted(page for room in ROOMS for page in (ROOT / room).rglob("__init__.py"))
MODULES = sorted(module for room in ROOMS for module in (ROOT / room).rglob("*.py"))
BESIDE = sorted(module for folder in ("benchmarks", "examples") for module in (ROOT / folder).rglob("*.py"))
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"
# Where packages come from is the business of whoever installs; written so as not to find itself.
REGISTRY = re.compile(
    rb"index[-_]url|find[-]links|trusted[-]host|pypi[.](?:org|io)|pythonhosted[.]org|test[.]pypi|conda[.]anaconda"
    rb"|download[.]pytorch|/simple/?[\s\"']",
    re.IGNORECASE,
)
# The files that say how this is built hold no address at all.
BUILD_FILES = ("constraints.txt", "pyproject.toml", "Makefile", ".ci/run")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT_IMPORTS], cwd=folder, capture_output=True, text=True, timeout=55, check=False
    )  # fmt: skip


def test_an_import_never_runs_against_the_arrow() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the one direction KEPT" in done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("protocol/codes.py", "import faults"),
        ("faults/retry.py", "from dispatch import PosterPool"),
        ("dispatch/streams.py", "def late() -> None:\n    import chaos"),
        ("chaos/injectors.py", "from failsoft.cli import app"),
    ],
)
def test_an_import_against_the_arrow_is_seen(tmp_path: Path, module: str, line: str) -> None:
    """The contract itself is on trial: a copy with one wrong import in it must fail."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / module
    changed.write_text(f"{changed.read_text()}\n\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the one direction BROKEN" in done.stdout
    assert f"{name_of(ROOT / module)} -> " in done.stdout


def test_protocol_imports_neither_ray_nor_an_http_client() -> None:
    """It is loaded in engines and in guards, which must start fast and pull in nothing."""
    script = (
        "import sys, protocol, faults; print([m for m in ('ray', 'httpx', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=55, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", FRONT)
def test_every_room_opens_with_a_short_sorted_list_of_names(room: str) -> None:
    module = importlib.import_module(room)
    assert module.__doc__
    assert module.__doc__.startswith(f"{room.rpartition('.')[2]}: ")
    listed: list[str] = module.__all__
    assert listed == sorted(set(listed))
    assert 0 < len(listed) <= MAX_NAMES
    for name in listed:
        assert getattr(module, name, None) is not None, f"{name} is listed and not there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_room_says_what_it_is_for_and_lists_its_names(page: Path) -> None:
    tree = ast.parse(page.read_text())
    doc = ast.get_docstring(tree)
    module = importlib.import_module(name_of(page))
    if page.parent.parent == ROOT:
        assert doc is not None
        assert doc.startswith(f"{page.parent.name}: "), "what the room is for"
    assert doc, "what is in here?"
    assert doc.splitlines()[0].endswith((".", ":", ";", ","))
    listed: list[str] | None = getattr(module, "__all__", None)
    if listed is None:
        exported = [
            n for n in vars(module) if not n.startswith("_") and not inspect.ismodule(vars(module)[n])
        ]
        own = [n for n in exported if n not in ("annotations", "app", "main")]
        assert not own, f"{own} without an __all__"
        return
    assert listed == sorted(listed)
    assert len(listed) == len(set(listed)) <= MAX_NAMES, "about a dozen names at most"
    for name in listed:
        assert getattr(module, name, None) is not None, f"{name} is listed and not there"


def test_the_public_names_of_the_design_are_there() -> None:
    names = {
        "protocol": "Code CodedError catalogue coded code_of read mint scan defuse",
        "faults": "classify decide Fault Kind Blame Outcome Action Decision",
        "dispatch": "PosterPool Reply RolloutClient EngineFleet EngineSupervisor",
    }
    for room, listed in names.items():
        module = importlib.import_module(room)
        assert set(listed.split()) <= set(module.__all__)


@pytest.mark.parametrize("module", [*MODULES, *BESIDE], ids=name_of)
def test_modules_are_short(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_every_module_says_what_it_holds(module: Path) -> None:
    text = module.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), "a module opens with what it holds"


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_no_module_is_called_after_the_standard_library(module: Path) -> None:
    assert module.stem not in {
        "types",
        "http",
        "logging",
        "asyncio",
        "json",
        "signal",
        "queue",
        "utils",
        "common",
    }


def test_every_room_is_typed() -> None:
    for room in ROOMS:
        assert (ROOT / room / "py.typed").exists()


def test_no_file_names_a_package_registry() -> None:
    for path in tracked():
        found = REGISTRY.search(path.read_bytes())
        assert found is None, f"{path}: {found}"


def test_the_files_that_say_how_this_is_built_hold_no_address() -> None:
    for name in BUILD_FILES:
        assert not re.findall(r"https?://[^\s\"')]+", (ROOT / name).read_text()), name


def test_the_constraints_are_names_and_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wrong = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+", line)]
    assert lines
    assert not wrong
