"""One JSON request to a scoring service, with retries if the service is at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import trio

from agentrl.errors import ConfigError, RewardError, ServerError
from agentrl.http.client import HttpClient

CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.25
TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 that mean "try later"."""


class Poster:
    """Posts to one URL. Runs under trio; the caller sets the deadline.

    Each request opens a connection. Scoring takes far longer than connecting, and a reward is never told when
    to close kept ones.
    """

    def __init__(self, url: str, *, api_key: str | None, max_retries: int, reward: str) -> None:
        """Validate the URL.

        Raises:
            ConfigError: it is not the URL of a service.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"reward {reward!r}: url={url!r} is not the URL of a service; write it like "
                "http://127.0.0.1:8000/score"
            )
        self._reward = reward
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_retries = max_retries

    async def check(self) -> None:
        """Raise ConfigError if nobody listens at the URL. No request is sent."""
        try:
            with trio.move_on_after(CONNECT_TIMEOUT_S):
                async with HttpClient(self._origin) as client:
                    await client.connect()
                return
        except ServerError as error:
            why = str(error)
        else:
            why = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        raise ConfigError(
            f"reward {self._reward!r}: url {self._origin}{self._path}: {why}; start the service first"
        )

    async def post(self, body: Mapping[str, Any]) -> Any:
        """Return the decoded reply of status 200.

        Raises:
            RewardError: the service rejected the request, or still failed after all retries.
        """
        pause_s, tries = FIRST_PAUSE_S, 1
        while True:
            try:
                return await self._once(body)
            except _RefusedError as error:
                raise RewardError(str(error)) from error
            except ServerError as error:
                if tries > self._max_retries:
                    raise RewardError(f"{error} (tried {tries} times)") from error
            await trio.sleep(pause_s)
            pause_s *= 2
            tries += 1

    async def _once(self, body: Mapping[str, Any]) -> Any:
        async with HttpClient(self._origin, headers=self._headers) as client:
            reply = await client.request("POST", self._path, json=body)
        if reply.status == 200:
            return reply.json()
        text = f"{self._origin}{self._path} answered {reply.status}: {reply.excerpt(200)!r}"
        if reply.status in TRANSIENT or reply.status >= 500:
            raise ServerError(text, status=reply.status)
        raise _RefusedError(text)


class _RefusedError(Exception):
    """The service rejected the request: a retry is useless."""
