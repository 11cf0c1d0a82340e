"""A server that answers each POST with JSON, such as the model of a simulated user."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def json_server(answer: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """Answer each POST with the JSON of `answer(body)`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            reply = json.dumps(
                answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str) -> dict[str, Any]:
    """Return the answer of an OpenAI-compatible server."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text}}],
        "usage": {"completion_tokens": 3},
    }
