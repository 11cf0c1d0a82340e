"""A client of one inference server that speaks SGLang's native protocol (SGLang itself, or the embedded server).

Every call is one attempt and has no time-out of its own: use a cancel scope. Nothing is retried here but a request on a kept
connection that the server had closed already.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any

import trio

from agentrl.errors import RequestRefused, ServerError
from agentrl.http.client import HttpClient, HttpReply
from agentrl.sglang.protocol import (
    AdapterSupport,
    ModelInfo,
    PauseMode,
    Pulse,
    ServerLoad,
    bucket_body,
    error_message,
    generate_body,
    parse_adapter_support,
    parse_checksums,
    parse_generation,
    parse_load,
    parse_model_info,
    parse_server_info,
)
from agentrl.types import Generation, SamplingParams, TensorSpec

_ABORT_GRACE_S = 2.0
"""How long a cancelled generation may still take to tell the server so."""

PROBE_RID = "probe"
"""How the request ids of `serves` begin."""
_PROBE_TOKEN = 1
"""In every vocabulary."""

_BUSY = frozenset({408, 429})
"""Statuses that call the moment wrong, not the request."""
_NOT_A_SERVER = frozenset({401, 403, 404, 405})
"""Statuses of /generate that say nothing of the request: whoever answers so answers all alike."""
_QUESTION_CONNECTIONS = 16


class SGLangClient:
    """One server at `url`; `api_key` goes into the Authorization header and into no message; `adapter` is the LoRA adapter to sample with.

    `unpublished`: the version of weights that nobody published; None refuses them, for a learner could not know how old they are.
    `num_ids`: how many ids the model has; a reply with others is an error (None: any). `max_connections`: of generations at once; what
    else is asked never waits behind them.

    Every method raises RequestRefused when the server calls the request wrong (4xx), and ServerError when it fails (5xx, an
    unreadable reply) or does not answer (status None).
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
        # Where all generations wait, whether the server lives is asked beside them.
        self._http = HttpClient(self.url, headers=headers, max_connections=_QUESTION_CONNECTIONS)

    async def aclose(self) -> None:
        await self._generations.aclose()
        await self._http.aclose()

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation:
        """Sample one continuation of `input_ids`. It may finish with "abort" and the tokens sampled until then.

        Cancelling it aborts the request on the server too, which would otherwise sample on for nobody. A real SGLang does not hear
        that of a request that it holds during a pause: `settle_aborts` says it again.
        """
        body = generate_body(input_ids, params, rid=rid, adapter=self._adapter)
        try:
            reply = self._checked("/generate", await self._generations.request("POST", "/generate", json=body), excused=_NOT_A_SERVER)
        except trio.Cancelled:
            self._cancelled.add(rid)
            await self._abort_quietly(rid)
            raise
        return parse_generation(
            reply.json(), server=self.url, max_tokens=params.max_new_tokens, num_ids=self._num_ids, unpublished=self._unpublished
        )

    async def abort(self, rid: str | None) -> None:
        """End the request `rid`, or all requests when it is None; they answer with what they have."""
        await self._call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def _abort_quietly(self, rid: str) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(_ABORT_GRACE_S):
            try:
                await self.abort(rid)
            except ServerError:
                return  # a server that is gone samples nothing any more

    async def settle_aborts(self) -> None:
        """Abort once more what was cancelled since the last call; nothing happens while the server is paused.

        A real SGLang knows nothing of the requests that came during a pause, and would run them after it for nobody.
        """
        if not self._cancelled or await self.is_paused():
            return
        while self._cancelled:
            await self.abort(self._cancelled.pop())

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. Requests sent from here on hang until `resume`; what becomes of running ones is the mode's matter."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def release_memory(self) -> None:
        """Give up the memory of weights and KV cache; the server must be paused, and stay so until they are there again."""
        await self._call("POST", "/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self._call("POST", "/resume_memory_occupation", {})

    async def flush_cache(self) -> None:
        await self._call("POST", "/flush_cache", {})

    # -------------------------------------------------------------------------------------------------- questions

    async def is_ready(self) -> bool:
        """Tell whether the server answers and takes requests; a real SGLang that is paused says no. It never raises ServerError."""
        try:
            return (await self._http.request("GET", "/ready")).status == 200
        except ServerError:
            return False

    async def is_paused(self) -> bool:
        """Tell whether generation is paused. A real SGLang that calls itself unhealthy counts as paused: `/ready` is all it tells."""
        reply = await self._http.request("GET", "/ready")
        return reply.status == 503 or (await self.server_info()).get("is_paused") is True

    async def pulse(self) -> Pulse:
        return Pulse(await self.is_paused(), await self.loads())

    async def serves(self, version: int) -> bool:
        """Tell whether a token that the server samples just now carries `version` or a later one; a paused server lets it wait."""
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

    async def adapter_support(self) -> AdapterSupport:
        return parse_adapter_support(await self.server_info(), server=self.url)

    async def checksums(self) -> Mapping[str, str]:
        """Return {weight name: hex}; a real SGLang uses its own fused names."""
        return parse_checksums((await self._call("POST", "/weights_checker", {"action": "checksum"})).json(), server=self.url)

    # ---------------------------------------------------------------------------------------------------- weights

    async def update_weights_from_disk(self, path: str, *, version: int, flush_cache: bool, load_format: str = "auto") -> None:
        """Load the safetensors of folder `path`, which the server must be able to read, as `version`.

        The format is always said: a server that was started with dummy weights would make up others.
        """
        body = {"model_path": path, "weight_version": str(version), "flush_cache": flush_cache, "load_format": load_format}
        await self._update("/update_weights_from_disk", body)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter of folder `path`, which the server must be able to read, as `name`; refused while it has one so called."""
        await self._update("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Forget the LoRA adapter `name`; waits for its running requests, refused when there is none so called."""
        await self._update("/unload_lora_adapter", {"lora_name": name})

    async def update_weight_version(self, version: int) -> None:
        """Rename the weights the server has; nothing is transferred and nothing aborted."""
        await self._update("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def init_weights_group(self, *, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> None:
        """Let the server join a process group, its tensor-parallel rank r as rank `rank_offset` + r.

        Call it when the peers join too: a real server blocks until they do.
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

    async def begin_weight_update(self) -> None:
        await self._update("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        await self._update("/end_weight_update", {})

    async def update_weights_from_distributed(
        self, specs: Sequence[TensorSpec], *, group: str, version: int | None, flush_cache: bool
    ) -> None:
        """Receive one bucket that rank 0 of `group` broadcasts; `version` with the last bucket, None before."""
        await self._update("/update_weights_from_distributed", bucket_body(specs, group=group, version=version, flush_cache=flush_cache))

    async def update_weights_from_tensor(self, pickled: str, *, num_ranks: int, version: int | None, flush_cache: bool) -> None:
        """Send one bucket inside the request, the same to each of the server's tensor-parallel ranks; the embedded server refuses it."""
        body: dict[str, Any] = {"serialized_named_tensors": [pickled] * num_ranks, "flush_cache": flush_cache}
        await self._update("/update_weights_from_tensor", body | ({"weight_version": str(version)} if version is not None else {}))

    async def _update(self, path: str, body: Mapping[str, Any]) -> None:
        reply = await self._call("POST", path, body)
        if not reply.body:
            return
        answer = reply.json()
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise ServerError(f"{self.url}{path}: {error_message(answer) or 'failed without a message'}", status=reply.status)

    # -------------------------------------------------------------------------------------------------------- wire

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> HttpReply:
        return self._checked(path, await self._http.request(method, path, json=body))

    def _checked(self, path: str, reply: HttpReply, *, excused: Set[int] = frozenset()) -> HttpReply:
        """Return a reply of status 200; `excused`: statuses that do not blame the request."""
        if reply.status == 200:
            return reply
        message = f"{self.url}{path} answered {reply.status}: {_error_text(reply)}"
        if 400 <= reply.status < 500 and reply.status not in _BUSY | excused:
            raise RequestRefused(message, status=reply.status)
        raise ServerError(message, status=reply.status)


def _error_text(reply: HttpReply) -> str:
    try:
        message = error_message(reply.json())
    except ServerError:
        message = None
    return message or reply.body[:300].decode(errors="replace").strip() or "no message"
