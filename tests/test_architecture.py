"""The shape of the repository: the one direction, the rooms' front pages, short modules, no registry."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("protocol", "faults", "dispatch", "chaos", "failsoft")
MAX_LINES = 450
PAGES = sorted(page for room in ROOMS for page in (ROOT / room).rglob("__init__.py"))
MODULES = sorted(module for room in ROOMS for module in (ROOT / room).rglob("*.py"))
# Hosts whose addresses may stand in the files that say how this is built; a registry's may not.
BUILD_FILES = (
    "constraints.txt",
    "pyproject.toml",
    "Makefile",
    ".ci/run",
    "setup.cfg",
    "pip.conf",
    "requirements.txt",
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_an_import_never_runs_against_the_arrow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the one direction KEPT" in done.stdout


def test_protocol_imports_neither_ray_nor_an_http_client() -> None:
    """It is loaded in engines and in guards, which must start fast and pull in nothing."""
    script = (
        "import sys, protocol, faults; print([m for m in ('ray', 'httpx', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=55, check=True
    )
    assert done.stdout.strip() == "[]"


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
    assert len(listed) == len(set(listed)) <= 14, "about a dozen names at most"
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


@pytest.mark.parametrize("module", MODULES, ids=name_of)
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


def test_no_file_names_the_host_of_a_package_registry() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    built = [ROOT / name for name in listed.stdout.split("\n") if name in BUILD_FILES]
    assert built
    for path in built:
        text = path.read_text()
        assert not re.search(r"--?(?:extra-)?index-url|index_url|find-links|trusted-host", text), path
        assert not re.findall(r"https?://[^\s\"')]+", text), path
