"""What lies below an exception: leaves, causes, and what Ray wrapped; each once, and never for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from protocol.safe import CONTROL

_LEAVES: Final[Any] = vars(BaseExceptionGroup)["exceptions"]


def below(exc: BaseException, *, context: bool = False) -> list[BaseException]:
    """What directly lies below an exception: a group's leaves, Ray's ``cause``, then ``__cause__``.

    ``__context__`` only on request: what happened to be handled when an exception arose explains it
    to a reader, but it is another failure, and must not lend the new one its name. Attributes that
    raise when they are read hide what is below them, and nothing else."""
    found: list[object] = []
    try:
        if issubclass(type(exc), BaseExceptionGroup):  # not isinstance, which asks a foreign __class__
            found += _LEAVES.__get__(exc)  # not the attribute, which a subclass may have replaced
        found.append(vars(exc).get("cause"))
        if exc.__cause__ is not None:
            found.append(exc.__cause__)
        elif context and not exc.__suppress_context__:
            found.append(exc.__context__)
    except CONTROL:
        raise
    except BaseException:  # noqa: BLE001, S110 - a property of a foreign exception may raise anything
        pass
    return [cast(BaseException, one) for one in found if issubclass(type(one), BaseException)]


def walk(exc: BaseException, limit: int = 256, *, context: bool = False) -> list[BaseException]:
    """``exc`` and everything below it, outermost first, each once, at most ``limit``: cause cycles
    and chains of thousands end."""
    return _reached(exc, lambda one: below(one, context=context), limit)


def leaves_of(group: BaseException, limit: int = 256) -> list[BaseException]:
    """The leaves of a group and of the groups in it, each once, at most ``limit``. What lies below a leaf is
    none: the outermost names a failure."""

    def members(one: BaseException) -> Iterable[BaseException]:
        return _LEAVES.__get__(one) if issubclass(type(one), BaseExceptionGroup) else ()

    found = _reached(group, members, limit)
    return [one for one in found if not issubclass(type(one), BaseExceptionGroup)]


def _reached(
    first: BaseException, onward: Callable[[BaseException], Iterable[BaseException]], limit: int
) -> list[BaseException]:
    seen: dict[int, BaseException] = {}
    queue = [first]
    for current in queue:  # the list grows while it is read: breadth first
        if id(current) not in seen:
            seen[id(current)] = current
            if len(seen) == limit:
                break
            queue += onward(current)
    return list(seen.values())


def came_through_ray(exc: BaseException) -> bool:
    """Whether ``exc``, or what lies below it, is a RayTaskError or its dual: raised in another process."""
    return any(is_ray_task_error(type(one)) for one in walk(exc))


def is_ray_task_error(kind: type) -> bool:
    """Whether it is RayTaskError, or a dual: what Ray makes of it and the class of its cause."""
    return any(cls.__name__ == "RayTaskError" and cls.__module__ == "ray.exceptions" for cls in kind.__mro__)
