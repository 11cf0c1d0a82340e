"""A hub process that keeps one server of somebody else's running: starts the command, and says its URL once
it is healthy. It ends with the server, and the server with it, even if its guard was killed before.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import urllib.error
import urllib.request

from agentrl_hub import Refused, serve  # type: ignore[import-not-found]  # beside this file, where it runs

POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_LIBRARY = ctypes.CDLL(None)

_URLS: dict[str, asyncio.Task[str]] = {}
_ENDS: list[asyncio.Task[None]] = []


async def url(command: list[str], health: str) -> str:
    """Return the URL of the server that `command` starts; `{port}` in it is a free port."""
    if not any("{port}" in word for word in command):
        raise Refused(f"command {command}: write {{port}} where the server gets its port")
    key = "\0".join(command)
    if key not in _URLS:
        _URLS[key] = asyncio.create_task(_started(command, health))
    return await asyncio.shield(_URLS[key])


async def _started(command: list[str], health: str) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The parent's input must not be the server's.
    process = await asyncio.create_subprocess_exec(
        *(word.replace("{port}", str(port)) for word in command),
        stdin=asyncio.subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    _ENDS.append(asyncio.create_task(_end_with(process)))
    found = f"http://127.0.0.1:{port}"
    while not await asyncio.to_thread(_is_healthy, found + health):
        await asyncio.sleep(POLL_S)
    return found


def _die_with_parent() -> None:
    _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _end_with(process: asyncio.subprocess.Process) -> None:
    os._exit(await process.wait() or 1)


def _is_healthy(address: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


serve({"url": url})
