"""The gateway: a server through which external agents play attempts, in the dialects that they speak.

There is one per rollout process, started at its first use: on a free port of 127.0.0.1, or where
`agent.gateway` says. Each attempt has its own API key, which selects the session that answers and expires
with it.

    POST /v1/chat/completions        OpenAI: tools, streaming, stop strings, max_tokens, logprobs; n=1
    POST /v1/responses               OpenAI: tools, streaming, previous_response_id
    POST /v1/messages                Anthropic: tools, streaming, stop_sequences
    POST /v1/messages/count_tokens   Anthropic
    GET  /v1/models                  both

Errors have the form of the dialect: 401 for an unknown key, 403 and 415 for requests that only a web page
sends, 413 for a body that is too long, 400 for a wrong request, 400 with code `trajectory_ended` (and the
outcome) once a budget is exhausted, 502 if no inference server answered. A retry would not help with any of
them, so all of them carry `x-should-retry: false` for the vendors' clients.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

import orjson
import trio

from agentrl.chat.chat import Chat
from agentrl.config.agent import GatewayConfig
from agentrl.errors import ServerError, UserError
from agentrl.extras.gateway import anthropic_messages, chat_completions, responses
from agentrl.extras.gateway.address import GatewayAddress, check_address, listen
from agentrl.extras.gateway.admission import refusal_of
from agentrl.extras.gateway.certificates import server_context
from agentrl.extras.gateway.http_server import HttpHead, HttpRequest, HttpResponse, HttpStream, serve_http
from agentrl.extras.gateway.responses_writer import StoredResponses
from agentrl.extras.gateway.session import GatewaySession
from agentrl.extras.gateway.stream import stream_reply
from agentrl.extras.gateway.turns import Asked, Listener, RequestError, TurnReply, TurnRequest
from agentrl.plugins import OpenAIEndpoint
from agentrl.rollout.ending import TrajectoryEnd
from agentrl.rollout.session import TrajectorySession

log = logging.getLogger(__name__)

MODEL = "policy"
"""The name under which the policy is served. Requests may use any name."""
MAX_BODY_BYTES = 8 * 2**20
"""As text, several times the context of any model."""
_LARGE_BYTES = 64 * 1024
"""Bodies of at least this size are parsed in a thread, so that they do not block the event loop of all
attempts.
"""

_MODEL_PATHS = ("/v1/models", f"/v1/models/{MODEL}")


class Served(Protocol):
    """One attempt, as the gateway sees it."""

    async def complete(self, request: TurnRequest, listener: Listener | None) -> TurnReply: ...

    async def count_tokens(self, request: TurnRequest) -> int: ...


class OpenTrajectory:
    """A served attempt with its running requests. `failures`: errors that are not the program's fault."""

    def __init__(self, served: Served) -> None:
        self.failures: list[Exception] = []
        self.responses = StoredResponses()
        self._served = served
        self._running: set[trio.CancelScope] = set()
        self._is_over = False
        self._one_ended = trio.Event()

    async def complete(self, request: TurnRequest, listener: Listener | None = None) -> TurnReply:
        """Answer one request; a `listener` is told the turn while it is sampled.

        Raises:
            RequestError: the error to send to the program.
        """
        if self._is_over:  # it ended while the body was read
            raise _over()
        scope = trio.CancelScope()
        self._running.add(scope)
        try:
            with scope:
                return await self._complete(request, listener)
        finally:
            self._running.discard(scope)
            self._one_ended.set()
        raise _over()

    async def count_tokens(self, request: TurnRequest) -> int:
        """Return the number of tokens of a request's prompt.

        Raises:
            RequestError: the chat template rejects its messages.
        """
        try:
            return await self._served.count_tokens(request)
        except UserError as error:
            raise RequestError(str(error)) from error

    async def end(self) -> None:
        """Refuse further requests, cancel the running ones and wait until they have ended."""
        self._is_over = True
        for scope in self._running:
            scope.cancel()
        while self._running:
            self._one_ended = trio.Event()
            await self._one_ended.wait()

    async def _complete(self, request: TurnRequest, listener: Listener | None) -> TurnReply:
        try:
            return await self._served.complete(request, listener)
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


def _over() -> RequestError:
    return RequestError("the trajectory is over", type="closed", code="trajectory_ended")


class Gateway:
    """Serves open attempts. It runs within one trio run, from its first attempt to the end of that run."""

    check_address = staticmethod(check_address)
    check_certificate = staticmethod(server_context)

    def __init__(self, config: GatewayConfig) -> None:
        """Raises:
        ConfigError: this machine cannot listen where `config` says.
        """
        check_address(config)
        self.streams = config.stream_tokens
        self._config = config
        self._open: dict[str, OpenTrajectory] = {}
        self._address: GatewayAddress | None = None
        self._start_lock = trio.Lock()

    def serve(
        self, session: TrajectorySession, chat: Chat
    ) -> AbstractAsyncContextManager[tuple[OpenAIEndpoint, list[Exception]]]:
        return self.open(GatewaySession(session, chat, streams=self.streams))

    @asynccontextmanager
    async def open(self, served: Served) -> AsyncIterator[tuple[OpenAIEndpoint, list[Exception]]]:
        """Serve an attempt while the context is open. Yields its endpoint and the list to which failures are
        appended.

        On exit the key becomes invalid, and running requests have been cancelled.

        Raises:
            ConfigError: the gateway cannot listen as `agent.gateway` says.
        """
        address = await self._started()
        key = f"trajectory-{secrets.token_urlsafe(24)}"
        trajectory = self._open[key] = OpenTrajectory(served)
        try:
            yield address.endpoint(key, MODEL), trajectory.failures
        finally:
            del self._open[key]
            with trio.CancelScope(shield=True):  # cancelled requests end immediately
                await trajectory.end()

    async def _started(self) -> GatewayAddress:
        async with self._start_lock:
            if self._address is None:
                self._address = await listen(self._config)
                # A system task of the trio run, because the server outlives the attempt that started it.
                serve = partial(
                    serve_http,
                    self._answer,
                    self._address.listeners,
                    max_body_bytes=MAX_BODY_BYTES,
                    admit=self._admit,
                    problem=lambda head, status, text: _refused(head, RequestError(text, status=status)),
                )
                trio.lowlevel.spawn_system_task(serve)
                if (opened := self._address.opens) is not None:
                    log.warning("%s", opened)
            return self._address

    def _admit(self, head: HttpHead) -> HttpResponse | None:
        """Reject unauthorized requests before their bodies are read."""
        assert self._address is not None
        try:
            self._trajectory_of(head)
        except RequestError as error:
            return _refused(head, error)
        refusal = refusal_of(head.headers, is_on_loopback=self._address.is_on_loopback)
        if refusal is not None:
            return _refused(head, RequestError(refusal.message, status=refusal.status))
        return None

    def _trajectory_of(self, head: HttpHead) -> OpenTrajectory:
        found = [self._open[key] for key in _keys_of(head) if key in self._open]
        if not found:
            raise RequestError(
                "the API key belongs to no running trajectory",
                status=401,
                type="authentication_error",
                code="invalid_api_key",
            )
        return found[0]

    async def _answer(self, request: HttpRequest) -> HttpResponse | HttpStream:
        try:
            return await self._route(request)
        except RequestError as error:
            return _refused(request, error)

    async def _route(self, request: HttpRequest) -> HttpResponse | HttpStream:
        trajectory = self._trajectory_of(request)  # it may have ended while the body arrived
        match request.method, request.path:
            case "GET" | "HEAD", path if path in _MODEL_PATHS:
                return HttpResponse(200, _models(request))
            case "POST", "/v1/messages/count_tokens":
                asked = await _read(partial(anthropic_messages.ask, model=MODEL), request.body)
                num_tokens = await trajectory.count_tokens(asked.request)
                return HttpResponse(200, anthropic_messages.write_count(num_tokens))
            case "POST", path if (ask := _ask(path, trajectory)) is not None:
                asked = await _read(ask, request.body)
                if asked.request.is_stream:
                    fail = partial(_refused, request)
                    return HttpStream(partial(stream_reply, trajectory.complete, asked, fail))
                return HttpResponse(200, asked.writer.whole(await trajectory.complete(asked.request)))
        raise RequestError(
            f"{request.method} {request.path[:100]} is not served; use POST /v1/chat/completions, "
            "/v1/responses or /v1/messages",
            status=404,
            code="not_found",
        )


def _ask(path: str, trajectory: OpenTrajectory) -> Callable[[bytes], Asked] | None:
    """Return what reads the requests of a path."""
    match path:
        case "/v1/chat/completions":
            return partial(chat_completions.ask, model=MODEL)
        case "/v1/responses":
            return partial(responses.ask, model=MODEL, stored=trajectory.responses)
        case "/v1/messages":
            return partial(anthropic_messages.ask, model=MODEL)
    return None


async def _read(ask: Callable[[bytes], Asked], body: bytes) -> Asked:
    if len(body) < _LARGE_BYTES:
        return ask(body)
    return await trio.to_thread.run_sync(ask, body)


def _keys_of(head: HttpHead) -> tuple[str, ...]:
    """Return the keys that a request sends: Anthropic's clients have a header of their own."""
    return head.headers.get("x-api-key", ""), head.headers.get("authorization", "").removeprefix("Bearer ")


def _is_anthropic(head: HttpHead) -> bool:
    return head.path.startswith("/v1/messages") or "anthropic-version" in head.headers


def _models(request: HttpRequest) -> bytes:
    if _is_anthropic(request):
        one, all_ = anthropic_messages.write_model, anthropic_messages.write_models
    else:
        one, all_ = chat_completions.write_model, chat_completions.write_models
    return all_(MODEL) if request.path == "/v1/models" else orjson.dumps(one(MODEL))


def _refused(head: HttpHead, error: RequestError) -> HttpResponse:
    write = anthropic_messages.write_error if _is_anthropic(head) else chat_completions.write_error
    return HttpResponse(error.status, write(error), headers={"x-should-retry": "false"})
