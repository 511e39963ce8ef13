"""The codes that failsoft itself uses: the catalogue's table, one row a code.

A row is never renamed and never reused; a code that fell out of use stays. A new row goes into
``issued_codes.py`` too. Columns: code, default advice, what is known of the outcome, meaning, runbook.
"""

from __future__ import annotations

import sys
from typing import Final

from protocol.catalogue import Advice, Entry, Outcome
from protocol.codes import Code


def _e(code: str, advice: Advice, outcome: Outcome, meaning: str, runbook: str) -> Entry:
    return Entry(Code(code), meaning, advice, outcome, runbook, f"{__file__}:{sys._getframe(1).f_lineno}")


ENTRIES: Final = (
    # TASK: code that ran and raised
    _e("TASK.FAILED", "give_up", "ran", "user code raised an exception",
       "Read the exception's type and text in the detail, and its traceback in the worker's log (`ray logs cluster "
       "worker-*.err`, or worker-*.err under /tmp/ray/session_latest/logs). The code that ran raised it, so running it "
       "again with the same input fails the same way: correct the code or the input."),
    _e("TASK.UNSERIALIZABLE", "give_up", "ran", "an exception crossed a Ray boundary as text only",
       "The exception's class could not be pickled or loaded (keyword-only __init__ arguments, a lock or a socket among "
       "its attributes), so only its text came through: `failsoft explain` on that text names what it can. Put @coded from "
       "protocol on the function or class that raises, so that type, text and code survive."),
    _e("TASK.WORKER_CRASHED", "retry_elsewhere", "unknown", "the worker process of a task died while running it",
       "Look for an OOM kill (`dmesg -T | grep -i 'killed process'`, raylet.out under /tmp/ray/session_latest/logs) and "
       "for a segfault at the end of the worker's worker-*.err. Idempotent work is retried elsewhere by itself; anything "
       "else has to be checked before it is run again."),
    _e("TASK.PROCESS_KILLED", "retry_elsewhere", "unknown", "a child process was ended by a signal from outside",
       "The signal is in the data. An unasked SIGKILL is mostly the OOM killer (`dmesg -T | grep -i oom`, memory.events of "
       "the process's cgroup) or an operator's `kill -9`. Idempotent work is retried elsewhere; give the process more "
       "memory if it was the former."),
    _e("TASK.PROCESS_CRASHED", "give_up", "unknown", "a child process crashed: segfault, abort, illegal instruction, bus error",
       "The signal is in the data, and faulthandler's stack, if any, in the last lines of the process's output. Run the "
       "same input under `gdb -ex run -ex bt --args COMMAND`, or without the native library at the top of that stack; it "
       "will often crash again, so nothing retries it."),
    _e("TASK.PROCESS_EXITED", "give_up", "ran", "a child process ended with a status other than 0 and named no failure",
       "The status is in the data; read the last lines of the process's output, or give them to `failsoft explain -`. A "
       "process that was started through protocol.carriers.child would have left its failure's name in an error file."),
    _e("TASK.GPU_OUT_OF_MEMORY", "give_up", "ran", "a GPU ran out of memory while our code ran on it",
       "The process lives and may go on with less: a smaller batch, shorter sequences, a lower gpu_memory_utilization or "
       "mem_fraction_static of an engine that shares the GPU. `nvidia-smi` shows who else holds memory there, and `failsoft "
       "doctor` what nobody owns any more. The same input will mostly fail again, so nothing retries it."),
    _e("TASK.GPU_FAILED", "recreate", "unknown", "a GPU or its driver failed: illegal access, hardware error, lost device",
       "Every further call of that process on the GPU fails as well, so the process has to be replaced. `dmesg -T | grep -i "
       "xid` and `nvidia-smi -q -d ECC,PAGE_RETIREMENT` tell a broken device from a broken kernel; for the latter run again "
       "with CUDA_LAUNCH_BLOCKING=1, which names the call. Take a device that fails again out of the cluster."),
    _e("TASK.COLLECTIVE_FAILED", "give_up", "unknown", "ranks could not meet, or a collective operation between them failed",
       "Mostly another rank died or stood still first: give the logs of all ranks to `failsoft explain`, and look for the "
       "earliest failure that has another code. If there is none, see that the ranks reach each other (NCCL_DEBUG=INFO, "
       "NCCL_SOCKET_IFNAME, MASTER_ADDR and its port), then restart the whole group."),
    _e("TASK.ENVIRONMENT", "give_up", "not_run", "a task's or actor's runtime environment could not be set up",
       "Read runtime_env_setup-*.log under /tmp/ray/session_latest/logs on the node that the detail names: usually a "
       "package that cannot be installed or a working_dir that cannot be fetched. Try `pip install` of the same list on "
       "that node by hand, then correct the runtime_env."),
    _e("TASK.UNSCHEDULABLE", "give_up", "not_run", "no node of the cluster can ever satisfy the resources asked for",
       "Compare the resources that were asked for, in the detail, with what `ray status` shows as total (not free) "
       "resources. Ask for less, correct the resource's name, or add a node that has it."),
    # ACTOR
    _e("ACTOR.DIED", "recreate", "unknown", "an actor's process is gone",
       "Ray's exit reason is in the detail, but SIGKILL, a segfault and os._exit look alike to it: check `dmesg -T` for an "
       "OOM kill and the end of the actor's worker-*.err under /tmp/ray/session_latest/logs. The pool replaces its posters "
       "by itself; other actors have to be made anew by their owner."),
    _e("ACTOR.INIT_FAILED", "give_up", "not_run", "an actor's __init__ raised, so it never served",
       "The original exception is in the detail, its traceback in the actor's worker-*.err (`ray logs actor --id "
       "ACTOR_ID`). It will fail the same way again: correct its cause (an import, a file, a refused connection) before "
       "the actor is created once more."),
    _e("ACTOR.UNAVAILABLE", "wait", "unknown", "an actor cannot be reached just now; it may be alive",
       "Do not replace the actor: it may still be working, and a second one would work beside it. It is quarantined and "
       "probed; if it stays away for minutes, see whether its node is there (`ray list nodes`) and reachable from here "
       "(`ping`, `ss -tn`)."),
    _e("ACTOR.WEDGED", "recreate", "unknown", "an actor's process lives but its event loop does not move",
       "The process is blocked in C code, stopped by a signal, or lost its loop to a KeyboardInterrupt inside a coroutine. "
       "Take `py-spy dump --pid PID` and `grep State /proc/PID/status` while it is there; then it is killed and replaced."),
    _e("ACTOR.TOO_MANY_PENDING", "wait", "not_run", "an actor's queue of pending calls is full (max_pending_calls)",
       "The caller sends faster than the actor answers: see its backlog in `ray summary tasks` or the dashboard. Send less "
       "at once, or raise max_pending_calls if the actor's memory allows it."),
    _e("ACTOR.NESTED_DIED", "retry_elsewhere", "unknown", "an actor that our callee was calling died; our callee is alive",
       "Do not restart the actor that you called: the one that it calls is the one that died, and the detail names it. "
       "Look at that one as for ACTOR.DIED (`dmesg -T`, its worker-*.err)."),
    _e("ACTOR.GROUP_FAILED", "give_up", "unknown", "a rank of a training group failed, and the whole group with it",
       "The rank that failed first, its code and its node are in the data: look that code up (`failsoft codes CODE`), and "
       "read that rank's worker-*.err on that node; what the other ranks raised follows from it. Nothing is restarted by "
       "itself: call restart() on the group, and load the last checkpoint."),
    # NODE
    _e("NODE.DIED", "retry_elsewhere", "unknown", "a node, or its raylet, is gone",
       "See which one with `ray list nodes --filter state=DEAD`, then its raylet.out and the machine's own log "
       "(`journalctl -k`, the cloud's console). Actors and tasks of that node are made anew on others; if all nodes are "
       "gone, look at gcs_server.out on the head."),
    _e("NODE.PREEMPTED", "retry_elsewhere", "unknown", "a node was drained or preempted",
       "Expected with spot capacity, and work moves to other nodes by itself. If it happens too often for the run to get "
       "on, see `ray status` for what is left and move the trainer to nodes that are not preempted."),
    _e("NODE.OUT_OF_MEMORY", "retry_elsewhere", "unknown", "Ray's memory monitor killed the worker, or the node ran out of memory",
       "See raylet.out under /tmp/ray/session_latest/logs for Ray's ranking of the processes by memory, or `dmesg -T | "
       "grep -i oom` when the kernel did it. Run fewer workers on a node (raise their num_cpus or memory) or find the one "
       "that grows."),
    _e("NODE.DISK_FULL", "give_up", "not_run", "a disk is full",
       "Find what fills the file system that the detail names (`df -h PATH`, `du -xh PATH | sort -h | tail`); old Ray "
       "sessions under /tmp/ray are a usual answer. Then run again with --resume: what was written before is whole."),
    _e("NODE.IO", "give_up", "unknown", "the operating system refused to read or write a file",
       "The path and the errno are in the detail: wrong permissions (`ls -ld PATH`), a read-only mount (`findmnt -T PATH`) "
       "or a failing disk (`dmesg -T`). Correct that, then run again; nothing retries it."),
    _e("NODE.NETWORK", "wait", "unknown", "a Ray process cannot be reached over the network",
       "Check that the two nodes which the detail names resolve and reach each other (`getent hosts NAME`, `nc -vz HOST "
       "PORT`) and that no firewall closes Ray's ports between them. Work waits meanwhile, and goes on when they meet "
       "again."),
    # OBJECT
    _e("OBJECT.LOST", "give_up", "ran", "an object's only copies are gone and it was not rebuilt",
       "The node that held the only copy died, and Ray could not rebuild it (a value made by ray.put never can be): see "
       "`ray list nodes` for which. Produce the value again, and keep what must survive on a disk."),
    _e("OBJECT.OWNER_DIED", "give_up", "ran", "the process that owned an object died, and the object with it",
       "The process that made the reference is gone, and its objects went with it: look for its own failure first, with "
       "`failsoft explain` on its log. Keep the owner alive for as long as its objects are used, or hand values over "
       "instead of references."),
    _e("OBJECT.STORE_FULL", "wait", "not_run", "the object store or its spill disk is full",
       "Somebody holds too many references: `ray memory --stats-only` says how much is pinned, `ray memory --group-by "
       "STACK_TRACE` by whom. Put batch by batch and drop references early; check `df -h /tmp` too, where Ray spills."),
    # TIMEOUT
    _e("TIMEOUT.DEADLINE", "give_up", "unknown", "a request's deadline passed",
       "Time in the queue counts: see in the run's events whether engines were down or the pool was full at that time "
       "(`failsoft explain events.jsonl`). Lower the concurrency or raise the deadline (--deadline); the request may have "
       "run all the same."),
    _e("TIMEOUT.RAY_GET", "cancel", "unknown", "a Ray call did not answer in time; it keeps running until cancelled",
       "A full, a blocked, a stopped and a wedged actor look alike here: `py-spy dump --pid PID` on the actor's process, "
       "or `ray stack`, tells which. The remote call goes on until it is cancelled with ray.cancel."),
    _e("TIMEOUT.NESTED", "give_up", "unknown", "a call that our callee made timed out; our callee is alive",
       "The callee is alive: look at what it was waiting for, which the last frames of the detail name. `ray stack` on its "
       "node shows whether it still waits there."),
    _e("TIMEOUT.CONNECT", "retry_elsewhere", "not_run", "no connection to the server in time",
       "The server's accept queue is full, a firewall drops packets, or the host is gone: try `curl -m 5 -v URL/health` "
       "from the poster's node, and `ss -ltn` on the engine's for a Recv-Q that stays high. The request was not sent, and "
       "goes elsewhere by itself."),
    _e("TIMEOUT.READ", "retry_elsewhere", "unknown", "the server sent nothing for too long",
       "The engine may be overloaded, or frozen behind an open port: compare its health (`curl -m 5 URL/health`) with its "
       "progress (does it still log decode steps?). `py-spy dump --pid PID` shows where it stands; an engine of a fleet is "
       "checked and replaced by itself."),
    _e("TIMEOUT.WRITE", "retry_elsewhere", "unknown", "the server did not take the request's bytes in time",
       "The engine has stopped reading its socket: see `ss -tn` for a Send-Q that does not shrink, and `py-spy dump --pid "
       "PID` for where the engine stands. Part of the request may have been read, so only idempotent work is sent again."),
    _e("TIMEOUT.POOL", "wait", "not_run", "no free connection in the HTTP client in time",
       "The HTTP client has fewer connections than the work that is sent to it. Raise the client's limit "
       "(httpx.Limits(max_connections=...)) to at least the concurrency, or lower the concurrency."),
    # CANCEL
    _e("CANCEL.CALLER", "cancel", "unknown", "the caller went away or cancelled",
       "Nothing is wrong, unless nobody meant to cancel: then look at what ended the caller, with `failsoft explain` on "
       "its log. The server may have run the request all the same."),
    _e("CANCEL.REMOTE", "cancel", "unknown", "a Ray task was cancelled",
       "Somebody called ray.cancel, or a KeyboardInterrupt hit a coroutine of the actor; search the driver's log for who "
       "did. In a sync actor the call may run to its end all the same, so check the outcome before doing the work again."),
    # TRANSPORT
    _e("TRANSPORT.CONNECT", "retry_elsewhere", "not_run", "the connection was refused or could not be made",
       "Nothing listens there: `ss -ltnp | grep PORT` on the engine's host, and the end of the engine's log, tell whether "
       "it is down or still starting. The request was not sent, and goes to another engine by itself."),
    _e("TRANSPORT.DISCONNECTED", "retry_elsewhere", "unknown", "the connection broke before a whole reply had come",
       "The server died in the middle of the reply or closed a connection that was kept open: see the end of the engine's "
       "log and `dmesg -T` at that time. Idempotent requests are sent again, a bounded number of times."),
    _e("TRANSPORT.PROTOCOL", "retry_elsewhere", "unknown", "what came back is not valid HTTP",
       "Something else than the engine answers on that port, most often a proxy or a server that speaks TLS: `curl -v URL` "
       "shows what. Correct the URL or the port."),
    _e("TRANSPORT.PROXY", "give_up", "not_run", "the HTTP proxy failed",
       "Look at HTTP_PROXY, HTTPS_PROXY and NO_PROXY in the poster's environment (`tr '\\0' '\\n' < /proc/PID/environ | grep "
       "-i proxy`). Engines inside of a cluster need no proxy: put their hosts into NO_PROXY."),
    _e("TRANSPORT.TLS", "give_up", "not_run", "the TLS handshake failed or the certificate is not trusted",
       "See what the server shows with `openssl s_client -connect HOST:PORT -servername HOST`: an expired certificate, "
       "another host's name, or an authority that this machine does not trust. Install the authority on the posters' "
       "nodes, or correct the URL."),
    # UPSTREAM
    _e("UPSTREAM.SERVER_ERROR", "retry_elsewhere", "unknown", "the server answered 5xx",
       "The beginning of the reply's body is in the detail; look at the engine's log at that time for its traceback, and "
       "give that to `failsoft explain -`. Idempotent requests go to another engine; if all of them answer so, it is the "
       "request or the model."),
    _e("UPSTREAM.BAD_GATEWAY", "retry_elsewhere", "unknown", "a proxy or router could not get an answer from the engine",
       "The router is alive and the engine behind it is not: ask the router for its workers, and look for engine.died in "
       "the run's events (`failsoft explain events.jsonl`). Requests go elsewhere until it is back."),
    _e("UPSTREAM.BAD_BODY", "retry_elsewhere", "ran", "a 2xx reply whose body is not the JSON that was expected",
       "The beginning of the body is in the detail: an HTML page means a wrong URL or another service on the port, other "
       "JSON an engine of another kind or version (--api). Try `curl -s URL` by hand and correct the URL."),
    _e("UPSTREAM.TRUNCATED", "retry_elsewhere", "unknown", "a 2xx reply whose body ended early",
       "The engine or a proxy ended in the middle of the reply: see the end of the engine's log and `dmesg -T` at that "
       "time. What came is no sample and is thrown away; idempotent requests are sent again."),
    _e("UPSTREAM.ABORTED", "retry_elsewhere", "unknown", "the engine ended the generation with finish_reason abort, unasked",
       "The engine is shutting down, updates its weights, or was told to abort everything: its log at that time says "
       "which. The partial text is not a sample; the request goes to another engine."),
    _e("UPSTREAM.STREAM_ERROR", "retry_elsewhere", "unknown", "an error event inside a stream that began with 200",
       "The error event's text is in the detail, and its traceback in the engine's log at that time. A server that has "
       "sent 200 can tell of a failure in no other way, so read it as a 500."),
    _e("UPSTREAM.REDIRECT", "give_up", "not_run", "the server answered with a redirect",
       "Use the URL that the Location header names (`curl -sI URL | grep -i location`): mostly a missing or an additional "
       "slash, or http for https. Redirects are not followed, for a POST would lose its body or be sent twice."),
    _e("UPSTREAM.NO_ENGINE", "wait", "not_run", "no engine is routable just now",
       "Every engine is down, starting or set aside: `failsoft explain events.jsonl` names the first that failed and why. "
       "Requests wait until one is back, within their deadline."),
    _e("UPSTREAM.EJECTED", "retry_elsewhere", "not_run", "the server failed too often in a row and gets nothing for a while",
       "Nothing was sent. What ejected it failed before this: look for those codes with the same url in the run's events, "
       "and in the server's own log at that time. It is tried again by itself, one request at a time; others go elsewhere."),
    # REQUEST
    _e("REQUEST.REJECTED", "give_up", "not_run", "the server says that this request is wrong (4xx)",
       "The beginning of the server's answer is in the detail and says what it did not like. Sending it again changes "
       "nothing: correct the request (prompt, sampling parameters, model's name)."),
    _e("REQUEST.UNAUTHORIZED", "give_up", "not_run", "401 or 403: not allowed",
       "Check the API key that is sent (--header 'Authorization: Bearer ...') and the rules of the proxy in front of the "
       "engine. `curl -i -H 'Authorization: Bearer KEY' URL` must answer 200 before the run can."),
    _e("REQUEST.NOT_FOUND", "give_up", "not_run", "404 or 405: no such path there",
       "The URL's path or the kind of engine (--api sglang or openai) is wrong: see what is there with `curl -s "
       "URL/v1/models` or `curl -s URL/get_model_info`. Name the base URL without a path."),
    _e("REQUEST.TOO_LARGE", "give_up", "not_run", "413 or 431: larger than the server accepts",
       "Compare the request's size, and the prompt's length in tokens, with the server's limits (its context length, a "
       "proxy's client_max_body_size). Shorten the prompt or raise the limit; sending it again changes nothing."),
    _e("REQUEST.INVALID", "give_up", "not_run", "a request that cannot be sent: its URL or payload is malformed",
       "The detail names the place in the URL or the payload that is malformed. It was not sent: correct it at the caller."),
    _e("REQUEST.OUTCOME_UNKNOWN", "give_up", "unknown", "a request that is not idempotent may have run",
       "The connection or the poster was lost after a request that is not idempotent had been sent. Find out at the "
       "server, by its X-Request-Id (the event's key), whether it ran; only then send it again."),
    _e("REQUEST.POISON", "give_up", "unknown", "a request that was in flight each time an engine died",
       "Each engine that took this request died with it, so it is set aside before it takes more of them down. Send it "
       "alone to a spare engine, and read that engine's log and `dmesg -T` for what it does to it."),
    # BACKPRESSURE
    _e("BACKPRESSURE.RATE_LIMITED", "wait", "not_run", "429: too many requests",
       "The server is alive and has had enough for the moment; requests wait as long as its Retry-After says. If it lasts, "
       "lower --concurrency, or raise the limit at the server or its proxy."),
    _e("BACKPRESSURE.OVERLOADED", "wait", "not_run", "503: the server takes no more for the moment",
       "The server is full, draining or starting, and alive; requests wait and go on by themselves. If it lasts, lower "
       "--concurrency, add engines, or see in the engine's log whether it ever gets ready."),
    # POOL
    _e("POOL.CLOSED", "give_up", "unknown", "the pool was closed or is closing",
       "A request came after the pool was closed, or was in flight when it was. Post only inside of `async with "
       "PosterPool(...)`; if the pool ended early, `failsoft explain events.jsonl` says what ended the run."),
    _e("POOL.MISUSE", "give_up", "not_run", "the pool was used in a way that it cannot serve",
       "The detail says what the pool cannot serve and how to do it instead. It is the calling code that has to change: "
       "nothing was sent."),
    _e("POOL.NO_POSTER", "wait", "not_run", "no poster is healthy, and local fallback is off",
       "Every poster is gone or quarantined, and the local client is switched off: `failsoft explain events.jsonl` shows "
       "the first poster.died or poster.start_failed and why. Correct that cause; `ray status` shows whether there is room "
       "for new ones."),
    _e("POOL.RECREATE_BUDGET", "give_up", "not_run", "a poster died again and again and is not replaced any more",
       "The first cause is in the detail: often a bad runtime_env, an import error, or a node without room (`ray status`). "
       "Correct it and restart the run; until then the pool serves with its other posters, or locally."),
    # ENGINE
    _e("ENGINE.SPAWN_FAILED", "give_up", "not_run", "the engine's command could not be started",
       "The detail names the program and what the system said: no such file, not executable, or no permission. Start the "
       "same command by hand on that node, as the same user and in the same environment."),
    _e("ENGINE.EXITED", "recreate", "unknown", "the engine's process ended, unasked",
       "Status or signal and the last lines of the engine's output are in the data: give its whole log to `failsoft "
       "explain`. Signal 9 without a killer of yours is usually the OOM killer (`dmesg -T | grep -i oom`); the engine is "
       "started again by itself."),
    _e("ENGINE.START_TIMEOUT", "recreate", "not_run", "the engine did not become ready in time",
       "The detail names the stage that it was in (port, health, canary) and the last lines of its output. Loading a large "
       "model over a slow disk takes long: compare with its own progress lines, then raise the start timeout or look for "
       "what it waits for (`py-spy dump --pid PID`)."),
    _e("ENGINE.CANARY_FAILED", "recreate", "not_run", "the engine answers /health but cannot generate",
       "The engine answers /health but generates nothing, so no request is sent to it. Try a generation of one token with "
       "`curl`, look at the engine's log and at `nvidia-smi`; it is restarted by itself."),
    _e("ENGINE.UNHEALTHY", "recreate", "unknown", "a running engine no longer answers its health check or makes no progress",
       "It is frozen or overloaded: it is taken out of the routing, killed and restarted. To find out why, take `py-spy "
       "dump --pid PID` before that, or read its log from the last decode step on, and `nvidia-smi` for a GPU that hangs."),
    _e("ENGINE.PORT_TAKEN", "recreate", "not_run", "another process took the engine's port first",
       "Another process bound the port between its choice and the engine's start; a fresh one is chosen by itself. If it "
       "lasts, `ss -ltnp` shows who binds there, and /proc/sys/net/ipv4/ip_local_port_range whether the range overlaps "
       "with it."),
    _e("ENGINE.STOP_FAILED", "give_up", "unknown", "an engine's processes are still there after KILL",
       "The pids are in the detail: `grep State /proc/PID/status` tells whether they are in state D, waiting for a GPU or "
       "for NFS, where no signal reaches them. See `cat /proc/PID/wchan` and `dmesg -T`; such a node may need a reboot."),
    _e("ENGINE.CRASH_LOOP", "give_up", "not_run", "an engine failed too often in a row and is not restarted any more",
       "The first cause is in the detail, and `failsoft explain events.jsonl` shows the first engine.died. Correct that "
       "(model path, memory, driver), then start the fleet again: the engine is not restarted any more."),
    _e("ENGINE.SUPERVISOR_LOST", "recreate", "unknown", "the actor that supervised an engine is gone, and its engine with it",
       "The guard killed the engine when its supervisor died, so nothing is left over; both are started again. Look for "
       "why the supervisor died as for ACTOR.DIED: `dmesg -T`, its worker-*.err under /tmp/ray/session_latest/logs."),
    # WEIGHTS
    _e("WEIGHTS.REFIT_ABORTED", "recreate", "unknown", "a weight update was aborted on its way",
       "See which engines missed which step, in the detail and in their logs; a broken NCCL group shows as a watchdog's "
       "message there. Engines that missed a step must not serve: quarantine and recreate them, then update again."),
    # CONFIG
    _e("CONFIG.INVALID", "give_up", "not_run", "a file, a flag or a setting is wrong",
       "The detail names the file, the place in it and the remedy. Correct it there and start again: nothing was run."),
    _e("CONFIG.MISSING", "give_up", "not_run", "a file or a setting that is needed is not there",
       "The detail names the file or the setting that is not there. Make it, or correct the path (`ls -l PATH` on the node "
       "that reads it), and start again."),
    # INTERNAL
    _e("INTERNAL.BUG", "give_up", "unknown", "failsoft itself is wrong",
       "failsoft itself is wrong: this should never be seen. Keep events.jsonl and the traceback of the detail, and report "
       "both; running again may work, but look at the results with care."),
    _e("INTERNAL.RAY", "give_up", "unknown", "Ray itself failed (its system error, a plasma or channel error)",
       "Read raylet.out and gcs_server.out under /tmp/ray/session_latest/logs at that time, and `ray status` for what is "
       "left of the cluster. If a version of Ray was just changed, make sure that all nodes run the same one."),
    # UNKNOWN
    _e("UNKNOWN.EXCEPTION", "give_up", "unknown", "an exception that no table names",
       "Its type and text are in the detail, and no table names it, so it is not retried. If it should be, register a code "
       "for it with catalogue.register and name it with @coded(name=...)."),
    _e("UNKNOWN.FOREIGN", "give_up", "unknown", "a token of a later release or an unknown family",
       "A newer release, or another program, minted the token, and it is carried on unchanged. Read it there: `failsoft "
       "codes CODE` of the release that made it."),
)  # fmt: skip
