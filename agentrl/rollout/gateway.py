"""The gateway: an OpenAI-compatible server on this machine, through which external agents play attempts.

There is one per rollout process, on a free port of 127.0.0.1, started at its first use. Each attempt has its
own API key, which selects the session that answers and expires with it.

    POST /v1/chat/completions    tools, streaming, stop strings, max_tokens, logprobs; n=1
    GET  /v1/models

Errors have OpenAI's form: 401 for an unknown key, 403 and 415 for requests that only a web page sends, 413
for a body that is too long, 400 for a wrong request, 400 with code `trajectory_ended` (and the outcome as
type) once a budget is exhausted, 502 if no inference server answered. A retry would not help with any of
them, so all of them carry `x-should-retry: false` for OpenAI's clients.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import trio

from agentrl.errors import ServerError, UserError
from agentrl.http.admission import refusal_of
from agentrl.http.server import HttpHead, HttpRequest, HttpResponse, serve_http
from agentrl.plugins import OpenAIEndpoint
from agentrl.rollout.ending import TrajectoryEnd
from agentrl.rollout.openai_messages import (
    ChatReply,
    ChatRequest,
    RequestError,
    read_request,
    write_error,
    write_models,
    write_reply,
    write_stream,
)

MODEL = "policy"
"""The name under which the policy is served. Requests may use any name."""
MAX_BODY_BYTES = 8 * 2**20
"""As text, several times the context of any model."""
_LARGE_BYTES = 64 * 1024
"""Bodies of at least this size are parsed in a thread, so that they do not block the event loop of all
attempts.
"""


class Served(Protocol):
    """One attempt, as the gateway sees it."""

    async def complete(self, request: ChatRequest) -> ChatReply: ...


class OpenTrajectory:
    """A served attempt with its running requests. `failures`: errors that are not the program's fault."""

    def __init__(self, served: Served) -> None:
        self.failures: list[Exception] = []
        self._served = served
        self._running: set[trio.CancelScope] = set()
        self._one_ended = trio.Event()

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Answer one request.

        Raises:
            RequestError: the error to send to the program.
        """
        scope = trio.CancelScope()
        self._running.add(scope)
        try:
            with scope:
                return await self._complete(request)
        finally:
            self._running.discard(scope)
            self._one_ended.set()
        raise RequestError("the trajectory is over", type="closed", code="trajectory_ended")

    async def end(self) -> None:
        """Cancel the running requests and wait until they have ended."""
        for scope in self._running:
            scope.cancel()
        while self._running:
            self._one_ended = trio.Event()
            await self._one_ended.wait()

    async def _complete(self, request: ChatRequest) -> ChatReply:
        try:
            return await self._served.complete(request)
        except TrajectoryEnd as error:
            raise RequestError(str(error), type=error.outcome.value, code="trajectory_ended") from error
        except UserError as error:  # e.g. messages that the chat template rejects
            raise RequestError(str(error)) from error
        except Exception as error:  # boundary of one HTTP request
            self.failures.append(error)
            status = 502 if isinstance(error, ServerError) else 500
            raise RequestError(
                f"{type(error).__name__}: {error}",
                status=status,
                type="server_error",
                code="trajectory_failed",
            ) from error


class Gateway:
    """Serves open attempts. It runs within one trio run, from its first attempt to the end of that run."""

    def __init__(self) -> None:
        self._open: dict[str, OpenTrajectory] = {}
        self._port: int | None = None
        self._start_lock = trio.Lock()

    @asynccontextmanager
    async def open(self, served: Served) -> AsyncIterator[tuple[OpenAIEndpoint, list[Exception]]]:
        """Serve an attempt while the context is open. Yields its endpoint and the list to which failures are
        appended.

        On exit the key becomes invalid, and running requests have been cancelled.
        """
        port = await self._started()
        key = f"trajectory-{secrets.token_urlsafe(24)}"
        trajectory = self._open[key] = OpenTrajectory(served)
        try:
            yield OpenAIEndpoint(f"http://127.0.0.1:{port}/v1", key, MODEL), trajectory.failures
        finally:
            del self._open[key]
            with trio.CancelScope(shield=True):  # cancelled requests end immediately
                await trajectory.end()

    async def _started(self) -> int:
        async with self._start_lock:
            if self._port is None:
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                # A system task of the trio run, because the server outlives the attempt that started it.
                serve = partial(
                    serve_http, self._answer, listeners, max_body_bytes=MAX_BODY_BYTES, admit=self._admit
                )
                trio.lowlevel.spawn_system_task(serve)
                self._port = listeners[0].socket.getsockname()[1]
            return self._port

    def _admit(self, head: HttpHead) -> HttpResponse | None:
        """Reject unauthorized requests before their bodies are read."""
        try:
            self._trajectory_of(head)
        except RequestError as error:
            return _refused(error)
        if (refusal := refusal_of(head.headers, is_on_loopback=True)) is not None:
            return _refused(RequestError(refusal.message, status=refusal.status))
        return None

    def _trajectory_of(self, head: HttpHead) -> OpenTrajectory:
        trajectory = self._open.get(head.headers.get("authorization", "").removeprefix("Bearer "))
        if trajectory is None:
            raise RequestError(
                "the API key belongs to no running trajectory",
                status=401,
                type="authentication_error",
                code="invalid_api_key",
            )
        return trajectory

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._route(request)
        except RequestError as error:
            return _refused(error)

    async def _route(self, request: HttpRequest) -> HttpResponse:
        trajectory = self._trajectory_of(request)  # it may have ended while the body arrived
        match request.method, request.path:
            case "GET", "/v1/models":
                return HttpResponse(200, write_models(MODEL))
            case "POST", "/v1/chat/completions":
                asked = await _read(request.body)
                reply = await trajectory.complete(asked)
                if asked.is_stream:
                    stream = write_stream(reply, model=MODEL, with_usage=asked.streams_usage)
                    return HttpResponse(200, stream, "text/event-stream", {"Cache-Control": "no-cache"})
                return HttpResponse(200, write_reply(reply, model=MODEL))
        raise RequestError(
            f"{request.method} {request.path} is not served; use POST /v1/chat/completions",
            status=404,
            code="not_found",
        )


async def _read(body: bytes) -> ChatRequest:
    if len(body) < _LARGE_BYTES:
        return read_request(body)
    return await trio.to_thread.run_sync(read_request, body)


def _refused(error: RequestError) -> HttpResponse:
    return HttpResponse(error.status, write_error(error), headers={"x-should-retry": "false"})
