"""llama.cpp's HTTP server in the foreground, until TERM or INT.

    python llama_server.py MODEL.gguf --host 127.0.0.1 --port PORT [--parallel 8]

Run where `xllamacpp` can be imported.
"""

from __future__ import annotations

import argparse
import signal
import threading

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=8)
    given = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.hostnames = [given.host]
    params.port = given.port
    params.n_parallel = given.parallel
    params.n_ctx = 2048 * given.parallel
    params.n_threads_http = 2 * given.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = True
    params.offline = True
    params.ui = False
    params.fit_params = False  # no guessing at how much of a GPU's memory there is
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    while not stop.wait(0.2):  # in steps: Python's handlers run between two waits
        pass
    print("stopping", flush=True)
    del server  # waits for the work in flight, for ever if need be
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
