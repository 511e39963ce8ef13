"""Modules that are there to be imported and cannot do anything.

SGLang imports sgl_kernel (its build for CPUs is not published) and torchvision at its start, also where it
uses neither: on the CPU with torch's own attention, for a model of text alone.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Kind(type):
    """The type of everything that is absent: its attributes are absent as well."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = _Kind(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})
        setattr(cls, name, inner)
        return inner

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} is a stand-in")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Kind(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._inside = f"{package}."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._inside) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def stand_in(package: str) -> None:
    """Make ``package``, which is being imported, and all its modules absent."""
    sys.modules[package].__class__ = _Module
    sys.meta_path.insert(0, _Finder(package))
