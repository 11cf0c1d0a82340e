"""Requests read and answers written by hand, for servers of tests that answer what no HTTP library would let
them.
"""

from __future__ import annotations

import json

import trio


def reply(body: object, *, status: int = 200) -> bytes:
    content = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(content), content)


async def read_request(stream: trio.SocketStream) -> tuple[str, dict] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = await stream.receive_some(65536)
        if not chunk:
            return None
        data += chunk
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += await stream.receive_some(65536)
    return head.split()[1].decode(), json.loads(body) if body else {}
