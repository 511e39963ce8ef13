"""The rollout job, from a file of prompts to a file of samples.

Whatever ends it (the last sample, Ctrl-C, a full disk, engines that cannot be kept alive), the way
out is the same: what was finished is on disk, the pool, the engines and Ray are gone, the summary
says what happened.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from rich.console import Console

from chaos import Injury
from dispatch.engines import EngineFleet, embedded_spec
from dispatch.engines.dialect import Api
from dispatch.files import failed_write, shown, write_atomic
from dispatch.posting import PosterPool
from dispatch.rollout import Failure, RolloutClient, Router, Sample, SampleWriter, load_prompts
from dispatch.rollout.prompts import Prompt, excerpt
from dispatch.rollout.reach import Reached, reach
from failsoft.job.breakage import break_things
from failsoft.job.settings import Settings
from failsoft.job.view import Progressing, Recovered, Summary, injury_text, print_summary
from failsoft.raying import LATE, ray_at
from faults import classify
from faults.alerts import AlertWatcher, build_sinks, default_rules, load_rules
from protocol import CodedError, Events, keys

OK: Final = 0
INCOMPLETE: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
TERMINATED: Final = 143

RECOVER: Final = 30.0
"""Seconds that a finished run waits for what was killed to serve again, so that its alerts resolve."""
DRAIN: Final = 5.0
SHOW: Final = 0.2
"""Seconds between two looks at the numbers."""


class Job:
    """One run. `go` does all of it and returns the exit status."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings = settings
        self.console = console
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self.injuries: list[Injury] = []
        self.stopped_by = ""
        self._progressed = asyncio.Condition()
        self._fleet: EngineFleet | None = None
        self._pool: PosterPool | None = None
        self._client: RolloutClient | None = None
        self._total = 0
        self._signal: signal.Signals | None = None
        self._task: asyncio.Task[Any] | None = None

    async def go(self) -> int:
        """Raises CodedError CONFIG.* and the like for what is wrong before anything was started."""
        settings, began = self.settings, time.monotonic()
        prompts = load_prompts(settings.prompts)
        rules = load_rules(settings.rules) if settings.rules is not None else default_rules()
        sinks = build_sinks(rules.sinks, webhook=settings.webhooks, alertmanager=settings.alertmanagers)
        reached = [
            await reach(url, api=settings.api, model=settings.model, headers=settings.headers)
            for url in settings.engines
        ]
        if len({r.api for r in reached}) > 1:
            how = ", ".join(f"{r.url} ({r.api})" for r in reached)
            raise CodedError("CONFIG.INVALID", f"the engines speak different dialects: {how}; run them apart")
        with SampleWriter(settings.out, mode=settings.mode, run=self.run) as writer:
            skip = frozenset(writer.done)
            _same_prompts(prompts, writer, settings.prompts)
            events_path = settings.out / "events.jsonl"
            with self._events(events_path) as events, self._signals():
                async with AlertWatcher(events_path, rules, sinks) as watcher:
                    code = await self._work(prompts, reached, writer, skip, events)
                    self._task = None
                    await watcher.drain(DRAIN)
            writer.sync()
            written = len(writer.done) - len(skip)
            summary = self._summary(
                code, len(skip), written, time.monotonic() - began, tuple(watcher.summary())
            )
            saved = msgspec.json.format(msgspec.json.encode(summary), indent=2)
            try:
                write_atomic(settings.out / "summary.json", saved)
            finally:  # on a full disk it is only to be seen here, with how to go on
                print_summary(self.console, summary)
        return summary.exit

    def _events(self, path: Path) -> Events:
        try:
            _set_aside(path)  # an earlier part's events would fire its alerts again
            return Events.to_file(path, run=self.run, role="driver")
        except OSError as error:
            raise failed_write(error, path, "cannot be opened", "try again", opening=True) from error

    async def _work(
        self,
        prompts: list[Prompt],
        reached: list[Reached],
        writer: SampleWriter,
        skip: frozenset[tuple[str, int]],
        events: Events,
    ) -> int:
        """The run itself. Returns the exit status; what stopped it is in ``stopped_by``."""
        try:
            async with self._running(events, [r.url for r in reached]) as router:
                api: Api = reached[0].api if reached else "sglang"
                client = self._make_client(router, events, api, reached[0].model if reached else "")
                await self._sample(client, prompts, skip, writer, events)
                await self._wait_recovered()
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            self.stopped_by = f"{self._signal.name}; go on with --resume"
            return INTERRUPTED if self._signal is signal.SIGINT else TERMINATED
        except (CodedError, OSError) as exc:
            error = _named(exc)
            events.emit("run.failed", level="error", error=error, key="run")
            self.stopped_by = f"{error.code}: {' '.join(error.detail.split())}"
            return BAD_INPUT if error.code.family == "CONFIG" else INCOMPLETE
        return OK

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C (or TERM) ends the run in order; a second one ends it now: the guards and
        Ray end what it leaves."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listen()
        try:
            yield
        finally:
            for which in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(which)

    def _listen(self) -> None:
        for which in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(which, self._stop, which)

    def _stop(self, which: signal.Signals) -> None:
        if self._signal is not None:
            self.console.show_cursor()  # which the progress display hides
            os._exit(128 + which)
        self._signal = which
        self.console.print(f"{which.name}: stopping; once more to stop at once")
        if self._task is not None:  # else only the last alerts are under way, for seconds, and the summary
            self._task.cancel()

    @asynccontextmanager
    async def _running(self, events: Events, urls: list[str]) -> AsyncIterator[Router]:
        """Ray, the engines and the pool; on the way out all of them are gone."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(ray_at(settings.ray_address))
            except SystemExit:  # of Ray's own handler of SIGTERM, while it starts
                await asyncio.sleep(LATE)  # ours runs as well, once the loop turns, and ends this
                raise
            self._listen()  # again: ray.init puts handlers of its own in the place of ours
            await self._sign(stack)
            if urls:
                router = Router.static(urls, events)
            else:
                specs = [embedded_spec(token_rate=settings.token_rate)] * settings.embedded
                self._fleet = await stack.enter_async_context(EngineFleet(specs, events=events))
                self.console.print(f"starting {settings.embedded} embedded engines", highlight=False)
                await self._fleet.wait_ready(60.0)
                router = Router.follow(self._fleet, events)
                stack.callback(router.close)
            self._pool = await stack.enter_async_context(
                PosterPool(
                    settings.concurrency,
                    min(settings.posters_per_node, settings.concurrency),
                    settings.deadline,
                    events=events,
                )
            )
            yield router

    async def _sign(self, stack: AsyncExitStack) -> None:
        """Sign this run's tokens; a trusted actor of the user's gets the key by the run's name."""
        keeper = keys.start_keeper(self.run)
        stack.callback(ray.kill, keeper)
        keys.hold(await keys.fetch(self.run))
        stack.callback(keys.hold, None)

    def _make_client(self, router: Router, events: Events, api: Api, model: str) -> RolloutClient:
        settings = self.settings
        assert self._pool is not None
        self._client = RolloutClient(
            self._pool,
            router,
            n=settings.n,
            api=api,
            model=model,
            sampling=settings.sampling,
            deadline=settings.deadline,
            headers=settings.headers,
            stream=settings.stream,
            concurrency=settings.concurrency,
            run=str(settings.out.resolve()),
            events=events,
        )
        return self._client

    async def _sample(
        self,
        client: RolloutClient,
        prompts: list[Prompt],
        skip: frozenset[tuple[str, int]],
        writer: SampleWriter,
        events: Events,
    ) -> None:
        assert self._pool is not None
        self._total = sum((p.id, i) not in skip for p in prompts for i in range(self.settings.n))
        failures = self.settings.out / "failures.jsonl"
        failures.unlink(missing_ok=True)
        with Progressing(self.console, self._total) as view:
            tasks = [asyncio.create_task(self._show(view))]
            if self.settings.chaos:
                breaking = break_things(
                    self._pool, self._fleet, self._settled, self._progressed, events, self.injuries
                )
                tasks.append(asyncio.create_task(breaking))
            try:
                async with aclosing(client.samples(prompts, skip=skip)) as settled:
                    async for one in settled:
                        self._keep(one, writer, failures)
                        async with self._progressed:
                            self._progressed.notify_all()
                        self._check_engines()
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
            view.update(time.monotonic(), client.stats(), self._pool.stats(), *self._ready())

    def _keep(self, one: Sample | Failure, writer: SampleWriter, failures: Path) -> None:
        if isinstance(one, Sample):
            writer.write(msgspec.to_builtins(one))
            return
        with failures.open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")

    def _check_engines(self) -> None:
        """A fleet that is given up as a whole ends the run: waiting for it would be waiting for ever."""
        if self._fleet is not None and len(self._fleet.given_up) == len(self._fleet.engines()):
            raise self._fleet.given_up[0]

    def _settled(self) -> float:
        if self._client is None or self._total == 0:
            return 0.0
        stats = self._client.stats()
        return (stats.completed + stats.failed) / self._total

    async def _show(self, view: Progressing) -> None:
        assert self._pool is not None
        assert self._client is not None
        told = 0
        while True:
            view.update(time.monotonic(), self._client.stats(), self._pool.stats(), *self._ready())
            for injury in self.injuries[told:]:
                view.say(f"injected: {injury_text(injury)}")
            told = len(self.injuries)
            await asyncio.sleep(SHOW)

    def _ready(self) -> tuple[int, int]:
        if self._fleet is None:
            return len(self.settings.engines), len(self.settings.engines)
        return len(self._fleet.routable()), len(self._fleet.engines())

    async def _wait_recovered(self) -> None:
        """Until every poster serves and every engine is ready again, or `RECOVER` seconds."""
        assert self._pool is not None
        if not self.injuries:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(RECOVER):
                while not self._whole(self._pool):  # noqa: ASYNC110 - pool and fleet share no event
                    await asyncio.sleep(SHOW)

    def _whole(self, pool: PosterPool) -> bool:
        ready, engines = self._ready()
        recovered = {r.key for r in self._recoveries()}
        return (
            ready == engines
            and all(poster.state == "serving" for poster in pool.stats().posters)
            and all(injury.key in recovered for injury in self.injuries)
        )

    def _recoveries(self) -> list[Recovered]:
        found = (
            [Recovered(r.key, r.code, r.seconds) for r in self._pool.stats().recoveries] if self._pool else []
        )
        if self._fleet is not None:
            found += [Recovered(r.key, str(r.code), r.seconds) for r in self._fleet.recoveries]
        return found

    def _summary(
        self, code: int, skipped: int, written: int, seconds: float, alerts: tuple[str, ...]
    ) -> Summary:
        """``written`` is what is on disk, counted there and not by the client: the two must agree."""
        stats = self._client.stats() if self._client is not None else None
        pool = self._pool.stats() if self._pool is not None else None
        failed = stats.failed if stats else 0
        # A run that was stopped has samples that nobody began or finished: they are known, not lost.
        unfinished = self._total - written - failed if self.stopped_by else 0
        lost = self._total - written - failed - unfinished
        if code == OK and (failed or lost):
            code = INCOMPLETE
        retried = Counter(stats.retried_by_code if stats else {})
        retried.update(pool.retried_by_code if pool else {})
        out = self.settings.out
        outputs = {"samples": str(out / "samples.jsonl"), "events": str(out / "events.jsonl")}
        if failed:
            outputs["failures"] = str(out / "failures.jsonl")
        return Summary(
            run=self.run,
            exit=code,
            asked=self._total,
            completed=written,
            failed=failed,
            retried=retried.total(),
            lost=lost,
            unfinished=unfinished,
            skipped=skipped,
            failed_by_code=stats.failed_by_code if stats else {},
            retried_by_code=dict(retried),
            seconds=round(seconds, 3),
            posters_recreated=pool.recreated if pool else 0,
            engines_restarted=len(self._fleet.recoveries) if self._fleet is not None else 0,
            recoveries=tuple(self._recoveries()),
            alerts=alerts,
            injuries=tuple(injury_text(i) for i in self.injuries),
            stopped_by=self.stopped_by,
            outputs=outputs,
        )


def _named(exc: CodedError | OSError) -> CodedError:
    """The failure that ends a run; a file's (of events, of failures) gets its name and the remedy here."""
    if isinstance(exc, CodedError):
        return exc
    detail = (
        f"{exc.filename or 'a file of the run'}: {exc.strerror or exc}; mend it, then go on with --resume"
    )
    return CodedError.from_exception(exc, classify(exc).code, detail)


def _same_prompts(prompts: list[Prompt], writer: SampleWriter, path: Path) -> None:
    """Resuming goes by ids, and an id that is a line's number changes its prompt with a line above it."""
    for prompt in prompts:
        if writer.texts.get(prompt.id, hash(prompt.text)) != hash(prompt.text):
            what = f"{excerpt(prompt.id)} is another prompt in {shown(writer.path)} than in {shown(path)}"
            remedy = "resume with the file that it began with, name another folder, or use --overwrite"
            raise CodedError("CONFIG.INVALID", f"{what}; {remedy}", {"file": str(path), "id": prompt.id})


def _set_aside(path: Path) -> None:
    """Rename ``path``, if it is there, to the first free of name.1.jsonl, name.2.jsonl, …"""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
