"""Small real servers that are no engine, or only half of one: what stands behind a wrong --engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


def as_json(value: Any, status: int = 200) -> Answer:
    return status, "application/json", json.dumps(value).encode()


PAGE: Answer = (200, "text/html", b"<html><body>Welcome to nginx!</body></html>")
NOT_FOUND = as_json({"detail": "Not Found"}, 404)
UNAUTHORIZED = as_json({"error": "Unauthorized"}, 401)


def completion(body: Mapping[str, Any]) -> Answer:
    """What an OpenAI-compatible server answers to a completion."""
    if body.get("model") != "tiny":
        return as_json({"error": {"message": f"no model {body.get('model')!r}", "code": 404}}, 404)
    choice = {"index": 0, "text": " 2", "finish_reason": "length"}
    return as_json({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})


OPENAI_ONLY: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
    "/v1/models": lambda _: as_json({"object": "list", "data": [{"id": "tiny"}]}),
    "/v1/completions": completion,
}


class Served:
    """A running server: its base URL and the paths that were asked for, in order."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []


@contextmanager
def serving(
    paths: Mapping[str, Callable[[Mapping[str, Any]], Answer]],
    otherwise: Answer = NOT_FOUND,
    authorization: str | None = None,
) -> Iterator[Served]:
    """Serve ``paths`` (GET and POST alike) on loopback; with ``authorization``, only to who sends it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(size) or b"{}")
            served.asked.append(self.path)
            served.headers.append({k.lower(): v for k, v in self.headers.items()})
            if authorization is not None and self.headers.get("authorization") != authorization:
                status, kind, content = UNAUTHORIZED
            elif self.path in paths:
                status, kind, content = paths[self.path](body)
            else:
                status, kind, content = otherwise
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Served(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
