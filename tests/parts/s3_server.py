"""A real S3 server (moto's) on this machine, in front of which faults are injected."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "tests"
KEY, SECRET = "known-key", "known-secret"

_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>"


@dataclass
class Faults:
    """What goes wrong, and how often it still will. `requests`: what arrived, method and path.

    busy: 503 answers. cut_requests: connections closed before an answer. cut_answers: closed in the middle
    of a body. page: keys per page of a listing. forbidden: words of paths that are refused to be written.
    held: uploads wait for it, if `only` is in their path. writes: so many are accepted, then none.
    between: is called once, when a file's size was told and its content is asked for.
    """

    busy: int = 0
    cut_requests: int = 0
    cut_answers: int = 0
    page: int | None = None
    forbidden: str | None = None
    writes: int | None = None
    held: threading.Event | None = None
    only: str = ""
    between: Callable[[], None] | None = None
    waiting: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)

    def take(self, name: str) -> bool:
        left = getattr(self, name)
        setattr(self, name, max(0, left - 1))
        return left > 0


class S3Server:
    """moto's S3 behind a WSGI application that refuses, cuts, delays and shortens."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.faults = Faults()
        self._num_tests, self.url = 0, f"s3://{BUCKET}"
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def environment(self, *, key: str = KEY) -> dict[str, str]:
        """Return the variables with which a process finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def for_test(self) -> S3Server:
        """Give a test a folder of its own, `url`."""
        self._num_tests += 1
        self.url = f"s3://{BUCKET}/test_{self._num_tests}"
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def failing(self, **faults) -> Iterator[Faults]:
        """Inject faults within the block."""
        self.faults = Faults(**faults)
        try:
            yield self.faults
        finally:
            if self.faults.held is not None:
                self.faults.held.set()
            self.faults = Faults()

    def __call__(self, environ, start_response):
        faults, method, path = self.faults, environ["REQUEST_METHOD"], environ["PATH_INFO"]
        faults.requests.append(f"{method} {path}")
        faults.arrived.set()
        writes = method in ("PUT", "POST")
        if not re.search(rf"Credential={KEY}/", environ.get("HTTP_AUTHORIZATION", "")):
            return self._refuse(start_response, "403 Forbidden", "InvalidAccessKeyId", "no such key")
        if faults.take("busy"):
            return self._refuse(start_response, "503 Slow Down", "SlowDown", "reduce your request rate")
        if faults.take("cut_requests"):
            return self._cut(environ)
        if writes and faults.forbidden is not None and faults.forbidden in path:
            return self._refuse(start_response, "403 Forbidden", "AccessDenied", "Access Denied")
        if writes and faults.writes is not None:
            faults.writes -= 1
            if faults.writes < 0:
                return self._refuse(start_response, "403 Forbidden", "AccessDenied", "Access Denied")
        if writes and faults.held is not None and faults.only in path:
            faults.waiting.set()
            faults.held.wait(60)
        query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
        if faults.page is not None and "list-type" in query:
            environ["QUERY_STRING"] = urlencode({**query, "max-keys": str(faults.page)})
        if method == "GET" and "list-type" not in query and faults.between is not None:
            call, faults.between = faults.between, None
            call()
        if method == "GET" and "list-type" not in query and faults.take("cut_answers"):
            return self._half(environ, start_response)
        return self._moto(environ, start_response)

    def _half(self, environ, start_response):
        whole = b"".join(self._moto(environ, start_response))
        yield whole[: len(whole) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    def _cut(self, environ):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError

    def _refuse(self, start_response, status: str, code: str, text: str):
        body = _ERROR.format(code=code, text=text).encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


def create_bucket(server: S3Server, name: str = BUCKET) -> None:
    from pyarrow import fs

    fs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        endpoint_override=server.endpoint,
        region="us-east-1",
        allow_bucket_creation=True,
    ).create_dir(name)
