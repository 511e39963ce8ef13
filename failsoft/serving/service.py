"""A file's engines as a service: started, kept, answered for on a socket, and stopped for certain.

Whatever ends it (a signal, `failsoft engines down`, every engine given up), the way out is the same:
the engines are stopped, then Ray, and the exit status says whether that went well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Final

import msgspec
import psutil
import ray

from dispatch.engines import EngineFleet, EngineStatus
from dispatch.engines.config import EnginesFile, make_router
from dispatch.processes import until
from failsoft.raying import LATE, ray_at
from failsoft.serving.control import DownOrder, Engine, EngineOrder, FleetStatus, listening
from failsoft.serving.place import claimed
from failsoft.serving.view import Printer
from protocol import CodedError

OK: Final = 0
FAILED: Final = 1


class Service:
    """One run of an engines file. `run` does all of it and returns the exit status."""

    def __init__(self, file: EnginesFile, printer: Printer) -> None:
        self.file = file
        self._printer = printer
        self._began = time.time()
        self._names = {f"engine/{n}": name for n, name in enumerate(file.names)}
        self._fleet: EngineFleet | None = None
        self._ray = ""
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()  # every engine is stopped, or was tried to be
        self._failures: tuple[CodedError, ...] = ()
        self._signals = 0
        self._closing = self._no_time = False
        self._hastening: asyncio.Task[tuple[CodedError, ...]] | None = None
        # HUP is left alone where nohup(1) has it ignored.
        self._caught = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._caught.append(signal.SIGHUP)

    async def run(self) -> int:
        """Raises CodedError CONFIG.INVALID when a fleet of that name runs or Ray does not start."""
        fleet, say = self.file.fleet, self._printer.say
        with claimed(fleet.name) as path, self._catching():
            async with listening(self, path):
                try:
                    await self._serve()
                finally:
                    self._ended.set()  # whoever gave the order to end gets an answer in any case
        for error in self._failures:
            say(f"{error.code}: {error.detail}")
        say(f"fleet {fleet.name} ended")
        return FAILED if self._failures else OK

    async def _serve(self) -> None:
        table = self.file.fleet
        self._printer.say(f"fleet {table.name}: {len(self.file.specs)} engines of {self.file.path}")
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(ray_at(table.ray or None))
            except SystemExit:  # of Ray's own handler of SIGTERM, while it starts
                if await until(self._ending.is_set, LATE):  # ours runs as well, once the loop turns
                    return
                raise
            self._listen()  # again: ray.init puts handlers of its own in the place of ours
            self._ray = ray.get_runtime_context().gcs_address
            router = make_router(self.file.router)
            if router is not None:
                stack.push_async_callback(router.close)
            fleet = EngineFleet(
                self.file.specs,
                events=self._printer.events,
                restart_backoff=table.restart_backoff,
                restart_budget=table.restart_budget,
                router=router,
            )
            fleet.on_change(self._changed)
            self._fleet = fleet
            async with fleet:
                await self._ending.wait()  # a service: it goes on until somebody says so
                lost = fleet.given_up
                self._closing = True
                self._failures = await fleet.close(0.0 if self._no_time else None)
            if len(lost) == len(fleet.engines()) and lost[0] not in self._failures:
                self._failures = (lost[0], *self._failures)

    # -- what control asks -------------------------------------------------------------------------

    def status(self) -> FleetStatus:
        """How all of it stands."""
        engines = self._fleet.engines() if self._fleet is not None else ()
        return FleetStatus(
            name=self.file.fleet.name,
            file=str(self.file.path),
            state="stopping" if self._ending.is_set() else "running" if self._ray else "starting",
            pid=os.getpid(),
            create_time=psutil.Process().create_time(),
            since=self._began,
            ray=self._ray,
            engines=tuple(
                Engine(**msgspec.structs.asdict(status), name=self._names.get(status.key, ""))
                for status in engines
            ),
            failures=tuple(f"{error.code}: {error.detail}" for error in self._failures),
        )

    async def drain(self, order: EngineOrder) -> None:
        """Let one engine finish what it has and stop it. Raises CodedError: CONFIG.INVALID for a key that
        is none, and what the fleet's drain raises."""
        fleet, key = self._ordered(order, "drain")
        await fleet.drain(key, order.timeout)

    async def restart(self, order: EngineOrder) -> None:
        """Give one engine a new life, once it has finished what it has; also one that is down. Raises
        CodedError as `drain`."""
        fleet, key = self._ordered(order, "restart")
        await fleet.restart(key, order.timeout)

    def _ordered(self, order: EngineOrder, what: str) -> tuple[EngineFleet, str]:
        keys = [key for key, name in self._names.items() if order.key in (key, name)]
        if not keys:
            known = ", ".join(f"{key} ({name})" for key, name in self._names.items())
            raise CodedError("CONFIG.INVALID", f"there is no engine {order.key!r}; there are {known:.500}")
        if self._fleet is None or self._ending.is_set():
            raise CodedError("POOL.CLOSED", f"fleet {self.file.fleet.name} is {self.status().state}")
        self._printer.say(f"{keys[0]}: {what}, asked for by a command")
        return self._fleet, keys[0]

    async def down(self, order: DownOrder) -> None:
        """Stop everything; engines that are still there after the order's timeout are killed."""
        if not self._ending.is_set():
            self._printer.say("down, asked for by a command: stopping")
        self._ending.set()
        try:
            async with asyncio.timeout(order.timeout):
                await self._ended.wait()
        except TimeoutError:
            self._hasten()
            await self._ended.wait()  # bounded: the fleet's close has its own deadlines

    # -- signals -----------------------------------------------------------------------------------

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """TERM, INT and HUP stop the service, a second one at once."""
        self._listen()
        try:
            yield
        finally:
            for which in self._caught:
                asyncio.get_running_loop().remove_signal_handler(which)

    def _listen(self) -> None:
        for which in self._caught:
            asyncio.get_running_loop().add_signal_handler(which, self._signalled, which)

    def _signalled(self, which: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            self._printer.say(f"{which.name}: stopping; once more to kill the engines")
        else:
            self._printer.say(f"{which.name}: killing the engines")
            self._hasten()
        self._ending.set()

    def _hasten(self) -> None:
        """No more time for TERM: the engines are killed, wherever they run."""
        self._no_time = True
        if self._fleet is not None and self._closing:
            self._hastening = asyncio.create_task(self._fleet.close(0.0))

    def _changed(self, status: EngineStatus) -> None:
        assert self._fleet is not None
        self._printer.engine(status, self._names.get(status.key, ""))
        if len(self._fleet.given_up) == len(self._fleet.engines()):
            self._ending.set()  # nobody would ever serve again
