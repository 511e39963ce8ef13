"""Exceptions as people write them, one class for each way to go wrong."""

from __future__ import annotations

from typing import Any, NoReturn

from protocol import CodedError


class KeywordOnly(Exception):
    def __init__(self, *, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_text = status


class TwoRequired(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


class TakesNone(Exception):
    def __init__(self) -> None:
        super().__init__("args", "that", "do not fit")


class NoSuperInit(Exception):
    def __init__(self, what: str) -> None:
        self.what = what


class WillNotLoad(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse_to_load, ())


def _refuse_to_load() -> NoReturn:
    raise RuntimeError("this exception does not load")


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class StrIsNoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class StrIsASubclass(Exception):
    class Text(str):
        def __len__(self) -> int:
            raise RuntimeError("no length")

    def __str__(self) -> str:
        return self.Text("a subclass of str")


class ReprRaises(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class CauseRaises(Exception):
    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise RuntimeError("no cause")


class CauseIsNoException(Exception):
    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        return "a text"  # type: ignore[return-value]


class DictRaises(Exception):
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("no attributes")


class ClassRaises(Exception):
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("no class")


class GetattrRaises(Exception):
    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"no {name}")


class ResponseRaises(Exception):
    @property
    def response(self) -> NoReturn:
        raise RuntimeError("no response")


class LeavesRaise(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no leaves")


def causes_itself() -> Exception:
    exc = ValueError("an ouroboros")
    exc.__cause__ = exc
    return exc


def cause_cycle() -> Exception:
    a, b = ValueError("a"), KeyError("b")
    a.__cause__, b.__cause__ = b, a
    return a


def long_chain(depth: int = 10_000) -> Exception:
    exc: Exception = ValueError("the root")
    for n in range(depth):
        above = RuntimeError(f"level {n}")
        above.__cause__ = exc
        exc = above
    return exc


def deep_group(depth: int = 200) -> Exception:
    exc: Exception = ValueError("the leaf")
    for n in range(depth):
        exc = ExceptionGroup(f"level {n}", [exc])
    return exc


HOSTILE: dict[str, Exception] = {
    "str raises": StrRaises(),
    "str is no text": StrIsNoText(),
    "str is a subclass": StrIsASubclass(),
    "repr raises": ReprRaises("x"),
    "cause raises": CauseRaises("x"),
    "cause is no exception": CauseIsNoException("x"),
    "dict raises": DictRaises("x"),
    "class raises": ClassRaises("x"),
    "getattr raises": GetattrRaises("x"),
    "response raises": ResponseRaises("x"),
    "leaves raise": LeavesRaise("x", [ValueError("y")]),
    "no super init": NoSuperInit("x"),
    "causes itself": causes_itself(),
    "cause cycle": cause_cycle(),
    "10,000 causes": long_chain(),
    "200 groups": deep_group(),
    "lone surrogate": ValueError("\ud800 alone"),
    "20 MB": ValueError("x" * 20_000_000),
}


class Plain(CodedError):
    """A subclass that adds nothing."""


class RequiredArguments(CodedError):
    def __init__(self, engine: str, port: int) -> None:
        super().__init__("ENGINE.PORT_TAKEN", f"{engine}:{port}", {"port": port})
        self.engine, self.port = engine, port


class KeywordArguments(CodedError):
    def __init__(self, *, path: str) -> None:
        super().__init__("CONFIG.MISSING", f"no {path}")
        self.path = path


class NoArguments(CodedError):
    def __init__(self) -> None:
        super().__init__("POOL.CLOSED", "closed")


def coded_errors() -> dict[str, CodedError]:
    attributes = CodedError("TASK.FAILED", "d")
    attributes.extra = {"a": [1, 2]}  # type: ignore[attr-defined]
    notes = CodedError("TASK.FAILED", "d")
    notes.add_note("a first note")
    notes.add_note("a second note")
    caused = CodedError("TASK.FAILED", "d")
    caused.__cause__ = cause_cycle()
    grouped = CodedError("TASK.FAILED", "d")
    grouped.__cause__ = ExceptionGroup("g", [ValueError("a"), CodedError("NODE.IO", "b")])
    return {
        "bare": CodedError("TASK.FAILED"),
        "detail": CodedError("TASK.FAILED", "it broke: ünïcödé \ud800\n'quoted'"),
        "data": CodedError(
            "TASK.FAILED", "d", {"n": 1, "f": 1.5, "list": [1, {"a": None}], "nan": float("nan")}
        ),
        "attributes": attributes,
        "notes": notes,
        "caused": caused,
        "grouped": grouped,
        "foreign": CodedError.from_exception(KeywordOnly(status=503), "UPSTREAM.SERVER_ERROR"),
        "plain subclass": Plain("TASK.FAILED", "d", {"n": 1}),
        "required arguments": RequiredArguments("sglang", 30000),
        "keyword arguments": KeywordArguments(path="/etc/x"),
        "no arguments": NoArguments(),
        "20 MB": CodedError("TASK.FAILED", "x" * 20_000_000),
    }
