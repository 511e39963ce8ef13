"""The scheduler on its own loop: bounds, order, pausing and swapping, without a socket in between."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from dispatch.engines.embedded.generation import Generation, Sampling
from dispatch.engines.embedded.ngram import NGram, Vocabulary, packaged_corpus, read_text
from dispatch.engines.embedded.scheduler import MAX_BURST, QueueFull, Scheduler

TEXT = read_text(packaged_corpus())
VOCABULARY = Vocabulary(TEXT)
MODEL = NGram(VOCABULARY, TEXT)
DEADLINE = 5.0


def asking(tokens: int = 8, *names: str, **sampling: object) -> Generation:
    settings = Sampling(max_new_tokens=tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Generation(names or ("r",), VOCABULARY.encode("The harbour"), settings, random.Random(1))


@contextlib.asynccontextmanager
async def running(
    max_running: int = 2, max_queue: int = 2, token_rate: float = 0.0
) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(max_running=max_running, max_queue=max_queue, token_rate=token_rate)
    scheduler.install(MODEL, "v1")
    task = asyncio.create_task(scheduler.run())
    try:
        async with asyncio.timeout(DEADLINE):
            yield scheduler
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def turns(count: int = 20) -> None:
    """Let the loop run: an unpaced scheduler steps once a turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_bounds_hold_and_the_queue_is_first_in_first_out() -> None:
    async with running() as scheduler:
        scheduler.freeze(True)
        asked = [asking() for _ in range(4)]
        for one in asked:
            scheduler.submit(one)
        assert (scheduler.running, scheduler.waiting) == (2, 2)
        with pytest.raises(QueueFull, match="2 requests"):
            scheduler.submit(asking())
        scheduler.abort(asked[0], "gone")
        scheduler.abort(asked[3], "gone")
        assert (scheduler.running, scheduler.waiting) == (2, 0)
        scheduler.freeze(False)
        await asked[2].done.wait()
        assert asked[2].finish == {"type": "length", "length": 8}
        assert asked[3].finish == {"type": "abort", "message": "gone"}
        assert not asked[3].output_ids


async def test_an_end_is_final() -> None:
    async with running() as scheduler:
        one = asking()
        scheduler.submit(one)
        await one.done.wait()
        scheduler.abort(one, "too late")
        assert one.finish == {"type": "length", "length": 8}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_text_goes_on_as_if_nothing_had_happened(mode: str) -> None:
    async with running() as scheduler:
        whole, paused = asking(MAX_BURST * 4), asking(MAX_BURST * 4)
        scheduler.submit(whole)
        await whole.done.wait()
        scheduler.submit(paused)
        await paused.changed.wait()
        scheduler.pause(mode)  # type: ignore[arg-type]
        so_far = list(paused.output_ids)
        assert 0 < len(so_far) < MAX_BURST * 4
        await turns()
        assert paused.output_ids == so_far
        assert (scheduler.running, scheduler.waiting) == ((0, 1) if mode == "retract" else (1, 0))
        scheduler.resume()
        await paused.done.wait()
        assert paused.text == whole.text


async def test_a_retracted_request_keeps_its_place_before_the_queue() -> None:
    async with running(max_running=1) as scheduler:
        scheduler.freeze(True)
        first, second = asking(), asking()
        scheduler.submit(first)
        scheduler.submit(second)
        scheduler.pause("retract")
        assert scheduler.waiting == 2
        scheduler.resume()
        scheduler.freeze(False)
        await first.done.wait()
        assert second.finish is None


async def test_a_swap_waits_for_what_runs_and_holds_back_what_comes() -> None:
    async with running() as scheduler:
        scheduler.freeze(True)
        old, new = asking(), asking()
        scheduler.submit(old)
        swap = asyncio.create_task(scheduler.swap(NGram(VOCABULARY, "Bees bees bees."), "v2"))
        await turns()
        scheduler.submit(new)
        assert (scheduler.running, scheduler.waiting) == (1, 1)
        assert scheduler.weight_version == "v1"
        scheduler.freeze(False)
        await swap
        await new.done.wait()
        assert (old.weight_version, new.weight_version) == ("v1", "v2")
        assert "Bees" in new.text


async def test_a_cancelled_swap_lets_requests_in_again() -> None:
    async with running() as scheduler:
        scheduler.freeze(True)
        old, new = asking(), asking()
        scheduler.submit(old)
        swap = asyncio.create_task(scheduler.swap(MODEL, "v2"))
        await turns()
        swap.cancel()
        await asyncio.wait({swap})
        scheduler.submit(new)
        assert (scheduler.running, scheduler.waiting) == (2, 0)
        assert scheduler.weight_version == "v1"


async def test_a_swap_while_paused_in_place_changes_the_text_in_mid_sentence() -> None:
    async with running() as scheduler:
        one = asking(MAX_BURST * 4)
        scheduler.submit(one)
        await one.changed.wait()
        scheduler.pause("in_place")
        await scheduler.swap(NGram(VOCABULARY, "Bees bees bees."), "v2")
        scheduler.resume()
        await one.done.wait()
        assert one.weight_version == "v2"
        assert "Bees" in one.text
        assert not one.text.startswith("Bees")


async def test_a_probe_passes_a_full_engine_but_not_a_paused_one() -> None:
    async with running(max_running=1, max_queue=0, token_rate=1000.0) as scheduler:
        scheduler.submit(asking(100_000))
        probe = await scheduler.probe()
        assert probe.finish == {"type": "length", "length": 1}
        scheduler.pause("in_place")
        waiting = asyncio.create_task(scheduler.probe())
        await turns()
        assert not waiting.done()
        scheduler.resume()
        await waiting


async def test_a_closed_scheduler_ends_whatever_still_comes() -> None:
    async with running() as scheduler:
        scheduler.close("bye")
        late = asking()
        scheduler.submit(late)
        assert late.finish == {"type": "abort", "message": "bye"}
        assert (await scheduler.probe()).finish == {"type": "abort", "message": "bye"}


async def test_an_abort_by_name_ends_every_request_of_that_name() -> None:
    async with running() as scheduler:
        scheduler.freeze(True)
        same = [asking(8, "a"), asking(8, "header", "a"), asking(8, "a")]
        other = asking(8, "b")
        for one in [*same, other]:
            scheduler.submit(one)
        assert scheduler.abort_named("a", "named") == 3
        assert scheduler.abort_named("a", "named") == 0
        assert other.finish is None


async def test_a_stop_string_cuts_the_text_and_is_never_shown_in_part() -> None:
    one = asking(100, stop=("before the town", "never said"), temperature=0.0)
    shown = []
    while one.finish is None:
        one.advance(MODEL)  # by hand, so that every token is looked at: a step may hold many
        shown.append(one.settled_text())
    assert one.finish == {"type": "stop", "matched": "before the town"}
    assert shown == [" wakes", " wakes ", " wakes ", " wakes "]


async def test_a_request_for_no_tokens_ends_with_none() -> None:
    async with running() as scheduler:
        one = asking(0)
        scheduler.submit(one)
        await one.done.wait()
        assert (one.finish, one.output_ids) == ({"type": "length", "length": 0}, [])
