"""A client of one inference server that speaks SGLang's native protocol: SGLang itself, or the embedded
server.

Each call is one attempt without a timeout of its own: use a cancel scope. Nothing is retried, with one
exception: a request on a kept-alive connection that the server had already closed.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from agentrl.data.image_files import as_sent
from agentrl.errors import DiskError, RequestRefused, ServerError
from agentrl.http.client import HttpClient, HttpReply, OnData
from agentrl.servers.protocol import (
    READS_POSITIONS,
    ModelInfo,
    PauseMode,
    Pulse,
    ServerLoad,
    bucket_body,
    check_read_ids,
    error_message,
    generate_body,
    has_other_placeholders,
    images_body,
    parse_checksums,
    parse_generation,
    parse_load,
    parse_max_adapter_rank,
    parse_model_info,
    parse_prompt_logprobs,
    parse_records_experts,
    parse_server_info,
    prompt_body,
)
from agentrl.servers.streamed import (
    STREAM_INTERVAL_TOKENS,
    EventReader,
    StreamedTokens,
    cut_off,
    is_finished,
    known_ids,
)
from agentrl.types import Generation, PlacedImage, SamplingParams, TensorSpec

_ABORT_GRACE_S = 2.0
"""Seconds that a cancelled generation may spend on aborting its request on the server."""

PROBE_RID = "probe"
"""Prefix of the request ids of `serves`."""
_PROBE_TOKEN = 1
"""This id is in every vocabulary."""

_BUSY = frozenset({408, 429})
"""Statuses that mean "try later"; the request is not at fault."""
_NOT_A_SERVER = frozenset({401, 403, 404, 405})
"""Statuses of /generate that do not concern the request: whoever sends them treats every request like
this.
"""
_QUESTION_CONNECTIONS = 16


class SGLangClient:
    """The server at `url`.

    Args:
        api_key: sent in the Authorization header; it appears in no message.
        adapter: the LoRA adapter to sample with, unless a request names another; None: the base weights.
        max_connections: of concurrent generations. All other calls have connections of their own and never
            wait for generations.
        unpublished: version to report for weights that were never published. None: such replies are errors,
            because their staleness is unknown.
        num_ids: size of the model's vocabulary; a reply with a larger id is an error. None: not checked.

    Every method raises RequestRefused if the server calls the request invalid (4xx). It raises ServerError if
    the server fails (5xx, an unreadable reply) or does not answer (status None).
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        adapter: str | None = None,
        max_connections: int = 1024,
        unpublished: int | None = None,
        num_ids: int | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._adapter = adapter
        self._unpublished = unpublished
        self._num_ids = num_ids
        self._cancelled: set[str] = set()  # rids that a paused server may still hold
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._generations = HttpClient(self.url, headers=headers, max_connections=max_connections)
        # A pool of its own: health checks must not queue behind generations.
        self._http = HttpClient(self.url, headers=headers, max_connections=_QUESTION_CONNECTIONS)

    async def aclose(self) -> None:
        await self._generations.aclose()
        await self._http.aclose()

    # --------------------------------------------------------------------------------------------- generation

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation:
        """Sample one continuation of `input_ids`. It may finish with "abort" and the tokens sampled so far.

        If this call is cancelled, it also aborts the request on the server, which would otherwise keep
        sampling. A real SGLang ignores an abort of a request that it holds during a pause; `settle_aborts`
        repeats it.
        """
        body = generate_body(input_ids, params, rid=rid, adapter=params.adapter or self._adapter)
        if params.images:
            await self._check_placeholders(input_ids, params.images)
            body |= images_body(input_ids, params.images, encoded=await _encoded(params.images))
        reply = (await self._sampled(body, rid)).json()
        generation = self._parsed(reply, params, len(input_ids))
        if params.images and len(generation.token_ids):
            check_read_ids(reply, input_ids, server=self.url)
        return generation

    async def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str, into: StreamedTokens
    ) -> Generation:
        """Sample one continuation as `generate` does, and tell `into` its tokens as they arrive."""
        assert not params.images, "conversations that stream, those of the gateway, show no images"
        body = generate_body(
            input_ids,
            params,
            rid=rid,
            adapter=params.adapter or self._adapter,
            stream_interval=STREAM_INTERVAL_TOKENS,
        )
        reader = EventReader(self.url)

        def read(data: bytes) -> None:
            for event in reader.feed(data):
                into.arrived(known_ids(event), so_far)

        def so_far() -> Generation:
            return self._parsed(cut_off(reader.last, reader.versions), params, len(input_ids))

        await self._sampled(body, rid, on_data=read)
        if not is_finished(reader.last):
            raise ServerError(f"{self.url} ended a stream before its generation")
        return self._parsed(reader.last, params, len(input_ids))

    async def _check_placeholders(self, input_ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Refuse a prompt with images that the server cannot read.

        SGLang takes each placeholder for an image, and never answers if there are more of them than images.
        """
        if not has_other_placeholders(input_ids, images):
            return
        if (await self.server_info()).get(READS_POSITIONS) is not True:
            raise RequestRefused(
                f"{self.url} takes every placeholder of images for an image, and the policy sampled one; the "
                "embedded server reads such prompts"
            )

    async def _sampled(self, body: Mapping[str, Any], rid: str, on_data: OnData | None = None) -> HttpReply:
        """Return the reply to a request for a generation; if cancelled, abort the request on the server."""
        try:
            reply = await self._generations.request("POST", "/generate", json=body, on_data=on_data)
        except trio.Cancelled:
            self._cancelled.add(rid)
            await self._abort_quietly(rid)
            raise
        return self._checked("/generate", reply, excused=_NOT_A_SERVER)

    def _parsed(self, reply: Any, params: SamplingParams, num_prompt: int) -> Generation:
        return parse_generation(
            reply,
            server=self.url,
            max_tokens=params.max_new_tokens,
            num_ids=self._num_ids,
            unpublished=self._unpublished,
            num_context=None if params.experts_from is None else num_prompt - params.experts_from,
        )

    async def prompt_logprobs(self, input_ids: Sequence[int], *, first: int, rid: str) -> NDArray[np.float32]:
        """Return the log-probabilities of the tokens from `first` (at least 1) on, f32[N - first], each given
        those before it, at temperature 1. Nothing is sampled.
        """
        body = prompt_body(input_ids, first=first, rid=rid)
        reply = await self._sampled(body, rid)
        return parse_prompt_logprobs(reply.json(), list(input_ids[first:]), server=self.url)

    async def abort(self, rid: str | None) -> None:
        """End the request `rid`, or all requests if it is None. They return the tokens sampled so far."""
        await self._call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def _abort_quietly(self, rid: str) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(_ABORT_GRACE_S):
            try:
                await self.abort(rid)
            except ServerError:
                return  # a server that does not answer needs no abort

    async def settle_aborts(self) -> None:
        """Abort again the generations cancelled since the last call. Does nothing while the server is paused.

        A real SGLang does not find requests that arrived during a pause when it is told to abort them, and
        would run them after the pause.
        """
        if not self._cancelled or await self.is_paused():
            return
        while self._cancelled:
            await self.abort(self._cancelled.pop())

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. New requests wait until `resume`; `mode` decides what happens to running ones."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def release_memory(self) -> None:
        """Free the memory of weights and KV cache.

        The server must be paused until `resume_memory` is done.
        """
        await self._call("POST", "/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self._call("POST", "/resume_memory_occupation", {})

    async def flush_cache(self) -> None:
        await self._call("POST", "/flush_cache", {})

    # ---------------------------------------------------------------------------------------------- questions

    async def is_ready(self) -> bool:
        """Return whether the server accepts requests. False for a paused real SGLang.

        Never raises ServerError.
        """
        try:
            return (await self._http.request("GET", "/ready")).status == 200
        except ServerError:
            return False

    async def is_paused(self) -> bool:
        """Return whether generation is paused.

        An unhealthy real SGLang also counts as paused: /ready does not distinguish the two.
        """
        reply = await self._http.request("GET", "/ready")
        return reply.status == 503 or (await self.server_info()).get("is_paused") is True

    async def pulse(self) -> Pulse:
        return Pulse(await self.is_paused(), await self.loads())

    async def serves(self, version: int) -> bool:
        """Return whether the server now samples tokens of `version` or later.

        Waits while the server is paused.
        """
        published = (await self.model_info()).version
        published = self._unpublished if published is None else published
        if published is None or published < version:
            return False
        token = await self.generate([_PROBE_TOKEN], SamplingParams(1), rid=f"{PROBE_RID}-{uuid.uuid4().hex}")
        return len(token.versions) > 0 and int(token.versions.min()) >= version

    async def loads(self) -> ServerLoad:
        return parse_load((await self._call("GET", "/v1/loads")).json(), server=self.url)

    async def server_info(self) -> Mapping[str, Any]:
        return parse_server_info((await self._call("GET", "/server_info")).json(), server=self.url)

    async def model_info(self) -> ModelInfo:
        return parse_model_info((await self._call("GET", "/model_info")).json(), server=self.url)

    async def max_adapter_rank(self) -> int:
        return parse_max_adapter_rank(await self.server_info(), server=self.url)

    async def records_experts(self) -> bool:
        """Return whether the server can say which experts computed a token."""
        return parse_records_experts(await self.server_info())

    async def checksums(self) -> Mapping[str, str]:
        """Return {weight name: hex}. A real SGLang uses its own names, of fused weights."""
        return parse_checksums(
            (await self._call("POST", "/weights_checker", {"action": "checksum"})).json(), server=self.url
        )

    # ------------------------------------------------------------------------------------------------ weights

    async def update_weights_from_disk(
        self, path: str, *, version: int, flush_cache: bool, load_format: str = "auto"
    ) -> None:
        """Load the safetensors in folder `path`, which the server must be able to read, as `version`.

        `load_format` is always sent: a server started with dummy weights would otherwise invent them again.
        """
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "load_format": load_format,
        }
        await self._update("/update_weights_from_disk", body)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in `path`, a folder that the server can read; refused if `name` is loaded."""
        await self._update("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Unload the LoRA adapter `name` after its running requests; refused if it is not loaded."""
        await self._update("/unload_lora_adapter", {"lora_name": name})

    async def update_weight_version(self, version: int) -> None:
        """Rename the server's current weights. Nothing is transferred or aborted."""
        await self._update(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    async def init_weights_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Tell the server to join a process group, with its tensor-parallel rank r as rank `rank_offset` + r.

        Call it while the other ranks join: a real server blocks until they do.
        """
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body)

    async def destroy_weights_group(self, name: str) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self, *, is_staged: bool = False) -> None:
        """Open a session of updates.

        is_staged: the server samples on with its old weights until the session ends. For servers whose
        `server_info` has `stages_updates`.
        """
        await self._update("/begin_weight_update", {"staged": True} if is_staged else {})

    async def end_weight_update(self) -> None:
        await self._update("/end_weight_update", {})

    async def update_weights_from_distributed(
        self, specs: Sequence[TensorSpec], *, group: str, version: int | None, flush_cache: bool
    ) -> None:
        """Receive one bucket that rank 0 of `group` broadcasts. `version` is set on the last bucket only."""
        await self._update(
            "/update_weights_from_distributed",
            bucket_body(specs, group=group, version=version, flush_cache=flush_cache),
        )

    async def update_weights_from_tensor(
        self,
        pickled: str,
        *,
        num_ranks: int,
        version: int | None,
        flush_cache: bool,
        loader: str | None = None,
    ) -> None:
        """Send one bucket in the request, the same for each tensor-parallel rank.

        Not for the embedded server.

        Args:
            loader: one of the server's `--custom-weight-loader`s, which gets the tensors.
        """
        body: dict[str, Any] = {"serialized_named_tensors": [pickled] * num_ranks, "flush_cache": flush_cache}
        body |= {} if version is None else {"weight_version": str(version)}
        body |= {} if loader is None else {"load_format": loader}
        await self._update("/update_weights_from_tensor", body)

    async def _update(self, path: str, body: Mapping[str, Any]) -> None:
        reply = await self._call("POST", path, body)
        if not reply.body:
            return
        answer = reply.json()
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise ServerError(
                f"{self.url}{path}: {error_message(answer) or 'failed without a message'}",
                status=reply.status,
            )

    # --------------------------------------------------------------------------------------------------- wire

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> HttpReply:
        return self._checked(path, await self._http.request(method, path, json=body))

    def _checked(self, path: str, reply: HttpReply, *, excused: Set[int] = frozenset()) -> HttpReply:
        """Return a reply of status 200, raise for others.

        `excused`: 4xx statuses that do not blame the request.
        """
        if reply.status == 200:
            return reply
        message = f"{self.url}{path} answered {reply.status}: {_error_text(reply)}"
        if 400 <= reply.status < 500 and reply.status not in _BUSY | excused:
            raise RequestRefused(message, status=reply.status)
        raise ServerError(message, status=reply.status)


async def _encoded(images: Sequence[PlacedImage]) -> list[str]:
    """Return images as they are sent.

    Raises:
        DiskError: one cannot be read.
    """

    def encode() -> list[str]:
        return [as_sent(placed.image, placed.width, placed.height) for placed in images]

    try:
        return await trio.to_thread.run_sync(encode)
    except OSError as error:
        raise DiskError(f"an image cannot be read: {error}") from error


async def for_each(
    servers: Sequence[SGLangClient],
    action: Callable[[SGLangClient], Awaitable[None]],
    *,
    timeout_s: float,
    limit: str,
) -> dict[str, str]:
    """Run `action(server)` concurrently on all servers; return url -> reason for those that failed.

    An action fails if it raises ServerError or exceeds `timeout_s`. Messages explain this limit by `limit`.
    """
    failed: dict[str, str] = {}

    async def one(server: SGLangClient) -> None:
        try:
            with trio.fail_after(timeout_s):
                await action(server)
        except ServerError as error:
            failed[server.url] = str(error)
        except trio.TooSlowError:
            failed[server.url] = f"{server.url} did not answer within {timeout_s:g} s ({limit})"

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(one, server)
    return failed


def _error_text(reply: HttpReply) -> str:
    try:
        message = error_message(reply.json())
    except ServerError:
        message = None
    return message or reply.excerpt()
