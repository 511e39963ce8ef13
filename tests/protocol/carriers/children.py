"""Children that fail, one function for each way: ``python -m tests.protocol.carriers.children WAY``.

And the workers of the pools, which must stand in a module that a spawned process can import."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from protocol import CodedError, coded
from protocol.carriers.error_file import write
from tests.protocol.badly_written import KeywordOnly, StrRaises

ID = "ABCDEFGH"


def fail() -> NoReturn:
    raise ValueError("it broke")


def fail_with_a_code() -> NoReturn:
    raise CodedError("WEIGHTS.REFIT_ABORTED", "the watchdog", {"step": 7, "why": ["a", None]}, id=ID)


def fail_because_of_a_code() -> NoReturn:
    try:
        fail_with_a_code()
    except CodedError as exc:
        raise RuntimeError("the trainer gave up") from exc


def fail_in_a_thread() -> None:
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def fail_in_a_bare_thread() -> None:
    """One without a Thread object: Python reports it as unraisable."""
    import _thread

    ended = threading.Event()

    class Sentinel:
        def __del__(self) -> None:
            ended.set()

    def body(held: Sentinel) -> NoReturn:
        raise ValueError("it broke")

    held = Sentinel()
    _thread.start_new_thread(body, (held,))
    del held
    if not ended.wait(20):
        os._exit(99)


def exit_in_a_thread() -> None:
    thread = threading.Thread(target=sys.exit, args=("only this thread",))
    thread.start()
    thread.join()


def fail_in_a_thread_and_be_killed() -> None:
    fail_in_a_thread()
    die(signal.SIGKILL)


def fail_in_a_thread_and_then_in_main() -> None:
    fail_in_a_thread()
    raise CodedError("CONFIG.INVALID", "what came of it")


async def _fail_async() -> None:
    fail()


def fail_in_a_task() -> None:
    async def main() -> None:
        task = asyncio.create_task(_fail_async())
        await asyncio.wait([task])
        del task
        gc.collect()

    asyncio.run(main())


def fail_in_a_callback() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(fail)
        called = loop.create_future()
        loop.call_soon(called.set_result, None)
        await called

    asyncio.run(main())


def lose_a_connection() -> None:
    """What asyncio reports about a transport is no failure of the process."""

    async def main() -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "Fatal write error on socket transport", "exception": OSError(9, "bad")}
        )

    asyncio.run(main())


def fail_at_exit() -> None:
    atexit.register(fail)


class FailsWhenCollected:
    def __del__(self) -> None:
        fail()


def fail_when_collected() -> None:
    held = FailsWhenCollected()
    del held


def fail_at_the_interpreters_end() -> None:
    # In the globals of a module that is still imported: collected when modules are torn down.
    sys.modules["protocol"].held_to_the_end = FailsWhenCollected()  # type: ignore[attr-defined]


def fail_at_the_end_of_main() -> None:
    globals()["held_to_the_end"] = FailsWhenCollected()


def fail_without_text() -> NoReturn:
    raise StrRaises


def fail_in_a_group() -> NoReturn:
    code = CodedError("NODE.IO", "one disk", id=ID)
    raise ExceptionGroup("two", [ValueError("another"), code])


def exit_3() -> NoReturn:
    sys.exit(3)


def exit_with_text() -> NoReturn:
    sys.exit("no checkpoint in /ckpt")


def exit_with_a_token() -> NoReturn:
    sys.exit(str(CodedError("CONFIG.MISSING", "no checkpoint", id=ID)))


def exit_0() -> NoReturn:
    sys.exit()


def exit_at_once() -> NoReturn:
    os._exit(5)


def interrupt() -> None:
    die(signal.SIGINT)


def die(number: int | None = None) -> None:
    os.kill(os.getpid(), int(sys.argv[2]) if number is None else number)
    signal.pause()


def abort() -> NoReturn:
    os.abort()


def segfault() -> None:
    ctypes.string_at(0)


def use_up_the_memory() -> NoReturn:
    """Down to the last kilobytes, and holding on to all of it."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
    held: list[bytes] = []
    chunk = 16 << 20
    while True:
        try:
            held.append(bytes(chunk))
        except MemoryError:
            if chunk <= 1024:
                raise
            chunk //= 2


def use_up_the_cpu() -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 10))
    while True:
        pass


def use_up_the_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    with open(sys.argv[2], "wb", buffering=0) as file:
        file.write(b"x" * 100)
        file.write(b"x")


def write_on_a_full_disk() -> None:
    """Prints what `write` says where a file can hold no more than ten bytes (argv: the path)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    print(write(sys.argv[2], CodedError("NODE.DISK_FULL")))


def fill_the_disk_and_write() -> None:
    """The same on a small file system that is really full (argv: the path)."""
    path = sys.argv[2]
    try:
        with open(os.path.join(os.path.dirname(path), "ballast"), "wb", buffering=0) as ballast:
            while True:
                ballast.write(b"x" * 1024)
    except OSError as full:
        print(full.errno)
    print(write(path, CodedError("NODE.DISK_FULL")))


def write_when_told() -> None:
    """One of several that write at once: waits for the end of stdin, then ten threads write."""
    path, mine = sys.argv[2], [CodedError("TASK.FAILED", str(n) * 3000) for n in range(10)]
    barrier = threading.Barrier(len(mine))

    def one(error: CodedError) -> None:
        barrier.wait(20)
        if write(path, error):
            print(error.id, flush=True)

    threads = [threading.Thread(target=one, args=(error,)) for error in mine]
    print("ready", flush=True)
    sys.stdin.read()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


WAYS: dict[str, Callable[[], Any]] = {
    name: way
    for name, way in list(globals().items())
    if callable(way) and getattr(way, "__module__", "") == __name__
}


# -- workers of pools


@coded
def coded_worker(n: int) -> NoReturn:
    raise CodedError("WEIGHTS.REFIT_ABORTED", f"rank {n}", {"rank": n}, id=ID)


@coded
def coded_worker_of_a_foreign_exception(status: int) -> NoReturn:
    raise KeywordOnly(status=status)


def plain_worker(kind: type[Exception], text: str) -> NoReturn:
    raise kind(text)


def chained_worker() -> NoReturn:
    fail_because_of_a_code()


def handling_worker() -> NoReturn:
    try:
        fail_with_a_code()
    except CodedError:
        raise ValueError("another failure")  # noqa: B904 - what was being handled is what this is about


def killed_worker() -> None:
    die(signal.SIGKILL)


def unpicklable_result() -> Any:
    return _Locked(str(CodedError("NODE.IO", "a disk", id=ID)))


class _Locked:
    def __init__(self, text: str) -> None:
        self.text, self.lock = text, threading.Lock()

    def __repr__(self) -> str:
        return f"<result: {self.text}>"


class RefusesToBePickled(Exception):
    def __reduce__(self) -> NoReturn:
        raise RuntimeError(f"not while {CodedError('NODE.IO', 'a disk', id=ID)}")


class HoldsALock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    WAYS[sys.argv[1]]()
