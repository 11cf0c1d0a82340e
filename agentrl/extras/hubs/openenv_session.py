"""A session with an OpenEnv server: an environment of its own there, over one WebSocket.

The server's HTTP routes `/reset` and `/step` make a new environment for each request, so they are not used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agentrl.errors import ToolError
from agentrl.extras.hubs.packages import hub_package
from agentrl.loopback import is_local
from agentrl.types import JsonObject

MAX_MESSAGE_BYTES = 2**24
CLOSE_TIMEOUT_S = 2.0


class ServerFull(ToolError):
    """All sessions of the server are taken."""


class ActionRefused(Exception):
    """The server has no such action. The session goes on."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a reset or a step led to. reward: None if the server gave none."""

    observation: JsonObject
    reward: float | None
    is_done: bool


class OpenEnvSession:
    """One call at a time. A call that fails or is cancelled breaks it: its answer may still come."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = dict(headers)
        self._socket: Any = None
        self._is_broken = False

    async def open(self) -> None:
        """Connect.

        Raises:
            ToolError: the server cannot be reached.
        """
        client = _package("websockets.asyncio.client")
        try:
            self._socket = await client.connect(
                websocket_url(self._url),
                additional_headers=self._headers,
                max_size=MAX_MESSAGE_BYTES,
                open_timeout=None,  # the caller has the deadline
                close_timeout=CLOSE_TIMEOUT_S,
                proxy=None if is_local(urlsplit(self._url).hostname or "") else True,
            )
        except (OSError, _package("websockets.exceptions").WebSocketException) as error:
            raise ToolError(f"OpenEnv server {self._url} cannot be reached: {_said(error)}") from error

    async def reset(self, arguments: JsonObject) -> Observed:
        """Begin an episode; raises as `step`, and ServerFull."""
        return self._observed(await self._ask({"type": "reset", "data": dict(arguments)}, "observation"))

    async def step(self, action: JsonObject) -> Observed:
        """Take an action.

        Raises:
            ActionRefused: it does not fit the server's schema.
            ToolError: the environment raised, or the server is lost.
        """
        return self._observed(await self._ask({"type": "step", "data": dict(action)}, "observation"))

    async def state(self) -> JsonObject:
        """Return the state of the episode; raises as `step`."""
        found: JsonObject = await self._ask({"type": "state"}, "state")
        return found

    async def close(self) -> None:
        if self._socket is not None:
            self._is_broken = True
            await self._socket.close()

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    async def _ask(self, message: JsonObject, kind: str) -> Any:
        if self._is_broken or self._socket is None:
            raise ToolError(f"OpenEnv server {self._url}: the session of this attempt was lost")
        self._is_broken = True
        try:
            await self._socket.send(json.dumps(message))
            reply = json.loads(await self._socket.recv())
            data = reply["data"]
        except (OSError, _package("websockets.exceptions").WebSocketException) as error:
            raise ToolError(f"OpenEnv server {self._url} was lost: {_said(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ToolError(
                f"OpenEnv server {self._url} answered something else than its protocol"
            ) from error
        if reply.get("type") == "error":
            raise self._error(data)
        if reply.get("type") != kind or not isinstance(data, dict):
            raise ToolError(f"OpenEnv server {self._url} answered {str(reply)[:80]!r} in place of its {kind}")
        self._is_broken = False
        return data

    def _error(self, data: Any) -> Exception:
        code, text = str(data.get("code", "")), " ".join(str(data.get("message", data)).split())[:500]
        if code == "VALIDATION_ERROR":
            self._is_broken = False
            return ActionRefused(_fields(data) or text)
        if code == "CAPACITY_REACHED":
            return ServerFull(f"OpenEnv server {self._url} has no free session: {text}")
        return ToolError(f"OpenEnv server {self._url}: its environment failed: {text} ({code})")

    def _observed(self, data: JsonObject) -> Observed:
        observation, reward = data.get("observation"), data.get("reward")
        if not isinstance(observation, dict) or not (reward is None or isinstance(reward, int | float)):
            raise ToolError(
                f"OpenEnv server {self._url} answered {str(data)[:80]!r} in place of an observation"
            )
        if reward is not None and not math.isfinite(reward):
            raise ToolError(f"OpenEnv server {self._url} gave the reward {reward}")
        return Observed(observation, None if reward is None else float(reward), bool(data.get("done")))


def websocket_url(url: str) -> str:
    """Return where the server of an `http(s)://` URL has its WebSocket."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}[parts.scheme]
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/ws", "", ""))


def _package(module: str) -> Any:
    return hub_package(module, extra="openenv", needed_by="the environment 'openenv'")


def _fields(data: JsonObject) -> str:
    """Return what a refusal says of each field: `move: Field required`."""
    errors = data.get("errors")
    if not isinstance(errors, list):
        return ""
    told = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}"
        for error in errors
        if isinstance(error, dict)
    ]
    return "; ".join(told)[:500]


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
