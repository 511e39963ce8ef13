"""fair: a queue in which nobody starves.

First come first served for each caller, and the callers take turns (round robin, as in Nagle's "On
Packet Switches with Infinite Storage", RFC 970): ten requests beside somebody else's ten thousand are
served after about ten of those, not after all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

GARBAGE: Final = 64
"""Fewest discarded entries that are worth a sweep."""


class Entry(Generic[T]):
    """A place in the queue; its holder may only give it up (`FairQueue.discard`)."""

    __slots__ = ("gone", "item")

    def __init__(self, item: T) -> None:
        self.item = item
        self.gone = False


class _Line(Generic[T]):
    """What one caller has waiting."""

    __slots__ = ("caller", "entries")

    def __init__(self, caller: Hashable) -> None:
        self.caller = caller
        self.entries: deque[Entry[T]] = deque()


class FairQueue(Generic[T]):
    """See the module. Push, pop and discard are O(1), amortised.

    ``dead(item)`` tells that nobody wants an item any more: `pop` skips it. What is given up by
    `discard` stays as a tombstone until its turn, yet never more of them than of the living (and
    `GARBAGE`). The length counts entries that were neither popped, skipped nor discarded."""

    __slots__ = ("_dead", "_garbage", "_lines", "_live", "_ring")

    def __init__(self, dead: Callable[[T], bool]) -> None:
        self._dead = dead
        self._lines: dict[Hashable, _Line[T]] = {}
        self._ring: deque[_Line[T]] = deque()  # whose turn it is; no line in it is empty
        self._live = 0
        self._garbage = 0

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[T]:
        """What waits, in no order that means anything. The queue must not change meanwhile."""
        return (entry.item for line in self._ring for entry in line.entries if not entry.gone)

    def push(self, caller: Hashable, item: T, *, first: bool = False) -> Entry[T]:
        """Queue ``item`` behind what ``caller`` has waiting already; with ``first`` before it, for an item
        that had its turn and came back."""
        line = self._lines.get(caller)
        if line is None:
            line = self._lines[caller] = _Line(caller)
            self._ring.append(line)
        entry = Entry(item)
        if first:
            line.entries.appendleft(entry)
        else:
            line.entries.append(entry)
        self._live += 1
        return entry

    def pop(self) -> T | None:
        """The next item that is alive, None where there is none."""
        while self._ring:
            line = self._ring[0]
            entry = line.entries.popleft()
            if entry.gone:
                self._garbage -= 1
                found = False
            else:
                entry.gone = True
                self._live -= 1
                found = not self._dead(entry.item)
            if not line.entries:
                self._ring.popleft()
                del self._lines[line.caller]
            elif found:
                self._ring.rotate(-1)  # a tombstone costs its caller no turn
            if found:
                return entry.item
        return None

    def discard(self, entry: Entry[T]) -> None:
        """Give a place up. Nothing happens where `pop` has had it already."""
        if entry.gone:
            return
        entry.gone = True
        self._live -= 1
        self._garbage += 1
        if self._garbage > GARBAGE and self._garbage > self._live:
            self._sweep()

    def _sweep(self) -> None:
        for line in self._ring:
            line.entries = deque(entry for entry in line.entries if not entry.gone)
        self._ring = deque(line for line in self._ring if line.entries)
        self._lines = {line.caller: line for line in self._ring}
        self._garbage = 0
