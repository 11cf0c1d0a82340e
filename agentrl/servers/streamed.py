"""A generation that is told while it is sampled: SGLang's server-sent events, each with everything so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import orjson

from agentrl.errors import RequestRefused, ServerError
from agentrl.http.client import MAX_REPLY_BYTES
from agentrl.servers.protocol import error_message
from agentrl.types import Generation

Hear = Callable[[Sequence[int]], None]
"""Is told further tokens of a turn, as soon as they are known."""

STREAM_INTERVAL_TOKENS = 32
"""Tokens between two events. Each repeats all before it, with their log-probabilities."""


class StreamedTokens:
    """The tokens of one request that have arrived so far."""

    def __init__(self, hear: Hear) -> None:
        self.num_heard = 0
        self._hear = hear
        self._parse: Callable[[], Generation] | None = None

    def arrived(self, ids: Sequence[int], parse: Callable[[], Generation]) -> None:
        """Tell the tokens that are new. `ids`: all so far; `parse` returns them with their facts, should no
        more arrive.
        """
        new = ids[self.num_heard :]
        if new:
            self.num_heard, self._parse = len(ids), parse
            self._hear(new)

    def partial(self) -> Generation | None:
        """Return what was told, if the request ended early; None if nothing was.

        Raises:
            ServerError: it cannot be recorded, so the turn cannot go on as it was told.
        """
        return None if self._parse is None else self._parse()


class EventReader:
    """Splits a reply into its events.

    A stream has no bound of its own, as events repeat each other. Its newest event has: it is a whole reply.

    Attributes:
        last: the newest event, which holds all before it.
        versions: of the server's weights, when it sent its events.
    """

    def __init__(self, server: str, *, max_event_bytes: int = MAX_REPLY_BYTES) -> None:
        self.last: Mapping[str, Any] = {}
        self.versions: set[str] = set()
        self._server = server
        self._max_event_bytes = max_event_bytes
        self._begun: list[bytes] = []  # the pieces of an event without its end
        self._num_begun = 0

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the events that end in `data`.

        Raises:
            RequestRefused, ServerError: an event is an error, cannot be read, or is longer than
                `max_event_bytes`.
        """
        whole = self._ended(data)
        events = [self._read(text) for event in whole if (text := _data_of(event)) not in (b"", b"[DONE]")]
        self.last = events[-1] if events else self.last
        self.versions.update(str(_meta(event).get("weight_version")) for event in events)
        return events

    def _ended(self, data: bytes) -> list[bytes]:
        """Return the events that end in `data`. Their pieces are joined once, not with each piece."""
        last = self._begun[-1][-1:] if self._begun else b""  # an end may be cut in two
        whole: list[bytes] = []
        if b"\n\n" in last + data:
            *whole, data = b"".join([*self._begun, data]).split(b"\n\n")
            self._begun, self._num_begun = [], 0
        if data:
            self._begun.append(data)
            self._num_begun += len(data)
        if self._num_begun > self._max_event_bytes:
            raise ServerError(f"{self._server} streamed an event longer than {self._max_event_bytes} bytes")
        return whole

    def _read(self, text: bytes) -> dict[str, Any]:
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise ServerError(f"{self._server} streamed an event that is not JSON: {text[:80]!r}") from error
        if isinstance(event, dict) and isinstance(event.get("output_ids"), list):
            return event
        message = f"{self._server} broke off a stream: {error_message(event) or 'an event without tokens'}"
        problem = event.get("error") if isinstance(event, dict) else None
        if isinstance(problem, dict) and problem.get("code") == 400:
            raise RequestRefused(message, status=400)
        raise ServerError(message)


def is_finished(event: Mapping[str, Any]) -> bool:
    """Return whether an event is the last of its generation."""
    return _meta(event).get("finish_reason") is not None


def known_ids(event: Mapping[str, Any]) -> Sequence[int]:
    """Return the tokens of an event whose facts are known: SGLang may add a token before its facts."""
    ids: Sequence[int] = event["output_ids"]
    return ids if is_finished(event) else ids[: _num_known(event)]


def cut_off(event: Mapping[str, Any], versions: Set[str]) -> Mapping[str, Any]:
    """Return an event of a stream as the reply of a request that was aborted after it.

    SGLang says which version sampled which token with its last event only. Without it, all tokens have the
    one version that all events had; with several `versions`, the reply has none, and cannot be recorded.

    Raises:
        ServerError: the event has no facts.
    """
    num = _num_known(event)
    if not num:
        raise ServerError("a stream broke off before its tokens had log-probabilities")
    meta = _meta(event)
    spans = [
        {**span, "end": min(span["end"], num)}
        for span in meta.get("weight_versions") or ()
        if span["start"] < num
    ]
    if not spans and len(versions) == 1:
        spans = [{"version": next(iter(versions)), "start": 0, "end": num}]
    facts = {"output_token_logprobs": meta["output_token_logprobs"][:num], "weight_versions": spans}
    meta = {**meta, **facts, "finish_reason": {"type": "abort"}}
    return {**event, "output_ids": event["output_ids"][:num], "meta_info": meta}


def _num_known(event: Mapping[str, Any]) -> int:
    meta = _meta(event)
    try:
        return min(
            len(event["output_ids"]), len(meta["output_token_logprobs"]), int(meta["completion_tokens"])
        )
    except (KeyError, TypeError, ValueError):
        return 0


def _meta(event: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = event.get("meta_info")
    return meta if isinstance(meta, Mapping) else {}


def _data_of(event: bytes) -> bytes:
    return b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
