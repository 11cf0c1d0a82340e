"""A fake inference server that answers at once, to measure the client's own cost.

It implements the protocol's rollout routes. The k-th request of a trajectory gets the k-th of the given
turns. Turns are read as token ids from one JSON line on standard input: {"turns": [[...], ...]}. It prints
its port.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
import uvicorn

from agentrl.servers.client import PROBE_RID

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def reply_of(turn: list[int]) -> bytes:
    """Return the body of a reply whose sampled tokens are `turn`."""
    meta = {
        "finish_reason": {"type": "stop", "matched": turn[-1]},
        "output_token_logprobs": [[-0.5, token, None] for token in turn],
        "weight_versions": [{"version": "0", "start": 0, "end": len(turn)}],
    }
    return orjson.dumps({"output_ids": turn, "meta_info": meta})


class InstantServer:
    """The ASGI application."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._replies = [reply_of(turn) for turn in turns]
        self._probed = reply_of(turns[0][:1])
        self._asked: Counter[str] = Counter()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        body = b""
        is_whole = False
        while not is_whole:
            message = await receive()
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": self._answer(scope["path"], body)})

    def _answer(self, path: str, body: bytes) -> bytes:
        if path == "/v1/loads":
            return (
                b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, '
                b'"max_total_num_tokens": 1}]}'
            )
        if path == "/model_info":
            return b'{"model_path": "instant", "weight_version": "0"}'
        request = orjson.loads(body)
        if request["rid"].startswith(PROBE_RID):
            return self._probed
        trajectory = request["rid"].rpartition("-")[0]
        turn = self._asked[trajectory]
        self._asked[trajectory] += 1
        return self._replies[min(turn, len(self._replies) - 1)]


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(listener.getsockname()[1], flush=True)
    app = InstantServer(json.loads(sys.stdin.readline())["turns"])
    uvicorn.Server(
        uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=60)
    ).run(sockets=[listener])


if __name__ == "__main__":
    main()
