"""SGLang's native protocol in types: request bodies built, replies read and checked.

A reply that contradicts itself (lengths, ids, version spans) is a ServerError: training on it would be silent damage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ServerError
from agentrl.types import Generation, SamplingParams, TensorSpec

PauseMode = Literal["abort", "retract", "in_place"]

_UNREADABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError)
"""What reading JSON of a wrong shape raises."""
_MAX_INT32 = 2**31 - 1

POLICY_ADAPTER = "policy"
"""The name under which servers hold the LoRA adapter of the policy, whatever its version."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server serves; `version` is None until weights were published to it."""

    model_path: str
    version: int | None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests and KV-cache tokens of a server at one moment."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a server says of itself while it answers no generation: one that works has another `load` each time."""

    is_paused: bool
    load: ServerLoad


def adapter_tensor(adapter: str, name: str) -> str:
    """Return how `/weights_checker` of the embedded server calls a tensor of a loaded adapter."""
    return f"{adapter}/{name}"


@dataclass(frozen=True, slots=True)
class AdapterSupport:
    """Which LoRA adapters a server loads: none (`max_rank` 0), or those up to a rank."""

    max_rank: int


def generate_body(input_ids: Sequence[int], params: SamplingParams, *, rid: str, adapter: str | None = None) -> dict[str, Any]:
    """Return the body of POST /generate: token ids in, token ids and log-probabilities out; `adapter` None: of the base weights."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(map(int, input_ids)),
        "sampling_params": {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "stream": False,
    }
    if params.ignore_eos:
        body["sampling_params"]["ignore_eos"] = True
    if adapter is not None:
        body["lora_path"] = adapter  # SGLang's word for the name of a loaded adapter
    return body


def bucket_body(specs: Sequence[TensorSpec], *, group: str, version: int | None, flush_cache: bool) -> dict[str, Any]:
    """Return the body of POST /update_weights_from_distributed for one flat byte bucket of `specs`."""
    body: dict[str, Any] = {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": flush_cache,
    }
    if version is not None:
        body["weight_version"] = str(version)
    return body


def parse_generation(
    reply: Any, *, server: str, max_tokens: int | None = None, num_ids: int | None = None, unpublished: int | None = None
) -> Generation:
    """Read a reply of /generate into aligned arrays.

    max_tokens: that were asked for, None: any number. num_ids: how many ids the model has, None: any. unpublished: version of weights
    that nobody published.

    Raises:
        ServerError: fields are missing or disagree, there are more tokens or other ones than there can be, or the server samples from
            weights that nobody published and `unpublished` is None.
    """
    try:
        meta = reply["meta_info"]
        ids = [int(token) for token in reply["output_ids"]]
        reason = meta["finish_reason"]["type"]
        triples = meta.get("output_token_logprobs") or []
        logprobs = [float(triple[0]) for triple in triples]
        logprob_ids = [int(triple[1]) for triple in triples]
        versions = parse_versions(meta.get("weight_versions") or [], num_tokens=len(ids), server=server, unpublished=unpublished)
        cached, retractions = int(meta.get("cached_tokens") or 0), int(meta.get("num_retractions") or 0)
    except _UNREADABLE as error:
        raise ServerError(f"{server} sent a generation that cannot be read: {type(error).__name__}: {error}") from error
    if reason not in ("stop", "length", "abort"):
        raise ServerError(f"{server} sent the unknown finish reason {reason!r}; known: stop, length, abort")
    if not ids and reason != "abort":
        raise ServerError(f"{server} sent a generation that is finished ({reason}) without a token")
    if max_tokens is not None and len(ids) > max_tokens:
        raise ServerError(f"{server} sent {len(ids)} tokens, and {max_tokens} were asked for")
    # The learner would look such a token up, and end.
    if ids and not (min(ids) >= 0 and max(ids) < (num_ids or _MAX_INT32)):
        raise ServerError(f"{server} sent a token id outside of 0..{(num_ids or _MAX_INT32) - 1}")
    if logprob_ids != ids:
        raise ServerError(f"{server} sent {len(ids)} output ids, but log-probabilities of {len(logprob_ids)} (or other) tokens")
    if not all(math.isfinite(value) and value <= 1e-3 for value in logprobs):
        raise ServerError(f"{server} sent a log-probability that is not a finite number below zero")
    return Generation(
        np.array(ids, np.int32),
        np.array(logprobs, np.float32),
        versions,
        reason,
        num_cached_tokens=cached,
        num_retractions=retractions,
    )


def parse_versions(
    spans: Sequence[Mapping[str, Any]], *, num_tokens: int, server: str, unpublished: int | None = None
) -> NDArray[np.int32]:
    """Turn spans [{version, start, end}] over the output into one version per token, i32[num_tokens].

    Raises:
        ServerError: the spans do not cover the tokens in order, or a version is no integer (no weights were published).
    """
    versions = np.empty(num_tokens, np.int32)
    position = 0
    for span in spans:
        start, end = int(span["start"]), int(span["end"])
        if start != position or end < start:
            raise ServerError(f"{server} sent version spans that do not cover its {num_tokens} tokens: {list(spans)}")
        if end > start:
            versions[start:end] = _published(span["version"], server, unpublished)
        position = end
    if position != num_tokens:
        raise ServerError(f"{server} sent version spans that do not cover its {num_tokens} tokens: {list(spans)}")
    return versions


def parse_model_info(reply: Any, *, server: str) -> ModelInfo:
    try:
        version = str(reply["weight_version"])
        return ModelInfo(str(reply["model_path"]), int(version) if version.isdecimal() else None)
    except _UNREADABLE as error:
        raise ServerError(f"{server} sent a model info that cannot be read: {type(error).__name__}: {error}") from error


def parse_server_info(reply: Any, *, server: str) -> Mapping[str, Any]:
    """Return the settings of /server_info by name."""
    if not isinstance(reply, Mapping):
        raise ServerError(f"{server} sent a server info that is no JSON object but {type(reply).__name__}")
    return reply


def parse_setting(info: Mapping[str, Any], name: str, *, default: int, server: str) -> int:
    """Return a whole number of /server_info; `default` where it is not there, null or 0."""
    try:
        return int(info.get(name) or default)
    except _UNREADABLE as error:
        raise ServerError(f"{server} sent a server info whose {name} is no whole number: {type(error).__name__}: {error}") from error


def parse_num_ranks(info: Mapping[str, Any], *, server: str) -> int:
    """Return how many members a server adds to a weights group: one for each part of the model that it computes with.

    Raises:
        ServerError: its data-parallel ranks are whole copies of the model, of which SGLang lets one alone join.
    """
    num_copies = parse_setting(info, "dp_size", default=1, server=server)
    if num_copies > 1 and info.get("enable_dp_attention") is not True:
        raise ServerError(
            f"{server} has dp_size={num_copies}, and SGLang lets one copy of a model alone join a weights group; "
            "start a server for each copy, or use rollout.weights.transport=disk"
        )
    return parse_setting(info, "tp_size", default=1, server=server) * parse_setting(info, "pp_size", default=1, server=server)


def parse_adapter_support(info: Mapping[str, Any], *, server: str) -> AdapterSupport:
    """Read the settings of LoRA in /server_info; a server that does not speak of it loads none."""
    if info.get("enable_lora") is not True or parse_setting(info, "dp_size", default=1, server=server) > 1:
        return AdapterSupport(0)  # SGLang loads adapters at run time on one data-parallel rank alone
    return AdapterSupport(parse_setting(info, "max_lora_rank", default=0, server=server))


def parse_load(reply: Any, *, server: str) -> ServerLoad:
    """Sum the loads of all data-parallel ranks of a server."""
    try:
        ranks = reply["loads"]
        return ServerLoad(
            num_running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            num_waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            num_used_tokens=sum(int(rank["num_used_tokens"]) for rank in ranks),
            max_tokens=sum(int(rank["max_total_num_tokens"]) for rank in ranks),
        )
    except _UNREADABLE as error:
        raise ServerError(f"{server} sent a load that cannot be read: {type(error).__name__}: {error}") from error


def parse_checksums(reply: Any, *, server: str) -> dict[str, str]:
    """Read {weight name: hex} of a server's first rank."""
    try:
        return {str(name): str(value) for name, value in reply["ranks"][0]["checksums"].items()}
    except _UNREADABLE as error:
        raise ServerError(f"{server} sent checksums that cannot be read: {type(error).__name__}: {error}") from error


def error_message(reply: Any) -> str | None:
    """Find the message in an error body; SGLang has several shapes of them."""
    if not isinstance(reply, Mapping):
        return None
    for value in (reply.get("error"), reply.get("message"), reply.get("error_message")):
        if isinstance(value, Mapping):
            value = value.get("message")
        if value:
            return str(value)
    return None


def _published(version: Any, server: str, unpublished: int | None) -> int:
    text = str(version)
    if not text.isdecimal():
        if unpublished is not None:
            return unpublished
        raise ServerError(f"{server} has no published weights (its weight version is {text!r}): publish a version to it first")
    return int(text)
