"""The guard: a small process between an engine and its owner, which outlives neither.

Run as a script, never imported by the owner: ``python -I -S guard.py CONFIG COMMAND STATUS HELD… MARKER``
with inherited descriptors; those HELD are only kept open, for the engine's reserved ports, and MARKER is
there to be seen in its command line (`leftovers`). Standard library only, with `private` and `shm` beside
it, and no site-packages, so it starts in about 20 ms and needs a few megabytes.

Why it exists. Ray SIGKILLs the direct children of a worker that ends and leaves their descendants
alive (vllm#55510, ray#54364); after a SIGKILL of the worker nothing is cleaned at all, so nothing
may rest on ``atexit``, ``finally`` or ``__del__`` (ray#42861). A parent-death signal reaches one
process, not its children. The guard is what is left to do it:

- forked twice and in a session of its own, so that neither Ray nor a terminal counts it as the
  owner's child;
- a child subreaper (prctl(2)), so that descendants which fork twice and call setsid(2) still
  become its children and can be found and reaped;
- COMMAND is a pipe whose write end only the owner holds. End of file means that the owner is gone,
  however it went: SIGKILL everything below, until waitpid(2) says that no child is left, then exit.

Commands, a byte each: ``T`` sends TERM (and CONT, for a stopped process cannot act on TERM) to the
engine's process group; ``K`` kills the whole tree. STATUS gets JSON lines, in this order:
``{"event": "guard", "pid", "ticks"}``, then ``{"event": "engine", "pid", "ticks"}`` or
``{"event": "spawn_error", "errno", "message", "path"}``, then ``{"event": "exit", "status"}`` (or
``"signal"``), then ``{"event": "gone"}`` (nothing below the guard is left), then ``shm_done`` and
``tmp_done``, each with what ``failed``. Without ``gone`` the guard itself was killed: then the engine
was too, by its parent-death signal, and the owner sweeps for the rest. In between come ``tree`` (the
pids and ticks below the guard) and ``shm`` (the shared memory that they have), as they are seen, and
``trouble``, what the guard could not do. ``ticks`` is field 22 of proc(5) stat, the start time since
boot in clock ticks: with it a pid names one process for ever.

What the tree leaves: the engine's private temporary directory, which the guard makes and removes
(`private`), and shared memory, for which it looks while the tree lives (`shm`). CONFIG is a nameless
file; at the end it holds what the engine wrote as its error file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

if __package__:
    from dispatch.engines.traces import private, shm
else:  # as a script, without a path to anything of ours: two files of the room beside this one
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "traces"))
    private, shm = __import__("private"), __import__("shm")

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
LONGEST_PAUSE = 500
"""Milliseconds between two rounds of killing, at most, when something will not die (state D)."""
LOOK = 5.0
"""Seconds between two looks at the tree when nothing happens; the first comes after a tenth of it."""
LOOK_NEW = 0.05
"""Seconds from one look to the next, at least, when /dev/shm changes all the time."""


def stat_of(pid: int) -> tuple[int, int] | None:
    """Parent pid and start ticks of a process, or None when it is gone or a zombie. One that only looks
    like a zombie, since its first thread has ended and others go on, is neither."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold anything, also ")"
    return None if fields[0] == b"Z" and int(fields[17]) < 2 else (int(fields[1]), int(fields[19]))


def descendants(root: int) -> list[tuple[int, int]]:
    """(pid, start ticks) of everything below ``root`` that still runs."""
    below: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := stat_of(int(name))) is not None:
            below.setdefault(stat[0], []).append((int(name), stat[1]))
    found, queue = [], [root]
    while queue:
        children = below.get(queue.pop(), [])
        found += children
        queue += [pid for pid, _ in children]
    return found


def kill(pid: int, ticks: int) -> None:
    """SIGKILL one process, never another one that got its pid since: a pidfd holds on to it while
    the start time is compared (pidfd_open(2))."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return  # gone
    try:
        stat = stat_of(pid)
        if stat is not None and stat[1] == ticks:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        pass  # gone in between, or not ours to kill: the owner's deadline names what is left
    finally:
        os.close(handle)


class Guard:
    """The state of one guard: its descriptors and its engine."""

    def __init__(self, config: int, command: int, status: int) -> None:
        with open(config, "rb", closefd=False) as file:
            self.config = json.load(file)
        self.file = config
        self.command = command
        self.status = status
        self.engine = 0  # pid while it runs or is not reaped yet: until then no other process has it
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.wake, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.private = False  # whether there is a directory
        self.watch = shm.Watch()
        self.due = time.monotonic() + LOOK / 10  # when to look next
        self.not_before = 0.0  # however much happens
        self.told: set[tuple[int, int]] = set()  # pids and ticks that the owner knows
        self.to_tell: list[tuple[str, dict[str, object]]] = []

    def say(self, event: str, **facts: object) -> None:
        """One status line. An owner that is gone does not matter here: end of file tells us."""
        with contextlib.suppress(OSError):
            os.write(self.status, json.dumps({"event": event, **facts}).encode() + b"\n")

    def attempt(self, what: str, action: Callable[[], object]) -> str:
        """Do what the guard can do without; what went wrong, "" if nothing did. Whatever it is, the tree
        must still be ended."""
        try:
            action()
        except Exception as exc:  # noqa: BLE001 - see above; it is said, not dropped
            text = f"{what}: {exc}" if isinstance(exc, OSError) else f"{what}: {type(exc).__name__}: {exc}"
            self.say("trouble", text=text)
            return text
        return ""

    def prctl(self, option: int, value: int | bytes) -> None:
        if self.libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

    def prepare(self) -> None:
        """Session, subreaper, and signals as wake-ups of the one loop."""
        os.setsid()
        os.chdir("/")
        self.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.prctl(PR_SET_NAME, b"failsoft-guard")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the owner's thread may have blocked some
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # handled through the wake-up descriptor

    def start_engine(self) -> bool:
        """Fork and exec the engine; False (and a ``spawn_error``) when exec failed."""
        argv, cwd, env, me = self.config["argv"], self.config["cwd"], self.config["env"], os.getpid()
        tmp = self.config["tmp"]
        # Its lock lasts until the guard ends. Without the directory the engine starts all the same.
        if tmp and not self.attempt("private temporary directory", lambda: private.make(tmp)):
            self.private = True
            env |= self.config["tmp_env"]
        failed, tell = os.pipe()  # close-on-exec: end of file means that exec worked
        self.engine = os.fork()
        if self.engine == 0:
            path = cwd
            try:
                self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != me:
                    os._exit(127)  # the guard died before the signal was set
                os.setsid()
                for number in signal.valid_signals():
                    # What is ignored stays so through exec: Python ignores PIPE and XFSZ, a shell's
                    # background job INT and QUIT, and an engine that ignores TERM cannot be stopped.
                    with contextlib.suppress(OSError, ValueError):  # KILL, STOP and libc's own cannot be set
                        signal.signal(number, signal.SIG_DFL)
                os.chdir(cwd)
                path = argv[0]
                os.execvpe(path, argv, env)  # noqa: S606 - the operator's command, without a shell
            except OSError as exc:
                failure = {"errno": exc.errno, "message": exc.strerror, "path": path}
                os.write(tell, json.dumps(failure).encode())
            finally:
                os._exit(127)
        os.close(tell)
        with open(failed, "rb") as file:
            error = file.read()
        if error:
            self.say("spawn_error", **json.loads(error))
            return False
        stat = stat_of(self.engine)
        self.say("engine", pid=self.engine, ticks=stat[1] if stat else 0)
        return True

    def reap(self) -> bool:
        """Reap what ended and report the engine's exit. True when no child is left at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.engine:
                self.engine = 0
                if os.WIFSIGNALED(status):
                    self.say("exit", signal=os.WTERMSIG(status))
                else:
                    self.say("exit", status=os.WEXITSTATUS(status))

    def terminate(self) -> None:
        """TERM, then CONT, to the engine's process group. Its leader is not reaped, so the group
        is still the engine's."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            try:
                if self.engine:
                    os.killpg(self.engine, number)
            except OSError:
                pass  # the group is empty but for a zombie

    def look(self, *, last: bool = False) -> None:
        """Note which processes there are and which shared memory they have, and tell the owner what is
        new. The next look is put off in proportion to what this one cost: at most a thousandth of a core
        when nothing happens, a twentieth when /dev/shm is busy."""
        began = time.process_time()
        self.due = time.monotonic() + LOOK
        self.watch.drain()
        tree = set(descendants(os.getpid()))
        names, segments = self.watch.look([pid for pid, _ in tree], last=last)
        for one in tree if last else tree - self.told:
            self.to_tell.append(("tree", {"pids": [one]}))
        self.told = tree
        for name, inode in names.items():
            self.to_tell.append(("shm", {"names": {name: inode}}))
        for id, creator in segments.items():
            self.to_tell.append(("shm", {"sysv": {id: creator}}))
        self.tell()
        if (names or segments) and self.private:
            private.note(self.config["tmp"], names, segments)
        cost, now = time.process_time() - began, time.monotonic()
        self.due = now + max(LOOK, 1000 * cost)
        self.not_before = now + max(LOOK_NEW, 20 * cost)

    def tell(self) -> None:
        """What the owner may know later as well: never waits for an owner that does not read."""
        del self.to_tell[:-10_000]
        room = select.poll()
        room.register(self.status, select.POLLOUT)
        while self.to_tell and room.poll(0):
            event, facts = self.to_tell.pop(0)
            self.say(event, **facts)

    def woken(self) -> set[int]:
        """The signals that came since the last call."""
        try:
            return set(os.read(self.wake, 4096))
        except BlockingIOError:
            return set()

    def serve(self) -> None:
        """Until the engine ends, the owner ends, or either it or a signal says to end the tree."""
        poll = select.poll()
        poll.register(self.command, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        news = self.watch.descriptor
        listening = False
        while True:
            if not listening and news >= 0 and self.due > self.not_before:
                poll.register(news, select.POLLIN)
                listening = True
            ready = {fd for fd, _ in poll.poll(1000 * max(0.0, self.due - time.monotonic()))}
            if self.woken() - {signal.SIGCHLD}:
                return  # TERM to the guard means the same as the owner's death
            if self.command in ready:
                commands = os.read(self.command, 64)
                if not commands or b"K" in commands:
                    return
                if b"T" in commands:
                    self.attempt("look", self.look)
                    self.terminate()
            self.reap()
            if not self.engine:
                return
            if news in ready:
                # Not listened to any more until the look: others may use /dev/shm without end.
                poll.unregister(news)
                listening = False
                self.due = min(self.due, self.not_before)
            if time.monotonic() >= self.due:
                self.attempt("look", self.look)

    def end_tree(self) -> None:
        """SIGKILL everything below, again and again, until there is no child left to wait for."""
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        pause = 1
        if not self.reap():
            self.attempt("last look", lambda: self.look(last=True))
        while not self.reap():
            for pid, ticks in descendants(os.getpid()):
                kill(pid, ticks)
            if self.reap():
                return
            poll.poll(pause)  # a SIGCHLD ends the pause
            self.woken()
            pause = min(2 * pause, LONGEST_PAUSE)

    def clear_up(self) -> None:
        """What the tree has left, when it is gone: its error file is handed over, its shared memory and
        its temporary directory are removed."""
        tmp = self.config["tmp"]
        if tmp:
            self.attempt(
                "error file",
                lambda: self.hand_over(private.read(tmp, private.ERROR_FILE, self.config["limit"])),
            )
        self.say("gone")
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):  # the engine's output ends here, not with what follows
            os.dup2(silence, descriptor)
        failed: list[str] = []
        said = self.attempt(
            "shared memory", lambda: failed.extend(shm.remove(self.watch.held, self.watch.sysv)[1])
        )
        self.say("shm_done", failed=[*failed, *filter(None, [said])])
        said = self.attempt("private temporary directory", lambda: private.remove(tmp)) if tmp else ""
        self.say("tmp_done", failed=list(filter(None, [said])))

    def hand_over(self, document: bytes) -> None:
        """Put the error file in the place of the configuration, where the owner has it in memory."""
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, document, 0)


def main(arguments: list[str]) -> int:
    if sys.platform != "linux":
        print(f"failsoft's guard needs Linux (prctl, /proc, pidfd), not {sys.platform}", file=sys.stderr)
        return 78
    config, command, status, *held = (int(text) for text in arguments[:-1])
    for descriptor in (config, command, status, *held):
        os.set_inheritable(descriptor, False)  # the engine must hold none of them
    if os.fork():
        os._exit(0)  # the second fork: our parent sees this one end, and knows nothing of the child
    guard = Guard(config, command, status)
    guard.prepare()
    stat = stat_of(os.getpid())
    guard.say("guard", pid=os.getpid(), ticks=stat[1] if stat else 0)
    if guard.start_engine():
        guard.serve()
    guard.end_tree()
    guard.clear_up()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
