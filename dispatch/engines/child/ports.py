"""Ports: one that is free now, whether it was taken since, and whose it is.

Between choosing a port and binding it another process can take it (verl#3977, verl#6448: two
engines started at once with the same seed). Nothing here tries to prevent that: the start is
tried again with a fresh port, and a port counts as the engine's only when one of the engine's own
processes listens on it, for an answer from another program's server looks like success.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

import psutil

TRIES: Final = 5
"""How many ports one start tries."""
STATUS_TAKEN: Final = 98
"""Exit status of an engine whose port was taken: EADDRINUSE on Linux."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of ``host`` that nothing uses at this moment, chosen by the kernel at random from
    the ephemeral range. Raises OSError when ``host`` is no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def says_taken(status: int | None, last_lines: Iterable[str]) -> bool:
    """Whether an engine that exited did so because its port was taken: by its exit status, or by
    what it printed (uvicorn, vLLM and SGLang print the errno's text and exit with 1)."""
    if status == STATUS_TAKEN:
        return True
    return any("address already in use" in line.lower() for line in last_lines)


def listens(root_pid: int, port: int) -> bool:
    """Whether a process below ``root_pid`` listens on ``port`` (proc(5): net/tcp and fd).

    True as well when one of them cannot be looked into (another user's): what cannot be known must
    not keep an engine from serving. Blocks for some milliseconds: call it in a thread."""
    try:
        processes = psutil.Process(root_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    for process in processes:
        try:
            sockets = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            return True
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets):
            return True
    return False
