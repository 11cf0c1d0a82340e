"""Streamed replies of POST /generate: as in SGLang, server-sent events with everything sampled so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import orjson

from agentrl.extras.embedded.bodies import BadRequest
from agentrl.extras.embedded.engine import EngineError, NotFinite
from agentrl.extras.embedded.requests import GenerateRequest
from agentrl.extras.embedded.service import Result, Service

POLL_S = 0.05
"""Seconds between two looks at what the engine's thread has sampled."""

Answer = Callable[[Result], dict[str, Any]]


async def events(
    service: Service, request: GenerateRequest, answer: Answer, *, interval_tokens: int
) -> AsyncIterator[bytes]:
    """Sample, and yield an event whenever `interval_tokens` more tokens are known, then the whole result.

    An iterator that is closed early ends its generation.
    """
    task = asyncio.ensure_future(service.generate(request))
    num_told = 0
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_S)
            partial = service.so_far(request.rid)
            if partial is not None and len(partial.samples) >= num_told + interval_tokens:
                num_told = len(partial.samples)
                yield _event(_unfinished(answer(partial)))
        try:
            yield _event(answer(await task))
        except BadRequest as error:
            yield _event({"error": {"message": str(error), "type": "BadRequest", "code": 400}})
        except (EngineError, NotFinite) as error:
            yield _event({"error": {"message": str(error), "type": "InternalServerError", "code": 500}})
        yield b"data: [DONE]\n\n"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, BadRequest, EngineError, NotFinite):
            await task


def _unfinished(reply: dict[str, Any]) -> dict[str, Any]:
    return {**reply, "meta_info": {**reply["meta_info"], "finish_reason": None}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
