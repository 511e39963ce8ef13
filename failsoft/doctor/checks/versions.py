"""Installed versions beside what failsoft declares. (A cluster's beside ours: `cluster`.)"""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from failsoft.doctor.finding import Examined, Finding

NAME: Final = "versions"
_DISTRIBUTION: Final = "failsoft"


def check(examined: Examined) -> list[Finding]:
    """Whether this Python and the packages in it are those that failsoft was made for (core metadata,
    Requires-Python and Requires-Dist)."""
    try:
        own = metadata.metadata(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        what = "not checked: failsoft is not installed as a package here"
        return [Finding(check=NAME, severity="note", what=what, fix="`pip install -e .` where it lies")]
    found = _python(own["Requires-Python"] or "", platform.python_version())
    for text in metadata.requires(_DISTRIBUTION) or ():
        found += _package(Requirement(text))
    return found


def _python(declared: str, version: str) -> list[Finding]:
    if SpecifierSet(declared).contains(version, prereleases=True):
        return []
    what = f"Python is {version}, and failsoft needs {declared}"
    fix = f"make the environment anew with a Python {declared}"
    return [Finding(check=NAME, severity="error", what=what, where=platform.python_implementation(), fix=fix)]


def _package(wanted: Requirement) -> list[Finding]:
    """Extras count where they are installed: nobody has to have them."""
    extra = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        version = ""
    if wanted.specifier.contains(version, prereleases=True) if version else extra:
        return []
    declared = f"{wanted.name}{wanted.specifier}"
    what = f"{wanted.name} is {version or 'not installed'}, and failsoft needs {declared}"
    return [
        Finding(check=NAME, severity="error", what=what, where=wanted.name, fix=f"`pip install '{declared}'`")
    ]
