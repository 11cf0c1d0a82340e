"""Types of SGLang's native protocol: builds request bodies, parses and validates replies.

A reply that contradicts itself (lengths, ids, version spans) is a ServerError: training on it would be silent
damage.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.data.image_layout import SETTINGS_FILE, collapse
from agentrl.errors import RequestRefused, ServerError
from agentrl.types import Generation, PlacedImage, SamplingParams, TensorSpec

PauseMode = Literal["abort", "retract", "in_place"]

_UNREADABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError)
"""What access to JSON of an unexpected shape raises."""
_MAX_INT32 = 2**31 - 1
_MAX_INT16 = 2**15 - 1

POLICY_ADAPTER = "policy"
"""The name of the policy's LoRA adapter on the servers, the same for every version."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a server serves. `version` is None until weights are published to it. `tokenizer_path`
    is None if the server does not name one: it is then in the model's folder.
    """

    model_path: str
    version: int | None
    tokenizer_path: str | None = None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests and KV-cache tokens of a server at one moment, summed over its data-parallel ranks."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """A server's state, to judge whether it makes progress: while it works, `load` keeps changing."""

    is_paused: bool
    load: ServerLoad


IMAGE_POSITIONS = "image_positions"
"""Field of /generate for the embedded server: where the placeholders of images are in `input_ids`. Other
tokens with the same id were sampled. SGLang ignores it."""
READS_POSITIONS = "reads_image_positions"
"""Field of /server_info: the server knows IMAGE_POSITIONS."""


def adapter_tensor(adapter: str, name: str) -> str:
    """Return the name of an adapter's tensor in `/weights_checker` of the embedded server."""
    return f"{adapter}/{name}"


def generate_body(
    input_ids: Sequence[int],
    params: SamplingParams,
    *,
    rid: str,
    adapter: str | None = None,
    stream_interval: int | None = None,
) -> dict[str, Any]:
    """Return the body of POST /generate: token ids in, token ids and log-probabilities out.

    adapter: name of a loaded LoRA adapter, None: the base weights.
    stream_interval: stream the reply, with an event after this many tokens; None: reply once.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": _without_copy(input_ids),
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
        "stream": stream_interval is not None,
    }
    if stream_interval is not None:
        body["sampling_params"]["stream_interval"] = stream_interval
    if params.experts_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": params.experts_from}
    if params.ignore_eos:
        body["sampling_params"]["ignore_eos"] = True
    if adapter is not None:
        body["lora_path"] = adapter  # SGLang's field for the name of a loaded adapter
    return body


def images_body(
    input_ids: Sequence[int], images: Sequence[PlacedImage], *, encoded: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of POST /generate for a prompt with images, in place of those of `generate_body`.

    SGLang expands one placeholder per image itself. The reply then shows which tokens it read.

    Args:
        encoded: the images as they are sent, in base64.
    """
    collapsed, starts = collapse(input_ids, images)
    return {
        "input_ids": collapsed,
        "image_data": list(encoded),
        IMAGE_POSITIONS: starts,
        "return_prompt_token_ids": True,
    }


def has_other_placeholders(input_ids: Sequence[int], images: Sequence[PlacedImage]) -> bool:
    """Return whether a prompt with images has placeholders that stand for none, because they were sampled."""
    placeholder = input_ids[images[0].position]
    return sum(token == placeholder for token in input_ids) > sum(image.num_tokens for image in images)


def check_read_ids(reply: Any, input_ids: Sequence[int], *, server: str) -> None:
    """Check that a server read the tokens that it was sent: it expands the placeholders of images itself.

    Raises:
        RequestRefused: it read others, or does not say which.
    """
    found = reply.get("prompt_token_ids") if isinstance(reply, Mapping) else None
    if found != [int(token) for token in input_ids]:
        what = "does not say which tokens it read" if found is None else "read other tokens than it was sent"
        raise RequestRefused(
            f"{server} {what}, for a prompt with images; start SGLang with the environment variable "
            "SGLANG_MM_AVOID_RETOKENIZE=1, and with the settings of the image processor that this run has "
            f"({SETTINGS_FILE})"
        )


def prompt_body(input_ids: Sequence[int], *, first: int, rid: str) -> dict[str, Any]:
    """Return the body of POST /generate that scores the tokens of a prompt from `first` (at least 1) on."""
    assert first >= 1, "nothing predicts the first token"
    return {
        "rid": rid,
        "input_ids": _without_copy(input_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The first token that is returned has no log-probability.
        "logprob_start_len": first - 1,
        "stream": False,
    }


def parse_prompt_logprobs(reply: Any, ids: Sequence[int], *, server: str) -> NDArray[np.float32]:
    """Parse the log-probabilities of the last len(ids) tokens of a prompt, f32[len(ids)].

    Raises:
        ServerError: they are missing, of other tokens, or not finite.
    """
    try:
        meta = reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        triples = (meta.get("input_token_logprobs") or [])[-len(ids) :]
        found_ids = [int(triple[1]) for triple in triples]
        values = [math.nan if triple[0] is None else float(triple[0]) for triple in triples]
    except _UNREADABLE as error:
        raise ServerError(
            f"{server} sent a scored prompt that cannot be read: {type(error).__name__}: {error}"
        ) from error
    if reason == "abort":
        raise ServerError(f"{server} interrupted the scoring of a prompt; nobody may pause it")
    if found_ids != [int(token) for token in ids]:
        raise ServerError(f"{server} sent log-probabilities of other tokens than those of the prompt")
    if not all(math.isfinite(value) and value <= 1e-3 for value in values):
        raise ServerError(
            f"{server} sent a log-probability of a prompt that is not a finite number below zero"
        )
    return np.array(values, np.float32)


def _without_copy(input_ids: Sequence[int]) -> Any:
    """Return the ids as the HTTP client can write them: a turn of a long session repeats up to 128k."""
    if isinstance(input_ids, np.ndarray):
        return np.ascontiguousarray(input_ids)
    return input_ids if isinstance(input_ids, (list, tuple)) else list(input_ids)


def bucket_body(
    specs: Sequence[TensorSpec], *, group: str, version: int | None, flush_cache: bool
) -> dict[str, Any]:
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
    reply: Any,
    *,
    server: str,
    max_tokens: int | None = None,
    num_ids: int | None = None,
    unpublished: int | None = None,
    num_context: int | None = None,
) -> Generation:
    """Parse a reply of /generate into aligned arrays.

    Args:
        max_tokens: the number requested; a longer reply is an error. None: not checked.
        num_ids: size of the model's vocabulary; larger ids are an error. None: not checked.
        unpublished: version to report for weights that were never published. None: they are an error.
        num_context: tokens of the prompt from `SamplingParams.experts_from` on. None: experts were not asked
            for.

    Raises:
        ServerError: fields are missing or contradict each other, there are too many tokens, an id is out of
            range, or the weights were never published and `unpublished` is None.
    """
    try:
        meta = reply["meta_info"]
        ids = [int(token) for token in reply["output_ids"]]
        reason = meta["finish_reason"]["type"]
        triples = meta.get("output_token_logprobs") or []
        logprobs = [float(triple[0]) for triple in triples]
        logprob_ids = [int(triple[1]) for triple in triples]
        versions = parse_versions(
            meta.get("weight_versions") or [], num_tokens=len(ids), server=server, unpublished=unpublished
        )
        experts = None
        if num_context is not None:
            num_tokens = max(num_context + len(ids) - 1, 0)
            experts = _parse_experts(meta, num_tokens=num_tokens, is_whole=reason != "abort", server=server)
        cached, retractions = int(meta.get("cached_tokens") or 0), int(meta.get("num_retractions") or 0)
    except _UNREADABLE as error:
        raise ServerError(
            f"{server} sent a generation that cannot be read: {type(error).__name__}: {error}"
        ) from error
    if reason not in ("stop", "length", "abort"):
        raise ServerError(f"{server} sent the unknown finish reason {reason!r}; known: stop, length, abort")
    if not ids and reason != "abort":
        raise ServerError(f"{server} sent a generation that is finished ({reason}) without a token")
    if max_tokens is not None and len(ids) > max_tokens:
        raise ServerError(f"{server} sent {len(ids)} tokens, but {max_tokens} were requested")
    # Training would index the embedding with such an id, and crash.
    if ids and not (min(ids) >= 0 and max(ids) < (num_ids or _MAX_INT32)):
        raise ServerError(f"{server} sent a token id outside of 0..{(num_ids or _MAX_INT32) - 1}")
    if logprob_ids != ids:
        raise ServerError(
            f"{server} sent {len(ids)} output ids, but log-probabilities of {len(logprob_ids)} (or other) "
            "tokens"
        )
    if not all(math.isfinite(value) and value <= 1e-3 for value in logprobs):
        raise ServerError(f"{server} sent a log-probability that is not a finite number below zero")
    return Generation(
        np.array(ids, np.int32),
        np.array(logprobs, np.float32),
        versions,
        reason,
        num_cached_tokens=cached,
        num_retractions=retractions,
        experts=experts,
    )


def _parse_experts(
    meta: Mapping[str, Any], *, num_tokens: int, is_whole: bool, server: str
) -> NDArray[np.int16] | None:
    """Return the experts of `num_tokens` tokens, i16[num_tokens, W]; None if there are none, and the
    generation was aborted (not `is_whole`).

    Raises:
        ServerError: they are missing, or of another number of tokens.
    """
    text = meta.get("routed_experts")
    if text is None:
        if num_tokens and is_whole:
            raise ServerError(
                f"{server} does not record which experts computed a token, as rollout.replay_experts needs; "
                "start SGLang with --enable-return-routed-experts, and serve a mixture of experts"
            )
        return None
    experts = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    if not num_tokens or len(experts) % num_tokens or not len(experts):
        if not is_whole or not (num_tokens or len(experts)):
            return None
        raise ServerError(f"{server} sent {len(experts)} experts for {num_tokens} tokens")
    if experts.min() < 0 or experts.max() > _MAX_INT16:
        raise ServerError(f"{server} sent an expert outside of 0..{_MAX_INT16}")
    return experts.astype(np.int16).reshape(num_tokens, -1)


def parse_versions(
    spans: Sequence[Mapping[str, Any]], *, num_tokens: int, server: str, unpublished: int | None = None
) -> NDArray[np.int32]:
    """Convert spans [{version, start, end}] over the output to one version per token, i32[num_tokens].

    Raises:
        ServerError: the spans do not cover the tokens in order, or a version is not an integer (the weights
            were never published) and `unpublished` is None.
    """
    versions = np.empty(num_tokens, np.int32)
    position = 0
    for span in spans:
        start, end = int(span["start"]), int(span["end"])
        if start != position or end < start:
            raise ServerError(
                f"{server} sent version spans that do not cover its {num_tokens} tokens: {list(spans)}"
            )
        if end > start:
            versions[start:end] = _published(span["version"], server, unpublished)
        position = end
    if position != num_tokens:
        raise ServerError(
            f"{server} sent version spans that do not cover its {num_tokens} tokens: {list(spans)}"
        )
    return versions


def parse_model_info(reply: Any, *, server: str) -> ModelInfo:
    try:
        version = str(reply["weight_version"])
        tokenizer = reply.get("tokenizer_path")
        return ModelInfo(
            str(reply["model_path"]),
            int(version) if version.isdecimal() else None,
            str(tokenizer) if tokenizer else None,
        )
    except _UNREADABLE as error:
        raise ServerError(
            f"{server} sent a model info that cannot be read: {type(error).__name__}: {error}"
        ) from error


def parse_server_info(reply: Any, *, server: str) -> Mapping[str, Any]:
    """Return the settings of /server_info by name; raise ServerError if it is not a JSON object."""
    if not isinstance(reply, Mapping):
        raise ServerError(
            f"{server} sent a server info that must be a JSON object but is {type(reply).__name__}"
        )
    return reply


def parse_setting(info: Mapping[str, Any], name: str, *, default: int, server: str) -> int:
    """Return an integer of /server_info; `default` if it is missing, null or 0."""
    try:
        return int(info.get(name) or default)
    except _UNREADABLE as error:
        raise ServerError(
            f"{server} sent a server info whose {name} is not a whole number: {type(error).__name__}: {error}"
        ) from error


def parse_num_ranks(info: Mapping[str, Any], *, server: str) -> int:
    """Return the number of ranks that a server adds to a weights group: tensor-parallel times
    pipeline-parallel.

    Raises:
        ServerError: the server has several data-parallel copies of the model; SGLang lets only one of them
            join.
    """
    num_copies = parse_setting(info, "dp_size", default=1, server=server)
    if num_copies > 1 and info.get("enable_dp_attention") is not True:
        raise ServerError(
            f"{server} has dp_size={num_copies}, but with SGLang only one copy of a model can "
            "join a weights group; start a server for each copy, or use "
            "rollout.weights.transport=disk"
        )
    return parse_setting(info, "tp_size", default=1, server=server) * parse_setting(
        info, "pp_size", default=1, server=server
    )


def parse_max_adapter_rank(info: Mapping[str, Any], *, server: str) -> int:
    """Return the largest rank of LoRA adapters that a server can load, by /server_info; 0: none."""
    if info.get("enable_lora") is not True or parse_setting(info, "dp_size", default=1, server=server) > 1:
        # With several data-parallel ranks, SGLang loads adapters on only one of them.
        return 0
    return parse_setting(info, "max_lora_rank", default=0, server=server)


def parse_records_experts(info: Mapping[str, Any]) -> bool:
    """Return whether a server can say which experts computed a token, by /server_info."""
    return info.get("enable_return_routed_experts") is True


def parse_load(reply: Any, *, server: str) -> ServerLoad:
    """Sum the loads of a server's data-parallel ranks."""
    try:
        ranks = reply["loads"]
        return ServerLoad(
            num_running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            num_waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            num_used_tokens=sum(int(rank["num_used_tokens"]) for rank in ranks),
            max_tokens=sum(int(rank["max_total_num_tokens"]) for rank in ranks),
        )
    except _UNREADABLE as error:
        raise ServerError(
            f"{server} sent a load that cannot be read: {type(error).__name__}: {error}"
        ) from error


def parse_checksums(reply: Any, *, server: str) -> dict[str, str]:
    """Return {weight name: hex} of a server's first rank."""
    try:
        return {str(name): str(value) for name, value in reply["ranks"][0]["checksums"].items()}
    except _UNREADABLE as error:
        raise ServerError(
            f"{server} sent checksums that cannot be read: {type(error).__name__}: {error}"
        ) from error


def error_message(reply: Any) -> str | None:
    """Return the message of an error body, which has several shapes in SGLang; None if there is none."""
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
        raise ServerError(
            f"{server} has no published weights (its weight version is {text!r}): publish a version to it "
            "first"
        )
    return int(text)
