"""The codes that failsoft itself uses: the catalogue's table, one row a code.

A row is never renamed and never reused; a code that fell out of use stays. Columns: code, default
advice, what is known of the outcome, meaning, runbook.
"""

from __future__ import annotations

from typing import Final

from protocol.catalogue import Advice, Entry, Outcome
from protocol.codes import Code


def _e(code: str, advice: Advice, outcome: Outcome, meaning: str, runbook: str) -> Entry:
    return Entry(Code(code), meaning, advice, outcome, runbook)


ENTRIES: Final = (
    # TASK: code that ran and raised
    _e("TASK.FAILED", "give_up", "ran", "user code raised an exception",
       "Read the exception type and text in the detail; it is the user's code that raised. Nothing retries it."),
    _e("TASK.UNSERIALIZABLE", "give_up", "ran", "an exception crossed a Ray boundary as text only",
       "The class could not be pickled or loaded (keyword-only __init__, a lock among its attributes). "
       "Decorate the raising side with @coded so that type, text and code survive."),
    _e("TASK.WORKER_CRASHED", "retry_elsewhere", "unknown", "the worker process of a task died while running it",
       "Look for OOM kills (dmesg, the raylet log) and segfaults in the worker's log. Idempotent work is retried."),
    _e("TASK.PROCESS_KILLED", "retry_elsewhere", "unknown", "a child process was ended by a signal from outside",
       "The signal is in the data. Unasked SIGKILLs are mostly the OOM killer (dmesg, the cgroup's memory.events) or an "
       "operator; idempotent work is retried elsewhere."),
    _e("TASK.PROCESS_CRASHED", "give_up", "unknown", "a child process crashed: segfault, abort, illegal instruction, bus error",
       "The signal is in the data and faulthandler's stack, if any, in the last lines of its output. Start it under gdb, or "
       "with the native library that crashed taken out; the same input will often crash it again."),
    _e("TASK.PROCESS_EXITED", "give_up", "ran", "a child process ended with a status other than 0 and named no failure",
       "The status is in the data; read the last lines of its output. A process started through protocol.carriers.child "
       "would have left its failure's name in an error file."),
    _e("TASK.ENVIRONMENT", "give_up", "not_run", "a task's or actor's runtime environment could not be set up",
       "Read runtime_env_setup-*.log on the node named in the detail: usually a package or a working_dir."),
    _e("TASK.UNSCHEDULABLE", "give_up", "not_run", "no node of the cluster can ever satisfy the resources asked for",
       "Compare the request with `ray status`; correct the resources or add a node."),
    # ACTOR
    _e("ACTOR.DIED", "recreate", "unknown", "an actor's process is gone",
       "The exit reason is in the detail; SIGKILL, segfault and os._exit look alike to Ray, so check dmesg "
       "for an OOM kill. The pool replaces posters by itself; other actors need their owner."),
    _e("ACTOR.INIT_FAILED", "give_up", "not_run", "an actor's __init__ raised, so it never served",
       "The original exception is in the detail. It will fail the same way again: fix its cause first."),
    _e("ACTOR.UNAVAILABLE", "wait", "unknown", "an actor cannot be reached just now; it may be alive",
       "Do not replace it: it may still be working. It is quarantined and probed; if it stays away, look at "
       "the network and at its node."),
    _e("ACTOR.WEDGED", "recreate", "unknown", "an actor's process lives but its event loop does not move",
       "Blocked in C code, stopped by a signal, or killed by a KeyboardInterrupt inside a coroutine. "
       "Take a py-spy dump if you can; it is killed and replaced."),
    _e("ACTOR.TOO_MANY_PENDING", "wait", "not_run", "an actor's queue of pending calls is full (max_pending_calls)",
       "Send less at once or raise max_pending_calls."),
    _e("ACTOR.NESTED_DIED", "retry_elsewhere", "unknown", "an actor that our callee was calling died; our callee is alive",
       "Do not restart the actor you called: the one it calls is the one that died."),
    # NODE
    _e("NODE.DIED", "retry_elsewhere", "unknown", "a node, or its raylet, is gone",
       "See `ray list nodes` and the instance's own log. Actors of that node are re-created on others."),
    _e("NODE.PREEMPTED", "retry_elsewhere", "unknown", "a node was drained or preempted",
       "Expected with spot capacity: work moves to other nodes."),
    _e("NODE.OUT_OF_MEMORY", "retry_elsewhere", "unknown", "Ray's memory monitor killed the worker, or the node ran out of memory",
       "Lower the number of workers on a node or give them more memory; see the raylet log for the ranking of processes."),
    _e("NODE.DISK_FULL", "give_up", "not_run", "a disk is full",
       "Free space on the file system named in the detail, then run again with --resume; what was written is whole."),
    _e("NODE.IO", "give_up", "unknown", "the operating system refused to read or write a file",
       "The path and errno are in the detail: permissions, a read-only mount, or a failing disk."),
    _e("NODE.NETWORK", "wait", "unknown", "a Ray process cannot be reached over the network",
       "Check DNS, firewalls and the ports between the nodes named in the detail."),
    # OBJECT
    _e("OBJECT.LOST", "give_up", "ran", "an object's only copies are gone and it was not rebuilt",
       "The node that held it died. Produce the value again."),
    _e("OBJECT.OWNER_DIED", "give_up", "ran", "the process that owned an object died, and the object with it",
       "Keep the owner alive for as long as its objects are used, or hand values over instead of references."),
    _e("OBJECT.STORE_FULL", "wait", "not_run", "the object store or its spill disk is full",
       "Someone holds too many references: see `ray memory`. Put batch by batch and drop references early."),
    # TIMEOUT
    _e("TIMEOUT.DEADLINE", "give_up", "unknown", "a request's deadline passed",
       "Queueing counts. Compare the time waiting with the time at the engine in the event's data; lower the "
       "load or raise the deadline."),
    _e("TIMEOUT.RAY_GET", "cancel", "unknown", "a Ray call did not answer in time; it keeps running until cancelled",
       "Full, blocked, stopped and wedged look alike here: see the actor's heartbeat age in the next event."),
    _e("TIMEOUT.NESTED", "give_up", "unknown", "a call that our callee made timed out; our callee is alive",
       "Look at whatever the callee was waiting for."),
    _e("TIMEOUT.CONNECT", "retry_elsewhere", "not_run", "no connection to the server in time",
       "The server's accept queue is full, a firewall drops packets, or the host is gone."),
    _e("TIMEOUT.READ", "retry_elsewhere", "unknown", "the server sent nothing for too long",
       "The engine may be overloaded or frozen behind an open port: see its health and its progress."),
    _e("TIMEOUT.WRITE", "retry_elsewhere", "unknown", "the server did not take the request's bytes in time",
       "The engine has stopped reading: see whether it is frozen."),
    _e("TIMEOUT.POOL", "wait", "not_run", "no free connection in the HTTP client in time",
       "The client has fewer connections than the work sent to it."),
    # CANCEL
    _e("CANCEL.CALLER", "cancel", "unknown", "the caller went away or cancelled",
       "Nothing to do, unless nobody meant to cancel: then look at the caller."),
    _e("CANCEL.REMOTE", "cancel", "unknown", "a Ray task was cancelled",
       "Somebody called ray.cancel, or a KeyboardInterrupt hit a coroutine of the actor."),
    # TRANSPORT
    _e("TRANSPORT.CONNECT", "retry_elsewhere", "not_run", "the connection was refused or could not be made",
       "Nothing listens there: the engine is down or still starting."),
    _e("TRANSPORT.DISCONNECTED", "retry_elsewhere", "unknown", "the connection broke before a whole reply had come",
       "The server died or closed a kept-alive connection. Idempotent requests are sent again, a bounded number of times."),
    _e("TRANSPORT.PROTOCOL", "retry_elsewhere", "unknown", "what came back is not valid HTTP",
       "A proxy or another service answers on that port."),
    _e("TRANSPORT.PROXY", "give_up", "not_run", "the HTTP proxy failed",
       "Look at HTTP_PROXY and NO_PROXY in the poster's environment: engines inside a cluster need none."),
    _e("TRANSPORT.TLS", "give_up", "not_run", "the TLS handshake failed or the certificate is not trusted",
       "Check the certificate and the host name."),
    # UPSTREAM
    _e("UPSTREAM.SERVER_ERROR", "retry_elsewhere", "unknown", "the server answered 5xx",
       "The body's start is in the detail; look at the engine's log at that time."),
    _e("UPSTREAM.BAD_GATEWAY", "retry_elsewhere", "unknown", "a proxy or router could not get an answer from the engine",
       "The router is alive and the engine behind it is not: see the fleet's health."),
    _e("UPSTREAM.BAD_BODY", "retry_elsewhere", "ran", "a 2xx reply whose body is not the JSON that was expected",
       "A wrong URL (an HTML page?), another service on the port, or an engine of another version."),
    _e("UPSTREAM.TRUNCATED", "retry_elsewhere", "unknown", "a 2xx reply whose body ended early",
       "The engine died in the middle of the reply."),
    _e("UPSTREAM.ABORTED", "retry_elsewhere", "unknown", "the engine ended the generation with finish_reason abort, unasked",
       "It is shutting down, updating weights, or was told to abort. The partial text is not a sample."),
    _e("UPSTREAM.STREAM_ERROR", "retry_elsewhere", "unknown", "an error event inside a stream that began with 200",
       "The event's text is in the detail; look at the engine's log."),
    _e("UPSTREAM.REDIRECT", "give_up", "not_run", "the server answered with a redirect",
       "Use the URL that the Location header names."),
    _e("UPSTREAM.NO_ENGINE", "wait", "not_run", "no engine is routable just now",
       "Every engine is down, starting or ejected: see `engine.*` events for why."),
    # REQUEST
    _e("REQUEST.REJECTED", "give_up", "not_run", "the server says that this request is wrong (4xx)",
       "The body's start is in the detail. Sending it again changes nothing: correct the request."),
    _e("REQUEST.UNAUTHORIZED", "give_up", "not_run", "401 or 403: not allowed",
       "Check the API key or the proxy's rules."),
    _e("REQUEST.NOT_FOUND", "give_up", "not_run", "404 or 405: no such path there",
       "The URL's path or the kind of engine (--api) is wrong."),
    _e("REQUEST.TOO_LARGE", "give_up", "not_run", "413 or 431: larger than the server accepts",
       "Shorten the prompt or raise the server's limit."),
    _e("REQUEST.INVALID", "give_up", "not_run", "a request that cannot be sent: its URL or payload is malformed",
       "The detail names the place. It was not sent."),
    _e("REQUEST.OUTCOME_UNKNOWN", "give_up", "unknown", "a request that is not idempotent may have run",
       "Find out at the server by its request id before sending it again."),
    _e("REQUEST.POISON", "give_up", "unknown", "a request that was in flight each time an engine died",
       "It is set aside before it takes more engines down. Try it alone against a spare engine."),
    # BACKPRESSURE
    _e("BACKPRESSURE.RATE_LIMITED", "wait", "not_run", "429: too many requests",
       "The server is alive and full. Lower the concurrency if it lasts."),
    _e("BACKPRESSURE.OVERLOADED", "wait", "not_run", "503: the server takes no more for the moment",
       "Full, draining or starting. Lower the concurrency if it lasts."),
    # POOL
    _e("POOL.CLOSED", "give_up", "unknown", "the pool was closed or is closing",
       "Post only inside `async with PosterPool(...)`."),
    _e("POOL.MISUSE", "give_up", "not_run", "the pool was used in a way that it cannot serve",
       "The detail says what and how to do it instead."),
    _e("POOL.NO_POSTER", "wait", "not_run", "no poster is healthy, and local fallback is off",
       "See `poster.*` events for why they are gone."),
    _e("POOL.RECREATE_BUDGET", "give_up", "not_run", "a poster died again and again and is not replaced any more",
       "The first cause is in the detail (a bad runtime_env, an import error, a full node). The pool serves "
       "with the other posters, or locally."),
    # ENGINE
    _e("ENGINE.SPAWN_FAILED", "give_up", "not_run", "the engine's command could not be started",
       "No such program, not executable, or no permission: the detail names it."),
    _e("ENGINE.EXITED", "recreate", "unknown", "the engine's process ended, unasked",
       "Status or signal and the last lines of its output are in the data. Signal 9 without a killer of "
       "yours is usually the OOM killer."),
    _e("ENGINE.START_TIMEOUT", "recreate", "not_run", "the engine did not become ready in time",
       "The detail names the stage it was in (port, health, canary) and the last lines of its output."),
    _e("ENGINE.CANARY_FAILED", "recreate", "not_run", "the engine answers /health but cannot generate",
       "It is not routable. Look at its log; it is restarted."),
    _e("ENGINE.UNHEALTHY", "recreate", "unknown", "a running engine no longer answers its health check or makes no progress",
       "Frozen or overloaded: it is taken out of the routing, killed and restarted."),
    _e("ENGINE.PORT_TAKEN", "recreate", "not_run", "another process took the engine's port first",
       "A fresh port is chosen by itself. If it lasts, something binds ports in the ephemeral range."),
    _e("ENGINE.STOP_FAILED", "give_up", "unknown", "an engine's processes are still there after KILL",
       "The stage and the pids are in the detail. A process in state D waits for a device or NFS: the node may need a reboot."),
    _e("ENGINE.CRASH_LOOP", "give_up", "not_run", "an engine failed too often in a row and is not restarted any more",
       "The first cause is in the detail. Correct it, then start the fleet again."),
    _e("ENGINE.SUPERVISOR_LOST", "recreate", "unknown", "the actor that supervised an engine is gone, and its engine with it",
       "The guard kills the engine when its supervisor dies; both are started again."),
    # WEIGHTS
    _e("WEIGHTS.REFIT_ABORTED", "recreate", "unknown", "a weight update was aborted on its way",
       "Engines that missed a step must not serve: quarantine and recreate them, then update again."),
    # CONFIG
    _e("CONFIG.INVALID", "give_up", "not_run", "a file, a flag or a setting is wrong",
       "The detail names the file, the place and the remedy."),
    _e("CONFIG.MISSING", "give_up", "not_run", "a file or a setting that is needed is not there",
       "The detail names it."),
    # INTERNAL
    _e("INTERNAL.BUG", "give_up", "unknown", "failsoft itself is wrong",
       "Please report it with the events file: this should never be seen."),
    _e("INTERNAL.RAY", "give_up", "unknown", "Ray itself failed (its system error, a plasma or channel error)",
       "See the raylet's and the GCS's logs in the session folder."),
    # UNKNOWN
    _e("UNKNOWN.EXCEPTION", "give_up", "unknown", "an exception that no table names",
       "Its type and text are in the detail. It is not retried; if it should be, register a code for it."),
    _e("UNKNOWN.FOREIGN", "give_up", "unknown", "a token of a later release or an unknown family",
       "The token is carried on unchanged: read it with the release that made it."),
)  # fmt: skip
