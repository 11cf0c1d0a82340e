"""A server with OpenEnv's messages, for tests that need no package of OpenEnv's. The real one is in
tests/extras/hubs/test_real_openenv.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from websockets.sync.server import serve

Answer = Callable[[dict[str, Any]], Any]
"""The reply to a message; a text is sent as it is, None closes the connection."""


def observed(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


def refused(code: str, message: str = "no", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


def counting() -> Answer:
    """Return an environment in which `{"say": "3"}` is worth a point; an episode has three steps. The answer
    of its tools is 3.
    """
    steps = 0

    def answer(message: dict[str, Any]) -> Any:
        nonlocal steps
        if message["type"] == "reset":
            steps = 0
            return observed(f"seed {message['data'].get('seed')}", 0.5)
        if message["data"].get("type") == "call_tool":
            return {"type": "observation", "data": {"observation": {"text": "", "result": "3"}}}
        if not isinstance(message["data"].get("say"), str):
            return refused("VALIDATION_ERROR", errors=[{"loc": ["say"], "msg": "Field required"}])
        steps += 1
        said = message["data"]["say"]
        return observed(f"you said {said}", float(said == "3"), done=steps == 3)

    return answer


@contextmanager
def openenv_server(session: Callable[[], Answer]) -> Iterator[str]:
    """Serve while the context is open; yields the URL. `session` makes what answers one connection."""

    def handle(socket: Any) -> None:
        answer = session()
        for text in socket:
            message: Mapping[str, Any] = json.loads(text)
            reply = answer(dict(message))
            if reply is None:
                return
            socket.send(reply if isinstance(reply, str) else json.dumps(reply))

    with serve(handle, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()
