"""Bodies of POST /generate, read and checked before anything reaches the engine.

What SGLang refuses is refused with its status (400) and a message. Beyond SGLang: an id outside the vocabulary, which kills a CPU
SGLang, is refused; and so is every field this server does not support, unless it carries the value that means "off".
Unknown keys at the top level are ignored, as SGLang does; unknown sampling parameters are refused, as SGLang does.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.serving.embedded.sampler import RowSampling

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's, for requests that say nothing."""

_GREEDY_BELOW = 1e-6
"""SGLang samples greedily below this temperature; dividing logits by less would overflow."""

_TOP_LEVEL_OFF: Mapping[str, tuple[Any, ...]] = {
    name: (None, False, 0, [], {})
    for name in (
        "text", "input_embeds", "image_data", "video_data", "audio_data", "stream", "top_logprobs_num", "token_ids_logprob",
        "return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "return_sampling_mask", "return_entropy",
        "return_prompt_token_ids", "session_params", "custom_logit_processor",
    )
}  # fmt: skip
_SAMPLING_OFF: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_new_tokens": (None, 0),
    "beam_width": (None, 0, 1),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "sampling_seed", "custom_params"), (None,)),
}
_SAMPLING_SUPPORTED = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "skip_special_tokens")
_SAMPLING_WITHOUT_EFFECT = ("spaces_between_special_tokens", "no_stop_trim", "stream_interval")


class BadRequest(Exception):
    """The request is wrong: answered 400 with the message. `is_flat` chooses SGLang's shape for unknown sampling parameters."""

    def __init__(self, message: str, *, is_flat: bool = False) -> None:
        super().__init__(message)
        self.is_flat = is_flat


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit into, in tokens; `eos_ids` end every generation that does not ignore them."""

    vocab_size: int
    context_tokens: int
    cache_tokens: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue, with the LoRA adapter of that name, or by the base weights alone."""

    rid: str
    input_ids: list[int]
    max_new_tokens: int
    sampling: RowSampling
    stop_ids: frozenset[int]
    return_logprob: bool
    skip_special_tokens: bool
    adapter: str | None = None


def parse_generate(body: Any, limits: Limits) -> tuple[list[GenerateRequest], bool]:
    """Return the requests of one body, and whether it was a batch (answered by a list).

    Raises:
        BadRequest: anything is wrong with any of them.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    for name, off in _TOP_LEVEL_OFF.items():
        if body.get(name) not in off:
            raise BadRequest(f"`{name}` is not supported by the embedded server; send input_ids and leave it out")
    if body.get("logprob_start_len") not in (None, -1):
        raise BadRequest("`logprob_start_len` is not supported by the embedded server: it has no log-probabilities of the prompt")
    prompts = body.get("input_ids")
    if not isinstance(prompts, list) or not prompts:
        raise BadRequest("`input_ids` must be a list of token ids, or a list of such lists, and not empty")
    is_batch = isinstance(prompts[0], list)
    if not is_batch:
        prompts = [prompts]
    rids = _per_prompt(body.get("rid"), len(prompts), name="rid", is_batch=is_batch)
    params = _per_prompt(body.get("sampling_params"), len(prompts), name="sampling_params", is_batch=is_batch)
    return_logprob = _per_prompt(body.get("return_logprob"), len(prompts), name="return_logprob", is_batch=is_batch)
    adapters = _per_prompt(body.get("lora_path"), len(prompts), name="lora_path", is_batch=is_batch)
    requests = [_parse_one(*each, limits) for each in zip(prompts, rids, params, return_logprob, adapters, strict=True)]
    if len({request.rid for request in requests}) < len(requests):
        raise BadRequest("Duplicate request ID detected within the batch")
    return requests, is_batch


def _per_prompt(value: Any, count: int, *, name: str, is_batch: bool) -> Sequence[Any]:
    if not isinstance(value, list):
        if name == "rid" and value is not None and is_batch:
            raise BadRequest("`rid` of a batch must be a list with one id per prompt")
        return [value] * count
    if not is_batch or len(value) != count:
        raise BadRequest(f"`{name}` has {len(value)} entries for {count} prompt{'s' if count > 1 else ''}")
    return value


def _parse_one(prompt: Any, rid: Any, params: Any, return_logprob: Any, adapter: Any, limits: Limits) -> GenerateRequest:
    if adapter is not None and not isinstance(adapter, str):
        raise BadRequest(f"`lora_path` must be the name of a loaded adapter, not {adapter!r}")
    if rid is not None and not (isinstance(rid, str) and rid):
        raise BadRequest(f"`rid` must be a string that is not empty, not {rid!r}")
    _check_prompt(prompt, limits)
    params = {} if params is None else params
    _check_names(params)
    max_new_tokens = _integer(params, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS, minimum=0)
    _check_size(len(prompt), max_new_tokens, limits)
    stop_ids = params.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
        raise BadRequest(f"`stop_token_ids` must be a list of token ids, not {stop_ids!r}")
    eos_ids = frozenset() if _flag(params, "ignore_eos", False) else limits.eos_ids
    return GenerateRequest(
        rid=rid or uuid.uuid4().hex,
        input_ids=prompt,
        max_new_tokens=max_new_tokens,
        sampling=_parse_sampling(params),
        stop_ids=frozenset(token for token in stop_ids if token >= 0) | eos_ids,
        return_logprob=bool(return_logprob),
        skip_special_tokens=_flag(params, "skip_special_tokens", True),
        adapter=adapter or None,
    )


def _check_prompt(prompt: Any, limits: Limits) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("`input_ids` must be a list of token ids, and not empty")
    for token in prompt:
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise BadRequest(f"`input_ids` has {token!r}, which is no id of the vocabulary of {limits.vocab_size} tokens")


def _check_size(prompt_tokens: int, max_new_tokens: int, limits: Limits) -> None:
    for limit, what in ((limits.context_tokens, "model's maximum context length"), (limits.cache_tokens, "server's whole KV cache")):
        if prompt_tokens + max_new_tokens > limit:
            raise BadRequest(
                f"Requested token count exceeds the {what} of {limit} tokens. "
                f"{prompt_tokens} of the prompt and {max_new_tokens} new ones were requested."
            )


def _check_names(params: Any) -> None:
    if not isinstance(params, Mapping):
        raise BadRequest(f"`sampling_params` must be an object, not {params!r}")
    for name, value in params.items():
        if name in _SAMPLING_SUPPORTED or name in _SAMPLING_WITHOUT_EFFECT:
            continue
        if name not in _SAMPLING_OFF:
            raise BadRequest(f"unknown field `{name}`, expected one of {_quoted(_SAMPLING_SUPPORTED)}", is_flat=True)
        if value not in _SAMPLING_OFF[name]:
            raise BadRequest(f"`{name}` is not supported by the embedded server, which has {_quoted(_SAMPLING_SUPPORTED)}", is_flat=True)


def _parse_sampling(params: Mapping[str, Any]) -> RowSampling:
    temperature = _number(params, "temperature", 1.0)
    top_p = _number(params, "top_p", 1.0)
    min_p = _number(params, "min_p", 0.0)
    top_k = _integer(params, "top_k", -1, minimum=-1)
    if temperature < 0:
        raise BadRequest(f"temperature must be non-negative, got {temperature}")
    if not 0 < top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {top_p}")
    if not 0 <= min_p <= 1:
        raise BadRequest(f"min_p must be in [0, 1], got {min_p}")
    if top_k == 0:
        raise BadRequest("top_k must be -1 (off) or at least 1, got 0")
    return RowSampling(0.0 if temperature < _GREEDY_BELOW else temperature, top_p, top_k, min_p)


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a number, got {value!r}")
    return float(value)


def _integer(params: Mapping[str, Any], name: str, default: int, *, minimum: int) -> int:
    value = params.get(name)
    if value is None:
        return default
    if type(value) is not int or value < minimum:
        raise BadRequest(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return value


def _flag(params: Mapping[str, Any], name: str, default: bool) -> bool:
    value = params.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise BadRequest(f"{name} must be true or false, got {value!r}")
    return value


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
