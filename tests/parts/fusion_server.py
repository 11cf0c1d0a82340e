"""A server with the protocol of SandboxFusion, on the loopback address.

It runs the tests' own programs, without walls.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "key-of-the-test"


class Answers(BaseHTTPRequestHandler):
    """POST /run_code, as in the reference of its API: files in and out are in base64."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {KEY}" or self.path != "/run_code":
            self.answer(401, {"detail": "no"})
            return
        self.answer(200, run_code(json.loads(body)))

    def answer(self, status: int, found: Any) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def run_code(asked: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for path, content in asked["files"].items():
            (place / path).write_bytes(base64.b64decode(content))
        (place / "main.py").write_text(asked["code"])
        result: dict[str, Any] = {"status": "Finished", "return_code": None, "stdout": "", "stderr": ""}
        try:
            done = subprocess.run(
                [sys.executable, "main.py"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=asked["run_timeout"],
            )
            result |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        except subprocess.TimeoutExpired:
            result["status"] = "TimeLimitExceeded"
        files = {
            path: base64.b64encode((place / path).read_bytes()).decode()
            for path in asked["fetch_files"]
            if (place / path).is_file()
        }
    is_fine = result["return_code"] == 0
    status = "Success" if is_fine else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": files}


@contextmanager
def fusion_server() -> Iterator[str]:
    """Yield the URL of a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
