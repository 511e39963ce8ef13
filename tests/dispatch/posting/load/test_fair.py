"""FIFO for a caller, turns over callers, exact length, bounded garbage."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.posting.load.fair import GARBAGE, Entry, FairQueue


def never(item: object) -> bool:
    return False


def test_ten_beside_ten_thousand_do_not_starve() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(never)
    for number in range(10_000):
        queue.push("many", ("many", number))
    for number in range(10):
        queue.push("few", ("few", number))
    assert len(queue) == 10_010
    first = [queue.pop() for _ in range(20)]
    assert [item for item in first if item and item[0] == "few"] == [("few", n) for n in range(10)]
    rest = [queue.pop() for _ in range(9_990)]
    assert [item for item in first + rest if item and item[0] == "many"] == [
        ("many", n) for n in range(10_000)
    ]
    assert (queue.pop(), len(queue)) == (None, 0)


def test_one_after_the_other_beside_many_is_every_second() -> None:
    """A caller that has one request at a time loses nothing by it."""
    queue: FairQueue[str] = FairQueue(never)
    for _ in range(100):
        queue.push("many", "many")
    served: Counter[str] = Counter()
    for _ in range(50):
        queue.push("one", "one")
        for _ in range(2):
            served[str(queue.pop())] += 1
    assert served == {"many": 50, "one": 50}


def test_what_comes_back_is_before_the_others_of_its_caller() -> None:
    queue: FairQueue[str] = FairQueue(never)
    for n in range(2):
        queue.push("a", f"a{n}")
        queue.push("b", f"b{n}")
    queue.push("a", "back", first=True)
    queue.push("c", "new", first=True)
    assert [queue.pop() for _ in range(7)] == ["back", "b0", "new", "a0", "b1", "a1", None]


def test_a_tombstone_costs_its_caller_no_turn() -> None:
    queue: FairQueue[str] = FairQueue(never)
    entries = [queue.push("a", f"a{n}") for n in range(3)]
    for n in range(3):
        queue.push("b", f"b{n}")
    queue.discard(entries[0])
    assert [queue.pop() for _ in range(6)] == ["a1", "b0", "a2", "b1", "b2", None]


def test_the_dead_are_skipped_and_discarding_them_afterwards_changes_nothing() -> None:
    dead = {1, 3}
    queue: FairQueue[int] = FairQueue(dead.__contains__)
    entries = [queue.push("a", number) for number in range(5)]
    assert [queue.pop(), queue.pop()] == [0, 2]
    queue.discard(entries[0])  # popped
    queue.discard(entries[1])  # skipped
    assert len(queue) == 2  # 3 is dead, and nobody has told so yet
    queue.discard(entries[3])
    queue.discard(entries[3])
    assert (len(queue), list(queue), queue.pop(), queue.pop()) == (1, [4], 4, None)


def test_garbage_is_bounded() -> None:
    queue: FairQueue[int] = FairQueue(never)
    kept = [queue.push(number % 7, number) for number in range(10)]
    for number in range(50_000):
        queue.discard(queue.push(number % 1000, number))
        held = sum(len(line.entries) for line in queue._ring)
        assert held <= 2 * max(len(queue), GARBAGE) + 1
        assert len(queue._ring) == len(queue._lines) <= held
    assert len(queue) == len(kept)
    assert sorted(queue) == list(range(10))
    for entry in kept:
        queue.discard(entry)
    assert (queue.pop(), len(queue), len(queue._lines)) == (None, 0, 0)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32), callers=st.integers(1, 5), steps=st.integers(0, 300))
def test_against_a_plain_model(seed: int, callers: int, steps: int) -> None:
    rng = random.Random(seed)
    dead: set[int] = set()
    queue: FairQueue[int] = FairQueue(dead.__contains__)
    lines: dict[int, list[int]] = {}  # a dict keeps the callers in the order of their turns
    entries: dict[int, Entry[int]] = {}
    told: set[int] = set()
    for number in range(steps):
        action = rng.random()
        if action < 0.5:
            caller = rng.randrange(callers)
            # The model forgets a caller only when the queue does: when its line was used up.
            first = rng.random() < 0.2
            entries[number] = queue.push(caller, number, first=first)
            line = lines.setdefault(caller, [])
            line.insert(0 if first else len(line), number)
        elif action < 0.8:
            expected = None
            while lines and expected is None:
                caller, line = next(iter(lines.items()))
                item = line.pop(0)
                entries.pop(item)
                if item not in dead:
                    expected = item
                if not line:
                    del lines[caller]
                elif expected is not None:
                    lines[caller] = lines.pop(caller)
            assert queue.pop() == expected
        elif entries:
            item = rng.choice(list(entries))
            dead.add(item)
            if rng.random() < 0.5:
                queue.discard(entries[item])
                told.add(item)
        assert len(queue) == len(entries.keys() - told)
        assert set(queue) == entries.keys() - told
        assert queue._garbage == sum(e.gone for line in queue._ring for e in line.entries)
