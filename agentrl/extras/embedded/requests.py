"""Parsing and validation of POST /generate bodies, before anything reaches the engine.

What SGLang refuses is refused with the same status (400) and a message. Two things are refused beyond that:
ids outside the vocabulary, which crash SGLang on a CPU, and fields that this server does not support, unless
their value means "off". As in SGLang, unknown keys at the top level are ignored and unknown sampling
parameters refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.image_layout import ImageTokens
from agentrl.extras.embedded.bodies import MAX_TEXT, BadRequest, flag_of, integer_of, number_of
from agentrl.extras.embedded.bounded_repr import shown
from agentrl.extras.embedded.given_images import GivenImage, read_images
from agentrl.extras.embedded.sampler import RowSampling

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default."""

DEFAULT_STREAM_INTERVAL = 1
"""Tokens between two events of a stream; SGLang's default."""

MAX_PROMPTS = 1024
"""Per body. Each prompt becomes an asyncio task and a job of the engine, which runs a few hundred at once."""

_GREEDY_BELOW = 1e-6
"""SGLang samples greedily below this temperature; dividing logits by less would overflow."""

_TOP_LEVEL_OFF: Mapping[str, tuple[Any, ...]] = {
    name: (None, False, 0, [], {})
    for name in (
        "text", "input_embeds", "video_data", "audio_data", "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs", "return_hidden_states", "return_sampling_mask",
        "return_entropy", "session_params", "custom_logit_processor",
    )
}  # fmt: skip
_NO_IMAGES: tuple[Any, ...] = (None, [], "")
_SAMPLING_OFF: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_new_tokens": (None, 0),
    "beam_width": (None, 0, 1),
    **dict.fromkeys(
        ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params"),
        (None,),
    ),
}
_SAMPLING_SUPPORTED = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "sampling_seed",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "stream_interval",
)
_SAMPLING_WITHOUT_EFFECT = ("spaces_between_special_tokens", "no_stop_trim")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for. `eos_ids` end every generation that does not ignore them.

    has_experts: whether the server can tell which experts computed a token. images: how images become tokens;
    None: the model does not see.
    """

    vocab_size: int
    context_tokens: int
    cache_tokens: int
    eos_ids: frozenset[int]
    has_experts: bool = False
    images: ImageTokens | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue. `adapter` names a LoRA adapter; None samples from the base weights.

    experts_from: return the experts of the tokens from this one on; None: of none.
    images: of the prompt; `input_ids` has all their placeholders.
    returns_prompt: return the tokens of the prompt, as they were read.
    """

    rid: str
    input_ids: list[int]
    max_new_tokens: int
    sampling: RowSampling
    stop_ids: frozenset[int]
    return_logprob: bool
    skip_special_tokens: bool
    adapter: str | None = None
    experts_from: int | None = None
    prompt_logprobs_from: int | None = None
    images: tuple[GivenImage, ...] = ()
    returns_prompt: bool = False


def parse_generate(body: Any, limits: RequestLimits) -> tuple[list[GenerateRequest], bool]:
    """Return the requests of one body, and whether it was a batch. A batch is answered by a list.

    Raises:
        BadRequest: any field of any request is invalid.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    for name, off in _TOP_LEVEL_OFF.items():
        if body.get(name) not in off:
            raise BadRequest(
                f"`{name}` is not supported by the embedded server; send input_ids and leave it out"
            )
    prompts = body.get("input_ids")
    if not isinstance(prompts, list) or not prompts:
        raise BadRequest("`input_ids` must be a list of token ids, or a list of such lists, and not empty")
    is_batch = isinstance(prompts[0], list)
    if is_batch and len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"`input_ids` has {len(prompts)} prompts; send at most {MAX_PROMPTS} in one request")
    if not is_batch:
        prompts = [prompts]
    rids = _per_prompt(body.get("rid"), len(prompts), name="rid", is_batch=is_batch)
    params = _per_prompt(body.get("sampling_params"), len(prompts), name="sampling_params", is_batch=is_batch)
    return_logprob = _per_prompt(
        body.get("return_logprob"), len(prompts), name="return_logprob", is_batch=is_batch
    )
    adapters = _per_prompt(body.get("lora_path"), len(prompts), name="lora_path", is_batch=is_batch)
    experts_from = _parse_experts(body, limits)
    logprobs_from = _parse_prompt_logprobs(body, limits)
    images: tuple[GivenImage, ...] = ()
    if body.get("image_data") not in _NO_IMAGES:
        if is_batch or experts_from is not None or logprobs_from is not None:
            raise BadRequest(
                "`image_data` is for one prompt on the embedded server, without experts and without "
                "log-probabilities of the prompt"
            )
        _check_prompt(prompts[0], limits)
        prompts[0], images = read_images(body, prompts[0], limits.images)
    returns_prompt = flag_of(body, "return_prompt_token_ids", False)
    requests = [
        _parse_one(*each, experts_from, logprobs_from, images, returns_prompt, limits)
        for each in zip(prompts, rids, params, return_logprob, adapters, strict=True)
    ]
    if len({request.rid for request in requests}) < len(requests):
        raise BadRequest("Duplicate request ID detected within the batch")
    return requests, is_batch


def parse_stream_interval(body: Mapping[str, Any]) -> int | None:
    """Return after how many tokens a valid body wants another event; None: it wants no stream.

    Raises:
        BadRequest: the body is a batch, or the interval is no positive number.
    """
    if not flag_of(body, "stream", False):
        return None
    if isinstance(body["input_ids"][0], list):
        raise BadRequest("`stream` is for one prompt; send the prompts of a batch one by one")
    interval = integer_of(body.get("sampling_params") or {}, "stream_interval", DEFAULT_STREAM_INTERVAL)
    if interval < 1:
        raise BadRequest(f"`stream_interval` must be at least 1, not {interval}")
    return interval


def _per_prompt(value: Any, count: int, *, name: str, is_batch: bool) -> Sequence[Any]:
    if not isinstance(value, list):
        if name == "rid" and value is not None and is_batch:
            raise BadRequest("`rid` of a batch must be a list with one id per prompt")
        return [value] * count
    if not is_batch or len(value) != count:
        raise BadRequest(f"`{name}` has {len(value)} entries for {count} prompt{'s' if count > 1 else ''}")
    return value


def _parse_experts(body: Mapping[str, Any], limits: RequestLimits) -> int | None:
    if not flag_of(body, "return_routed_experts", False):
        return None
    if not limits.has_experts:
        raise BadRequest("`return_routed_experts` needs a mixture of experts; this server's model is dense")
    return integer_of(body, "routed_experts_start_len", 0)


def _parse_prompt_logprobs(body: Mapping[str, Any], limits: RequestLimits) -> int | None:
    """Return the token of the prompt from which on its log-probabilities are wanted; None: they are not."""
    if body.get("logprob_start_len") in (None, -1):
        return None
    first = integer_of(body, "logprob_start_len", 0)
    if limits.has_experts:
        raise BadRequest(
            "`logprob_start_len` is not supported by the embedded server for mixtures of experts"
        )
    if flag_of(body, "stream", False) or body.get("lora_path") is not None:
        raise BadRequest("`logprob_start_len` takes neither `stream` nor `lora_path` on the embedded server")
    return first


def _parse_one(
    prompt: Any,
    rid: Any,
    params: Any,
    return_logprob: Any,
    adapter: Any,
    experts_from: int | None,
    logprobs_from: int | None,
    images: tuple[GivenImage, ...],
    returns_prompt: bool,
    limits: RequestLimits,
) -> GenerateRequest:
    if adapter is not None and not (isinstance(adapter, str) and len(adapter) <= MAX_TEXT):
        raise BadRequest(f"`lora_path` must be the name of a loaded adapter, not {shown(adapter)}")
    if rid is not None and not (isinstance(rid, str) and 0 < len(rid) <= MAX_TEXT):
        raise BadRequest(f"`rid` must be a string of 1 to {MAX_TEXT} characters, not {shown(rid)}")
    _check_prompt(prompt, limits)
    if experts_from is not None and experts_from > len(prompt):
        raise BadRequest(
            f"`routed_experts_start_len` is {experts_from}, beyond the {len(prompt)} tokens of the prompt"
        )
    params = {} if params is None else params
    _check_names(params)
    max_new_tokens = integer_of(params, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    _check_size(len(prompt), max_new_tokens, limits)
    if logprobs_from is not None and not (return_logprob and max_new_tokens == 0):
        raise BadRequest(
            "`logprob_start_len` needs `return_logprob` and `max_new_tokens` of 0 on the embedded server: it "
            "scores a prompt, or samples"
        )
    if logprobs_from is not None and logprobs_from >= len(prompt):
        raise BadRequest(
            f"`logprob_start_len` is {logprobs_from}, beyond the {len(prompt)} tokens of the prompt"
        )
    stop_ids = params.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
        raise BadRequest(f"`stop_token_ids` must be a list of token ids, not {shown(stop_ids)}")
    eos_ids = frozenset() if flag_of(params, "ignore_eos", False) else limits.eos_ids
    return GenerateRequest(
        rid=rid or uuid.uuid4().hex,
        input_ids=prompt,
        max_new_tokens=max_new_tokens,
        sampling=_parse_sampling(params),
        # Ids outside the vocabulary can never be sampled.
        stop_ids=frozenset(token for token in stop_ids if 0 <= token < limits.vocab_size) | eos_ids,
        return_logprob=bool(return_logprob),
        skip_special_tokens=flag_of(params, "skip_special_tokens", True),
        adapter=adapter or None,
        experts_from=experts_from,
        prompt_logprobs_from=logprobs_from,
        images=images,
        returns_prompt=returns_prompt,
    )


def _check_prompt(prompt: Any, limits: RequestLimits) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("`input_ids` must be a list of token ids, and not empty")
    for token in prompt:
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise BadRequest(
                f"`input_ids` has {shown(token)}, which is no id of the vocabulary of {limits.vocab_size} "
                "tokens"
            )


def _check_size(prompt_tokens: int, max_new_tokens: int, limits: RequestLimits) -> None:
    for limit, what in (
        (limits.context_tokens, "model's maximum context length"),
        (limits.cache_tokens, "server's whole KV cache"),
    ):
        if prompt_tokens + max_new_tokens > limit:
            raise BadRequest(
                f"Requested token count exceeds the {what} of {limit} tokens. "
                f"{prompt_tokens} of the prompt and {max_new_tokens} new ones were requested."
            )


def _check_names(params: Any) -> None:
    if not isinstance(params, Mapping):
        raise BadRequest(f"`sampling_params` must be an object, not {shown(params)}")
    for name, value in params.items():
        if name in _SAMPLING_SUPPORTED or name in _SAMPLING_WITHOUT_EFFECT:
            continue
        if name not in _SAMPLING_OFF:
            raise BadRequest(
                f"unknown field `{name[:MAX_TEXT]}`, expected one of {_quoted(_SAMPLING_SUPPORTED)}",
                is_flat=True,
            )
        if value not in _SAMPLING_OFF[name]:
            raise BadRequest(
                f"`{name}` is not supported by the embedded server, which has {_quoted(_SAMPLING_SUPPORTED)}",
                is_flat=True,
            )


def _parse_sampling(params: Mapping[str, Any]) -> RowSampling:
    temperature = number_of(params, "temperature", 1.0)
    top_p = number_of(params, "top_p", 1.0)
    min_p = number_of(params, "min_p", 0.0)
    top_k = integer_of(params, "top_k", -1, minimum=-1)
    if temperature < 0:
        raise BadRequest(f"temperature must be non-negative, got {temperature}")
    if not 0 < top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {top_p}")
    if not 0 <= min_p <= 1:
        raise BadRequest(f"min_p must be in [0, 1], got {min_p}")
    if top_k == 0:
        raise BadRequest("top_k must be -1 (off) or at least 1, got 0")
    seed = None if params.get("sampling_seed") is None else integer_of(params, "sampling_seed")
    return RowSampling(0.0 if temperature < _GREEDY_BELOW else temperature, top_p, top_k, min_p, seed)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
