"""A server with an engine's interface and one chosen defect. A program, standard library only."""

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--never-bind", action="store_true")
parser.add_argument("--daemonise", action="store_true", help="serve in a child and end with status 0")
parser.add_argument("--bind-other", type=int, default=0, help="serve on this port instead")
parser.add_argument("--print-bytes", type=int, default=0, help="print so much before it serves")
parser.add_argument("--exit", type=int, help="end with this status, after the printing")
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--zombie-child", action="store_true", help="have a child that is never reaped")
parser.add_argument("--zombie", action="store_true", help="end the first thread after a generation")
parser.add_argument("--taken", type=int, default=0, help="as if the port were taken, the first N times")
parser.add_argument("--taken-says", default="", help="print this and end with 1, in place of status 98")
parser.add_argument("--die-once-after", type=float, default=0)
parser.add_argument("--counter", type=Path, help="a file that counts the starts")
parser.add_argument("--generate", default="", help="the body of POST /generate, or hang, or 500")
parser.add_argument("--generate-fails", type=int, default=0, help="500 for the first N generations")
parser.add_argument(
    "--freeze", type=Path, help="while this file is there, health is 200 and nothing is generated"
)
parser.add_argument("--no-model-info", action="store_true")
options = parser.parse_args()

SAMPLE = {
    "text": " four",
    "meta_info": {"finish_reason": {"type": "length", "length": 4}, "completion_tokens": 4},
}
OPENAI = {"choices": [{"text": " four", "finish_reason": "length"}], "usage": {"completion_tokens": 4}}
generations = 0

start = 0
if options.counter:
    with options.counter.open("a+") as file:
        file.write("x")
    start = options.counter.stat().st_size
if start and start <= options.taken:
    if options.taken_says:
        print(options.taken_says, flush=True)
        sys.exit(1)
    sys.exit(98)
for n in range(options.print_bytes // 100):
    print(f"{n:99}")
if options.exit is not None:
    print(f"ending with {options.exit}", flush=True)
    sys.exit(options.exit)
if options.ignore_term:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.zombie_child and os.fork() == 0:
    os._exit(0)
if options.never_bind:
    print("loading for ever", flush=True)
    time.sleep(1000)
if options.daemonise:
    launcher = os.getpid()
    if os.fork():
        sys.exit(0)
    while os.getppid() == launcher:  # or a slow exit would let it serve while its launcher still runs
        time.sleep(0.005)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health_generate":
            self.wait_while_frozen()
        if self.path == "/model_info" and not options.no_model_info:
            self.answer(200, json.dumps({"weight_version": "7"}))
        elif self.path.startswith("/health"):
            self.answer(200, "")
        else:
            self.answer(404, "")

    def do_POST(self) -> None:
        global generations
        self.rfile.read(int(self.headers["content-length"]))
        self.wait_while_frozen()
        generations += 1
        if options.generate == "500" or generations <= options.generate_fails:
            self.answer(500, '{"error": "broken"}')
        elif options.generate == "hang":
            time.sleep(1000)
        else:
            default = SAMPLE if self.path == "/generate" else OPENAI
            self.answer(200, options.generate or json.dumps(default))

    def wait_while_frozen(self) -> None:
        while options.freeze and options.freeze.exists():
            time.sleep(0.02)

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", options.bind_other or options.port), Handler)
print(f"serving on {server.server_port}", flush=True)
if options.zombie:
    threading.Thread(target=server.serve_forever).start()
    while not generations:
        time.sleep(0.02)
    # exit(2) of this thread alone: the process is a zombie for as long as the other one serves.
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
server.serve_forever()
