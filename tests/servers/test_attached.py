"""A server of rollout.urls that is not there, or is another: said with its URL, waited for or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentrl.errors import ConfigError, ServerError
from agentrl.ports import ReservedPort
from agentrl.servers.attached import AttachedServer, check_attached


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answering(status: int, body: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            return

    return Handler


class OfFiles(SimpleHTTPRequestHandler):
    """What `python -m http.server` starts."""

    def log_message(self, *_) -> None:
        return


OTHERS = {
    "files": (
        OfFiles,
        "it is no server of SGLang's protocol: POST /generate was answered by 501, a page in HTML, "
        "'Error response'",
    ),
    "openai": (answering(404, b'{"detail":"Not Found"}'), 'by 404, {"detail":"Not Found"}'),
    "page": (answering(200, b"<!DOCTYPE html>\n<p>hello"), "by 200, a page in HTML"),
    "key": (
        answering(401, b"no key"),
        "it refuses the API key, or the lack of one: POST /generate was answered",
    ),
}


def check(url: str, said: list[str]) -> None:
    check_attached([url], api_key=None, start_timeout_s=180, say=said.append)


def attached(url: str, *, start_timeout_s: float) -> AttachedServer:
    server = AttachedServer(
        url, start_timeout_s=start_timeout_s, hang_timeout_s=60, max_restarts=0, api_key=None
    )
    server.start()
    return server


@pytest.mark.parametrize("kind", OTHERS)
def test_another_server_is_refused_at_once(kind):
    handler, why = OTHERS[kind]
    said: list[str] = []
    with listening(handler) as url:
        with pytest.raises(ConfigError) as caught:
            check(url, said)
        began = time.monotonic()
        server = attached(url, start_timeout_s=600)
        with pytest.raises(ServerError) as later:
            server.wait_until_ready()
        server.stop()
    assert time.monotonic() - began < 60, "it is not waited for"
    assert said == []
    for error in (caught.value, later.value):
        assert str(error).startswith(f"rollout.urls: {url}: ")
        assert why in str(error)
        assert "\n" not in str(error)


def test_where_nobody_listens_is_waited_for_with_its_reason():
    said: list[str] = []
    with ReservedPort() as port:
        url = f"http://127.0.0.1:{port.number}"
    why = f"cannot connect to 127.0.0.1:{port.number}: Connection refused"
    check(url, said)
    assert said == [f"rollout.urls: {url}: {why}; waiting for it, at most 180 s"]
    server = attached(url, start_timeout_s=5)
    while not (waits_for := server.readiness.waits_for):
        time.sleep(0.01)
    assert waits_for == f"rollout.urls: {url}: {why}"
    with pytest.raises(ServerError) as caught:
        server.wait_until_ready()
    server.stop()
    assert str(caught.value) == (
        f"rollout.urls: {url} did not generate a token within rollout.server_start_timeout_s=5: {why}"
    )
    assert server.readiness.waits_for == ""


def test_a_server_that_is_overloaded_or_warms_up_is_waited_for():
    said: list[str] = []
    with listening(answering(503, b'{"error": "warming up"}')) as url:
        check(url, said)
    assert said == [
        f'rollout.urls: {url}: POST /generate was answered by 503, {{"error": "warming up"}}; waiting for '
        "it, at most 180 s"
    ]
