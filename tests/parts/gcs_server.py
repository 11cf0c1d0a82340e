"""A server that speaks Google Cloud Storage's protocol, on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.ports import ReservedPort

BUCKET = "tests"
START_S = 60.0
_PROGRAM = (
    "import sys\n"
    "from gcp_storage_emulator.server import create_server\n"
    "create_server('127.0.0.1', int(sys.argv[1]), True, default_bucket=sys.argv[2]).run()\n"
)


@contextmanager
def gcs_server() -> Iterator[str]:
    """Yield the server's address; it has one bucket, BUCKET, in memory.

    A process of its own: pyarrow holds Python's lock while it waits for the size of a file.
    """
    with ReservedPort() as port:
        command = [sys.executable, "-c", _PROGRAM, str(port.number), BUCKET]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until_it_listens(process, port.number)
            yield f"http://127.0.0.1:{port.number}"
        finally:
            process.kill()
            process.wait()


def _wait_until_it_listens(process: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, f"the server does not listen after {START_S:g} s"
            time.sleep(0.05)
