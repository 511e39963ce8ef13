"""The engines file: TOML in, checked specs out, or one line that names the place and the remedy.

    [fleet]
    name = "demo"                    # default: the file's name without .toml
    ray = ""                         # "": a Ray of its own on this machine; "auto"; or a cluster's address
    restart_backoff = [0.2, 5.0]     # shortest and longest pause before a restart, seconds
    restart_budget = 5               # failed starts in a row before an engine is given up
    log_dir = "logs"                 # for engines that name none; relative to the file

    [router]                         # who is told which engines may be used; default: nobody
    kind = "static"                  # a file of URLs, or "sglang": a running sglang-router
    file = "urls.json"               # kind "static"
    url = "http://127.0.0.1:30000"   # kind "sglang"

    [defaults]                       # for every engine below; env and resources are merged name by name
    num_gpus = 1

    [[engine]]
    name = "policy"                  # default: engine
    count = 8                        # how many alike, default 1
    command = ["{python}", "-m", "sglang.launch_server", "--model-path", "m", "--port", "{port}"]

The other keys of an engine are the fields of `EngineSpec`. ``{python}`` is the Python that reads the
file, since the one on PATH may be another. Environment variables are not expanded: engines inherit
them as they are.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from dispatch.engines.spec import EngineSpec
from protocol import CodedError

if TYPE_CHECKING:
    from dispatch.engines.routers import Router

MAX_FILE: Final = 1 << 20
"""Largest engines file, in bytes."""
MAX_ENGINES: Final = 4096
"""Most engines of a file, ``count`` included."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")
_NAME_RULE: Final = "write letters, digits, . _ and -, at most 40, the first a letter or a digit"
_LINE: Final = re.compile(
    r"(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)\Z", re.DOTALL
)
_WHERE: Final = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?\Z", re.DOTALL)
_MERGED: Final = ("env", "resources")
_TABLES: Final = ("fleet", "router", "defaults", "engine")
_FIELDS: Final = EngineSpec.__struct_fields__


class RouterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``[router]`` table: ``static`` keeps ``file``, ``sglang`` talks to the router at ``url``."""

    kind: Literal["none", "static", "sglang"] = "none"
    file: str = ""
    url: str = ""


class FleetTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``[fleet]`` table, as it stands at the head of this module. Times are seconds."""

    name: str = ""
    ray: str = ""
    restart_backoff: tuple[float, float] = (0.2, 5.0)
    restart_budget: int = 5
    log_dir: str | None = None


class EnginesFile(msgspec.Struct, frozen=True, kw_only=True):
    """What an engines file says. ``names`` are the engines' own, in the order of ``specs``; paths
    are absolute."""

    path: Path
    fleet: FleetTable
    router: RouterTable
    specs: tuple[EngineSpec, ...]
    names: tuple[str, ...]


def read_engines(path: str | os.PathLike[str]) -> EnginesFile:
    """Read and check the engines file at ``path``. Raises CodedError CONFIG.INVALID, one line, for
    anything wrong with it (CONFIG.MISSING when it is not there)."""
    origin = os.fspath(path)
    try:
        with open(origin, "rb") as file:
            raw = file.read(MAX_FILE + 1)
    except FileNotFoundError as exc:
        raise CodedError("CONFIG.MISSING", f"{origin}: there is no such file; give an engines file") from exc
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        why = getattr(exc, "strerror", None) or str(exc)
        raise _invalid(origin, f"cannot be read: {why}", "give the path of a readable TOML file") from exc
    if len(raw) > MAX_FILE:
        raise _invalid(origin, f"is larger than {MAX_FILE} bytes", "is it really an engines file?")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise _invalid(f"{origin}: line {line}", "is not UTF-8", "save the file as UTF-8 text") from exc
    return parse_engines(text, Path(origin))


def make_router(table: RouterTable) -> Router | None:
    """The router of an engines file. Raises CodedError CONFIG.INVALID for a file that cannot be written
    or a URL that is none."""
    # Here and not at the top: they bring an HTTP client, which most readers of a file do without.
    from dispatch.engines.routers import SglangRouter, StaticRouter

    if table.kind == "static":
        return StaticRouter(table.file)
    return SglangRouter(table.url) if table.kind == "sglang" else None


def parse_engines(text: str, path: Path) -> EnginesFile:
    """Check the text of an engines file; ``path`` names it in messages, and its folder is what
    relative paths in it start from. Raises as `read_engines`."""
    document = _parse(text, str(path))
    _refuse_unknown(document, _TABLES, str(path))
    fleet = _fleet(document.get("fleet", {}), path)
    router = _router(document.get("router", {}), path)
    tables = document.get("engine", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _invalid(f"{path}: engine", "is not a list of tables", "write each engine as [[engine]]")
    if not tables:
        raise _invalid(str(path), "there is no engine", "write at least one [[engine]] table")
    defaults = _table(document.get("defaults", {}), f"{path}: defaults")
    _refuse_unknown(defaults, _FIELDS, f"{path}: defaults")
    specs: list[EngineSpec] = []
    names: list[str] = []
    for number, table in enumerate(tables):
        spec, own = _engine(table, defaults, fleet, path, number)
        if taken := set(own) & set(names):
            raise _invalid(
                f"{path}: engine[{number}].name",
                f"another engine is called {min(taken)!r}",
                "names tell engines apart: choose another",
            )
        if specs and own[0] == "engine/0":
            raise _invalid(
                f"{path}: engine[{number}].name",
                "engine/0 and so on are the keys of other engines",
                "names tell engines apart: choose another",
            )
        specs += [spec] * len(own)
        names += own
    if len(specs) > MAX_ENGINES:
        raise _invalid(f"{path}: engine", f"{len(specs)} engines are too many", f"at most {MAX_ENGINES}")
    return EnginesFile(
        path=path.absolute(), fleet=fleet, router=router, specs=tuple(specs), names=tuple(names)
    )


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as exc:
        raise _invalid(origin, "its values are nested too deeply", "engines need three levels") from exc
    except ValueError as exc:  # TOMLDecodeError is one; a plain one comes from numbers of 5,000 digits
        found = _LINE.match(str(exc))
        line = (found["line"] if found else None) or str(text.count("\n") + 1)
        column = f", column {found['column']}" if found and found["column"] else ""
        what = found["what"] if found else str(exc)
        raise _invalid(f"{origin}: line {line}{column}", f"not TOML: {what}", "correct the syntax") from exc


def _fleet(value: object, path: Path) -> FleetTable:
    at = f"{path}: fleet"
    fleet: FleetTable = _decode(value, FleetTable, at)
    name = fleet.name or path.stem
    if not _NAME.match(name):
        said = f"{name!r:.80} is not a name"
        if not fleet.name:
            said += " (it is the file's, for want of one)"
        raise _invalid(f"{at}.name", said, _NAME_RULE)
    shortest, longest = fleet.restart_backoff
    if not 0 <= shortest <= longest < math.inf:
        raise _invalid(
            f"{at}.restart_backoff", f"is not {[shortest, longest]}", "write [shortest, longest] seconds"
        )
    if fleet.restart_budget < 1:
        raise _invalid(f"{at}.restart_budget", f"is not {fleet.restart_budget}", "write 1 or more")
    log_dir = None if fleet.log_dir is None else str(path.absolute().parent / fleet.log_dir)
    return msgspec.structs.replace(fleet, name=name, log_dir=log_dir)


def _router(value: object, path: Path) -> RouterTable:
    at = f"{path}: router"
    router: RouterTable = _decode(value, RouterTable, at)
    for kind, key in (("static", "file"), ("sglang", "url")):
        if (router.kind == kind) != bool(getattr(router, key)):
            said = "is missing" if router.kind == kind else f'belongs to kind = "{kind}" only'
            remedy = f'write kind = "{kind}" and {key} = "…", or neither'
            raise _invalid(f"{at}.{key}", said, remedy)
    if router.url and not re.match(r"https?://[^/]", router.url):
        raise _invalid(f"{at}.url", f"{router.url!r:.80} is no URL", 'write "http://host:port"')
    if "\0" in router.file:
        raise _invalid(f"{at}.file", f"{router.file!r:.80} is no path", "name a file")
    if router.file:
        return msgspec.structs.replace(router, file=str(path.absolute().parent / router.file))
    return router


def _engine(
    table: dict[str, Any], defaults: Mapping[str, Any], fleet: FleetTable, path: Path, number: int
) -> tuple[EngineSpec, list[str]]:
    """The spec of one ``[[engine]]`` and the names of the engines made from it."""
    at = f"{path}: engine[{number}]"
    _refuse_unknown(table, ("name", "count", *_FIELDS), at)
    own = dict(table)
    name, count = own.pop("name", "engine"), own.pop("count", 1)
    if not isinstance(name, str) or not _NAME.match(name):
        raise _invalid(f"{at}.name", f"{name!r:.80} is not a name", _NAME_RULE)
    if type(count) is not int or not 1 <= count <= MAX_ENGINES:
        raise _invalid(f"{at}.count", f"is not {count!r:.80}", f"write a whole number, 1 to {MAX_ENGINES}")
    merged = {**defaults, **own}
    for key in _MERGED:
        if isinstance(defaults.get(key), dict) and isinstance(own.get(key), dict):
            merged[key] = {**defaults[key], **own[key]}
    if "command" not in merged:
        raise _invalid(
            f"{at}.command", "is missing", 'write argv: command = ["vllm", "serve", "m", "--port", "{port}"]'
        )
    merged.setdefault("log_dir", fleet.log_dir)
    try:
        spec = msgspec.convert(merged, EngineSpec)
    except msgspec.ValidationError as exc:
        key, what = _where(exc)
        raise _invalid(_blame(at, path, key, own, defaults), what, _remedy(key)) from exc
    except CodedError as exc:  # the spec's own check: the value's type is right and its sense is not
        key = str(exc.data.get("field", ""))
        what = exc.detail.removeprefix(f"engine spec: {key} ")
        raise _invalid(_blame(at, path, key, own, defaults), what, "correct the value") from exc
    folder = path.absolute().parent
    spec = msgspec.structs.replace(
        spec,
        command=tuple(text.replace("{python}", sys.executable) for text in spec.command),
        cwd=None if spec.cwd is None else str(folder / spec.cwd),
        log_dir=None if spec.log_dir is None else str(folder / spec.log_dir),
    )
    return spec, [name] if count == 1 else [f"{name}/{n}" for n in range(count)]


def _blame(at: str, path: Path, key: str, own: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The place to mend: a wrong default is not the engine's fault."""
    top = re.split(r"[.\[]", key, maxsplit=1)[0]
    return f"{path}: defaults.{key}" if top in defaults and top not in own else f"{at}.{key}".rstrip(".")


def _decode(value: object, into: type[Any], at: str) -> Any:
    table = _table(value, at)
    _refuse_unknown(table, into.__struct_fields__, at)
    try:
        return msgspec.convert(table, into)
    except msgspec.ValidationError as exc:
        key, what = _where(exc)
        raise _invalid(f"{at}.{key}" if key else at, what, _remedy(key)) from exc


def _table(value: object, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(at, "is not a table", f"write it as [{at.rpartition(' ')[2]}]")
    return value


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], at: str) -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            shown = key if re.fullmatch(r"[\w-]{1,80}", key) else repr(key[:80])
            place = f"{at}.{shown}" if ": " in at else f"{at}: {shown}"
            raise _invalid(place, "there is no such key", hint)


def _where(exc: msgspec.ValidationError) -> tuple[str, str]:
    """The path inside of the table, and what is wrong there."""
    found = _WHERE.match(str(exc))
    assert found is not None  # the pattern matches any text
    return (found["path"] or "").lstrip("."), found["what"].replace("`", "")


def _remedy(key: str) -> str:
    return "write a text in quotes" if key.startswith("env") else "write a value of that type"


def _invalid(at: str, what: str, remedy: str) -> CodedError:
    return CodedError("CONFIG.INVALID", " ".join(f"{at}: {what}; {remedy}".split()), {"place": at})
