"""Ways that a text or an exception goes on its way to a reader: carriers, escapes, terminals, pickles."""

from __future__ import annotations

import copy
import html
import io
import json
import logging
import pickle
import shlex
import sys
import traceback
from collections.abc import Callable
from email.utils import encode_rfc2231
from typing import Any, Final
from urllib.parse import quote, quote_plus

import structlog
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError, UnserializableException
from rich.console import Console
from rich.markup import escape

Transport = Callable[[str], str]


def _rich(text: str, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=1_000_000, **options)
    console.print(f"[bold red]engine[/] {escape(text)} [on rgb(1,2,3)]x[/]", soft_wrap=True, highlight=False)
    return out.getvalue()


def _rich_coloured(text: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=1_000_000, force_terminal=True, color_system="truecolor")
    console.print(f"[bold rgb(255,128,0)]{escape(text)}[/]", soft_wrap=True, highlight=False)
    return out.getvalue()


def _task_error(text: str) -> str:
    above = f"Traceback (most recent call last):\nValueError: {text}"
    return str(RayTaskError("Poster.post", above, None, proctitle="ray::Poster", pid=7, ip="10.0.0.7"))


def _traceback(text: str) -> str:
    error = ValueError(text)
    error.__cause__ = KeyError("the cause")
    return "".join(traceback.format_exception(error))


def _traceback_of_key_error(text: str) -> str:
    return "".join(traceback.format_exception(KeyError(text)))  # which prints the repr


def _group_traceback(text: str) -> str:
    group = ExceptionGroup("several", [ExceptionGroup("of them", [ValueError(text)]), KeyError("x")])
    return "".join(traceback.format_exception(group))


def _notes(text: str) -> str:
    error = ValueError("x")
    error.add_note(text)
    return "".join(traceback.format_exception(error))


def _logged(text: str) -> str:
    form = logging.Formatter("%(asctime)s %(levelname)s:%(name)s:%(message)s")
    try:
        raise ValueError(text)
    except ValueError:
        record = logging.LogRecord("engine", 40, __file__, 1, "said %s", (text,), sys.exc_info())
    return form.format(record)


_structlog = structlog.dev.ConsoleRenderer(colors=True, pad_event_to=0)


def _structlog_console(text: str) -> str:
    return str(_structlog(None, "error", {"event": "engine.exited", "detail": text, "level": "error"}))


def _colours(text: str) -> str:
    return f"\x1b[38;2;9;9;9m{text}\x1b[0m"


def _worker_prefix(text: str) -> str:
    return "\n".join(f"\x1b[36m(Poster pid=123, ip=10.0.0.7)\x1b[0m {line}" for line in text.split("\n"))


TRANSPORTS: Final[dict[str, Transport]] = {
    "repr": repr,
    "ascii": ascii,
    "repr of bytes": lambda t: repr(t.encode("utf-8", "replace")),
    "json": json.dumps,
    "json, not ASCII": lambda t: json.dumps(t, ensure_ascii=False),
    "json in json": lambda t: json.dumps(json.dumps({"error": {"message": t}})),
    "html": html.escape,
    "url": lambda t: quote(t, errors="replace"),
    "url, all of it": lambda t: quote(t, safe="", errors="replace"),
    "url, form": lambda t: quote_plus(t, errors="replace"),
    "shell": shlex.quote,
    "str.format": lambda t: "said {0!s:>3} then".format(t),  # noqa: UP030, UP032 - it is str.format that is tried
    "str.format of it": lambda t: t.replace("{", "{{").replace("}", "}}").format(),
    "%": lambda t: "said %s then" % t,  # noqa: UP031 - it is % that is tried
    "% of it": lambda t: t.replace("%", "%%") % (),
    "RFC 8187": lambda t: encode_rfc2231(t.encode("utf-8", "replace").decode(), "utf-8"),
    "colours": _colours,
    "worker's prefix": _worker_prefix,
    "Rich": _rich,
    "Rich, coloured": _rich_coloured,
    "structlog": _structlog_console,
    "RayTaskError": _task_error,
    "UnserializableException": lambda t: str(UnserializableException(t)),
    "traceback": _traceback,
    "traceback of a KeyError": _traceback_of_key_error,
    "traceback of a group": _group_traceback,
    "notes": _notes,
    "logging": _logged,
    "utf-8 read as latin-1": lambda t: t.encode("utf-8", "replace").decode("latin-1"),
    "ascii, backslashes": lambda t: t.encode("ascii", "backslashreplace").decode(),
    "ascii, entities": lambda t: t.encode("ascii", "xmlcharrefreplace").decode(),
    "ascii, ?": lambda t: t.encode("ascii", "replace").decode(),
    "lower": str.lower,
    "casefold": str.casefold,
    "one line": lambda t: " ".join(t.split("\n")),
}
"""From a text to the text that a reader gets. None of them may cost a token its reading."""

Vehicle = Callable[[BaseException], BaseException]


def _pickled(protocol: int) -> Vehicle:
    return lambda e: pickle.loads(pickle.dumps(e, protocol))


def _python_pickled(error: BaseException) -> BaseException:
    out = io.BytesIO()
    pickle._Pickler(out).dump(error)  # type: ignore[attr-defined]  # the one written in Python, not in C
    return pickle._loads(out.getvalue())  # type: ignore[attr-defined,no-any-return]


def _through_ray(error: BaseException) -> BaseException:
    sent = RayTaskError("f", "Traceback …", error, proctitle="ray::f", pid=7, ip="10.0.0.7")
    got = RayError.from_bytes(sent.to_bytes())
    assert isinstance(got, RayTaskError), got
    return got.as_instanceof_cause()


VEHICLES: Final[dict[str, Vehicle]] = {
    **{f"pickle {n}": _pickled(n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "pickle in Python": _python_pickled,
    "cloudpickle": lambda e: cloudpickle.loads(cloudpickle.dumps(e)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
"""From an exception to an equal one."""

RAY: Final = "as Ray brings it"
WRAPPINGS: Final[dict[str, Vehicle]] = {
    RAY: _through_ray,
    "cause": lambda e: _caused(ValueError("x"), e),
    "group": lambda e: BaseExceptionGroup("g", [ValueError("x"), e]),
    "as Ray's cause": lambda e: _carrying(RuntimeError("x"), e),
}
"""From an exception to another one that carries it."""


def _caused(outer: Exception, cause: BaseException) -> Exception:
    outer.__cause__ = cause
    return outer


def _carrying(outer: Exception, cause: BaseException) -> Exception:
    outer.cause = cause  # type: ignore[attr-defined]
    return outer
