"""The inside of a hub process: answers calls that arrive on standard input, one JSON message per line.

It runs in the interpreter of somebody else's environment, and needs nothing but Python 3.10. The other end is
`agentrl/extras/hubs/process.py`.

    in     {"id": 1, "call": NAME, "arguments": {...}}     {"cancel": 1}
    out    {"ready": {...}}     {"id": 1, "result": ...}     {"cancelled": 1}
           {"id": 1, "error": {"kind": "refused" | "failed", "type", "text", "place", "traceback"}}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, BinaryIO

CLEAN_UP_S = 1.5
"""Seconds that running calls get to clean up after the end of the input."""
MAX_TEXT_CHARS = 500

Handler = Callable[..., Awaitable[Any]]


class Refused(Exception):
    """The arguments of a call make no sense; the message says what would."""


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer calls until the input ends; does not return. Prints go to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        asyncio.run(_Server(handlers, out).run())
    finally:
        os._exit(0)  # a thread of the world's may still run


class _Server:
    def __init__(self, handlers: Mapping[str, Handler], out: BinaryIO) -> None:
        self._handlers = handlers
        self._out = out
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for line in sys.stdin.buffer:
                loop.call_soon_threadsafe(self._begin, json.loads(line))
            loop.call_soon_threadsafe(ended.set)
            # If the loop is blocked, nobody hears that.
            threading.Timer(CLEAN_UP_S + 0.5, os._exit, (0,)).start()

        threading.Thread(target=read, daemon=True).start()
        self._write({"ready": {"python": sys.version.split()[0]}})
        await ended.wait()
        for call in self._calls.values():
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls.values(), timeout=CLEAN_UP_S)

    def _begin(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            if (running := self._calls.get(message["cancel"])) is not None:
                running.cancel()
            self._write({"cancelled": message["cancel"]})
            return
        id = message["id"]
        self._calls[id] = asyncio.create_task(self._answer(id, message["call"], message["arguments"]))
        self._calls[id].add_done_callback(lambda _: self._calls.pop(id, None))

    async def _answer(self, id: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            result = await self._handlers[name](**arguments)
            line = _encoded({"id": id, "result": result})
        except asyncio.CancelledError:
            raise
        except Refused as error:
            line = _encoded({"id": id, "error": {"kind": "refused", "text": str(error)}})
        except Exception as error:  # noqa: BLE001 - boundary of one call: somebody else's code raised
            line = _encoded({"id": id, "error": described(error)})
        self._out.write(line)
        self._out.flush()

    def _write(self, message: dict[str, Any]) -> None:
        self._out.write(_encoded(message))
        self._out.flush()


def described(error: BaseException) -> dict[str, str]:
    """Return type, text, and place of an error: the innermost frame in a file that is not installed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    lines = [
        f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
        for frame in frames
    ]
    text = " ".join(str(error).split())[:MAX_TEXT_CHARS]
    shown = ["Traceback (most recent call last):", *lines, type(error).__name__] if lines else []
    return {
        "kind": "failed",
        "type": type(error).__name__,
        "text": text,
        "place": place,
        "traceback": "\n".join(shown),
    }


def _is_users(file: str) -> bool:
    libraries = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
    is_installed = {"site-packages", "dist-packages"} & set(file.split(os.sep))
    is_ours = os.path.dirname(file) == os.path.dirname(os.path.abspath(__file__))
    return not (file.startswith("<") or is_installed or is_ours or file.startswith(libraries))


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message, allow_nan=False).encode() + b"\n"
