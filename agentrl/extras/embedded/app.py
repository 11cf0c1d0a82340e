"""The HTTP routes: SGLang's paths, fields and status codes around the service.

Deliberate differences from SGLang 0.5.23:
- Input ids outside the vocabulary, unknown weight names, wrong shapes and non-finite values are refused
(400).
  SGLang crashes or is silently corrupted.
- /health does not generate, so it also succeeds during a pause.
- A closed connection ends its generation.
- Unsupported fields are refused like unknown ones.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from agentrl.errors import InfrastructureError
from agentrl.extras.embedded.admission import AdmissionMiddleware, json_response
from agentrl.extras.embedded.bodies import (
    BadRequest,
    flag_of,
    integer_of,
    list_of,
    read_body,
    seconds_of,
    text_of,
    version_of,
)
from agentrl.extras.embedded.bounded_repr import shown
from agentrl.extras.embedded.engine import EngineError, NotFinite
from agentrl.extras.embedded.groups import WrongState
from agentrl.extras.embedded.requests import RequestLimits, parse_generate, parse_stream_interval
from agentrl.extras.embedded.service import Result, Service
from agentrl.extras.embedded.streams import events
from agentrl.extras.embedded.weights import WeightsRefused, parse_specs
from agentrl.servers.protocol import READS_POSITIONS
from agentrl.servers.weight_changes import CHANGES_FORMAT

Handler = Callable[[Request], Awaitable[Response]]
Decode = Callable[[list[int], bool], str]
"""(token ids, whether to skip special tokens) -> text; "" for a model without a tokenizer."""

_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")
_BACKENDS = ("gloo", "nccl") if torch.cuda.is_available() else ("gloo",)
_ONLY_ABORT = (
    "the embedded server pauses in mode `abort` only: running requests return what they have; got {}"
)


class App:
    """The request handlers of one server. `info` has the settings that /server_info reports."""

    def __init__(
        self, service: Service, limits: RequestLimits, *, decode: Decode, info: Mapping[str, Any]
    ) -> None:
        self._service = service
        self._limits = limits
        self._decode = decode
        self._info = dict(info)

    # --------------------------------------------------------------------------------------------- generation

    async def generate(self, request: Request) -> Response:
        body = await read_body(request)
        requests, is_batch = parse_generate(body, self._limits)
        self._service.check_rids(requests)
        if (interval := parse_stream_interval(body)) is not None:
            stream = events(self._service, requests[0], self._answer, interval_tokens=interval)
            return StreamingResponse(stream, media_type="text/event-stream")
        results = await _unless_disconnected(
            request, [asyncio.ensure_future(self._service.generate(each)) for each in requests]
        )
        if results is None:
            return await _gone(request)
        answers = [self._answer(result) for result in results]
        return json_response(answers if is_batch else answers[0])

    def _answer(self, result: Result) -> dict[str, Any]:
        request, ids = result.request, [token for token, _ in result.samples]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": _finish_reason(result),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(ids),
            "cached_tokens": result.num_cached_tokens,
            "weight_version": result.version,
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in result.spans],
            "num_retractions": 0,
            "e2e_latency": result.seconds,
        }
        if request.return_logprob:
            meta["input_token_logprobs"] = _of_prompt(result)
            meta["output_token_logprobs"] = [(logprob, token, None) for token, logprob in result.samples]
            meta["output_token_logprobs_length"] = len(ids)
        if result.experts is not None:
            meta["routed_experts"] = base64.b64encode(result.experts.astype(np.int32).tobytes()).decode()
        # The stop token is in the ids but not in the text.
        text_ids = ids[:-1] if result.finish == "stop" else ids
        answer = {
            "text": self._decode(text_ids, request.skip_special_tokens),
            "output_ids": ids,
            "meta_info": meta,
        }
        return answer | {"prompt_token_ids": request.input_ids} if request.returns_prompt else answer

    async def abort(self, request: Request) -> Response:
        body = await read_body(request)
        if flag_of(body, "abort_all", False):
            self._service.abort_all()
        else:
            self._service.abort(text_of(body, "rid", ""))
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = (await read_body(request)).get("mode", "abort")
        if mode != "abort":
            raise BadRequest(_ONLY_ABORT.format(shown(mode)))
        self._service.pause()
        return json_response({"status": "ok", "message": "Generation paused successfully."})

    async def flush_cache(self, request: Request) -> Response:
        """Wait until the server is idle, and forget all prefixes.

        Running requests make it fail, as in SGLang.
        """
        timeout_s = seconds_of(request.query_params.get("timeout", "0"))
        if await self._service.wait_idle(timeout_s):
            self._service.engine.flush_prefixes()
            return PlainTextResponse("Cache flushed.\n")
        reason = "Timed out waiting for idle state.\n" if timeout_s else "Flush cache failed.\n"
        return PlainTextResponse(reason, status_code=400)

    # ---------------------------------------------------------------------------------------------- questions

    async def ready(self, request: Request) -> Response:
        is_ready = self._service.is_warm and self._service.engine.is_alive
        return Response(status_code=200 if is_ready else 503)

    async def loads(self, request: Request) -> Response:
        running, waiting, used = self._service.counts()
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": self._limits.cache_tokens,
            "max_running_requests": self._info["max_requests_per_batch"],
            "token_usage": used / self._limits.cache_tokens,
        }
        return json_response({"timestamp": time.time(), "version": self._info["version"], "loads": [load]})

    async def server_info(self, request: Request) -> Response:
        can = {"knows_changes": True, "stages_updates": True, READS_POSITIONS: True}
        state = {"is_paused": self._service.is_paused}
        return json_response({**self._info, **self._model_info(), **state, **can})

    async def model_info(self, request: Request) -> Response:
        return json_response(self._model_info())

    def _model_info(self) -> dict[str, Any]:
        path = self._service.model_path
        return {
            "model_path": path,
            "served_model_name": path,
            "is_generation": True,
            "weight_version": self._service.version,
        }

    async def models(self, request: Request) -> Response:
        path = self._service.model_path
        card = {
            "id": path,
            "object": "model",
            "owned_by": "agentrl",
            "root": path,
            "max_model_len": self._limits.context_tokens,
        }
        return json_response({"object": "list", "data": [card]})

    async def check_weights(self, request: Request) -> Response:
        action = (await read_body(request)).get("action")
        if action != "checksum":
            raise BadRequest(
                f"the embedded server's weights_checker knows the action `checksum` only, got {shown(action)}"
            )
        return json_response(
            {"success": True, "message": "", "ranks": [{"checksums": await self._service.checksums()}]}
        )

    # ------------------------------------------------------------------------------------------------ weights

    async def update_from_disk(self, request: Request) -> Response:
        body = await read_body(request)
        version, load_format = version_of(body, "weight_version"), body.get("load_format")
        if load_format not in (None, "auto", "safetensors", CHANGES_FORMAT):
            raise BadRequest(
                f"unknown load_format {shown(load_format)}; the embedded server knows null, auto, "
                f"safetensors and {CHANGES_FORMAT}"
            )
        update = (
            self._service.update_from_changes
            if load_format == CHANGES_FORMAT
            else self._service.update_from_disk
        )
        await update(
            text_of(body, "model_path"), version=version, abort_all=flag_of(body, "abort_all_requests", False)
        )
        message = f"Succeeded to update model weights. Weight version updated to {self._service.version}."
        return json_response(_done(message, num_paused_requests=0))

    async def load_adapter(self, request: Request) -> Response:
        body = await read_body(request)
        await self._service.load_adapter(text_of(body, "lora_name"), text_of(body, "lora_path"))
        return self._adapters()

    async def unload_adapter(self, request: Request) -> Response:
        await self._service.unload_adapter(text_of(await read_body(request), "lora_name"))
        return self._adapters()

    def _adapters(self) -> Response:
        return json_response(
            {
                "success": True,
                "loaded_adapters": {name: held.folder for name, held in self._service.adapters.items()},
            }
        )

    async def begin_update(self, request: Request) -> Response:
        body = await read_body(request)
        await self._service.begin_update(is_staged=flag_of(body, "staged", False))
        return json_response(_done("Weight update begun."))

    async def update_from_group(self, request: Request) -> Response:
        body = await read_body(request)
        load_format = body.get("load_format")
        if load_format not in (None, "flattened_bucket"):
            raise BadRequest(
                f"unknown load_format {shown(load_format)}; the embedded server knows null and "
                "`flattened_bucket`"
            )
        await self._service.update_from_group(
            parse_specs(list_of(body, "names"), list_of(body, "dtypes"), list_of(body, "shapes")),
            name=text_of(body, "group_name", "weight_update_group"),
            is_bucket=load_format is not None,
            version=version_of(body, "weight_version"),
            abort_all=flag_of(body, "abort_all_requests", False),
        )
        return json_response(_done("Succeeded to update parameter online."))

    async def update_from_tensor(self, request: Request) -> Response:
        raise BadRequest(
            "update_weights_from_tensor is refused: its tensors are pickled, and unpickling runs code; use "
            "disk or distributed"
        )

    async def init_group(self, request: Request) -> Response:
        body = await read_body(request)
        address, backend = text_of(body, "master_address"), text_of(body, "backend", "nccl")
        if not _HOST.fullmatch(address):
            raise BadRequest(
                f"`master_address` must be the name or address of the learner's machine, got {shown(address)}"
            )
        if backend not in _BACKENDS:
            raise BadRequest(
                f"`backend` must be one of {', '.join(_BACKENDS)} on this machine, got {shown(backend)}"
            )
        rank = integer_of(body, "rank_offset", minimum=1)  # rank 0 is the learner, which listens
        await self._service.groups.join(
            address=address,
            port=integer_of(body, "master_port", minimum=1, maximum=65535),
            rank=rank,
            world_size=integer_of(body, "world_size", minimum=rank + 1),
            name=text_of(body, "group_name", "weight_update_group"),
            backend=backend,
        )
        return json_response(_done("Succeeded to initialize custom process group."))

    async def destroy_group(self, request: Request) -> Response:
        await self._service.leave_group(
            text_of(await read_body(request), "group_name", "weight_update_group")
        )
        return json_response(_done("Succeeded to destroy custom process group."))

    async def rename(self, request: Request) -> Response:
        body = await read_body(request)
        version = version_of(body, "new_version")
        if version is None:
            raise BadRequest("`new_version` is missing")
        if flag_of(body, "abort_all_requests", True):
            self._service.abort_all()
        self._service.rename(version)
        return json_response(_done(f"Weight version updated to {version}", new_version=version))

    def routes(self) -> list[Route]:
        resumed = {"status": "ok", "message": "Generation continued successfully."}
        posts: Mapping[str, Handler] = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": _command(self._service.resume, resumed),
            "/release_memory_occupation": _command(self._service.release_memory, None),
            "/resume_memory_occupation": _command(self._service.resume_memory, None),
            "/weights_checker": self.check_weights,
            "/update_weights_from_disk": self.update_from_disk,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/begin_weight_update": self.begin_update,
            "/end_weight_update": _command(self._service.end_update, _done("Weight update ended.")),
            "/update_weights_from_distributed": self.update_from_group,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/update_weight_version": self.rename,
        }
        gets: Mapping[str, Handler] = {
            "/ready": self.ready,
            "/health": self.ready,
            "/v1/loads": self.loads,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/v1/models": self.models,
        }
        return [
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        ]


def build_app(
    app: App, *, api_key: str | None, is_on_loopback: bool, lifespan: Lifespan[Starlette]
) -> ASGIApp:
    """Return the ASGI application. With `api_key`, all routes except /health and /ready require it."""
    starlette = Starlette(
        routes=app.routes(),
        lifespan=lifespan,
        exception_handlers={
            BadRequest: _bad_request,
            WeightsRefused: _refused_update,
            WrongState: _refused_update,
            InfrastructureError: _refused_update,
            EngineError: _failed,
            NotFinite: _failed,
            ClientDisconnect: _gone,
        },
    )
    return AdmissionMiddleware(starlette, api_key, is_on_loopback=is_on_loopback)


async def _unless_disconnected(
    request: Request, work: Sequence[asyncio.Future[Result]]
) -> list[Result] | None:
    """Await all of `work`; return None if the client disconnects first. Always cancels unfinished work."""
    gone = asyncio.ensure_future(_disconnected(request))
    finished = asyncio.gather(*work)
    try:
        either: set[asyncio.Future[Any]] = {finished, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return await finished if finished.done() else None
    finally:
        gone.cancel()
        for each in work:
            each.cancel()
        # Awaited, because asyncio logs a traceback for each exception that nobody retrieves.
        await asyncio.gather(gone, finished, *work, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _of_prompt(result: Result) -> list[tuple[float | None, int, None]]:
    """Return SGLang's triples of the prompt's tokens; the first has no log-probability."""
    if result.prompt_logprobs is None:
        return []
    ids = result.request.input_ids[result.request.prompt_logprobs_from :]
    return [
        (logprob, token, None) for logprob, token in zip([None, *result.prompt_logprobs], ids, strict=True)
    ]


def _finish_reason(result: Result) -> dict[str, Any]:
    if result.finish == "length":
        return {"type": "length", "length": len(result.samples)}
    if result.finish == "stop":
        return {"type": "stop", "matched": result.matched}
    return {"type": "abort", "message": result.message, "status_code": None, "err_type": None}


def _command(verb: Callable[[], Awaitable[None] | None], answer: Any) -> Handler:
    """Return the handler of a command without fields."""

    async def handle(request: Request) -> Response:
        await read_body(request)
        if (running := verb()) is not None:
            await running
        return json_response(answer)

    return handle


def _done(message: str, **more: Any) -> dict[str, Any]:
    return {"success": True, "message": message, **more}


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    message, status = str(error), error.status
    return json_response(
        {"error": message if error.is_flat else {"message": message, "type": "BadRequest", "code": status}},
        status=status,
    )


async def _refused_update(request: Request, error: Exception) -> Response:
    return json_response({"success": False, "message": str(error)}, status=400)


async def _failed(request: Request, error: Exception) -> Response:
    message = f"the engine ended: {error}" if isinstance(error, EngineError) else str(error)
    return json_response(
        {"error": {"message": message, "type": "InternalServerError", "code": 500}}, status=500
    )


async def _gone(request: Request, error: Exception | None = None) -> Response:
    return Response(status_code=499)  # nobody reads it
