"""Check by two small forwards that a model computes each packed segment as transformers computes it alone.

Only attention knows where a segment begins. The state of a recurrence or the window of a convolution runs
over into the next segment, and an encoder's attention is not causal. No list of architectures can be
complete, so the check runs the model itself.

The model has its full size, but no weights: all parameters are views of the same few numbers, and products
with matrices are those with a matrix of low rank.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.attention import SEGMENT_SDPA, packed_arguments, register_attention
from agentrl.learner.loading import build_on_meta
from agentrl.learner.scoring import ScoreRequest, answer_scores

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PretrainedConfig, PreTrainedModel

_FIRST, _SECOND = 5, 6
"""Tokens of the two segments."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
_WINDOW = 3
"""Of attention to near tokens only. It is less than a segment, so that it makes a difference."""
_SMALL = 2**16
"""Numbers of a weight that has memory of its own, as code that gives it another shape needs."""
_RANK = 4
_TOLERANCE = 1e-4
"""Of log-probabilities. Rounding alone differs by 2e-6."""


def check_segments(config: PretrainedConfig, model: ModelConfig) -> None:
    """Raise if the learner computes packed segments of the model otherwise than transformers each alone.

    config: of a model that sees no images.

    Raises:
        ConfigError: it does, or the model does not run with the learner's attention.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # the seed is that of the model's own new weights
            problem = _difference(*_logprobs(_with_near_windows(config), model))
    except Exception as error:  # boundary: a model's own code raises anything
        reason = " ".join(str(error).split())[:200]
        raise _refusal(config, model, f"it does not run with the learner's attention ({reason})") from error
    if problem is not None:
        raise _refusal(config, model, problem)


def _refusal(config: PretrainedConfig, model: ModelConfig, problem: str) -> ConfigError:
    kind = (config.architectures or [config.model_type])[0]
    return ConfigError(
        f"model.path={model.path!r} ({kind}) cannot be trained: {problem}; use a model in which only causal "
        "attention mixes tokens, such as Qwen3 or Llama"
    )


@torch.no_grad()
def _logprobs(config: PretrainedConfig, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the tokens of the second of two packed segments, and transformers' own
    of this segment alone.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    module = build_on_meta(AutoModelForCausalLM, config, model, attention=SEGMENT_SDPA, dtype=torch.float32)
    module.eval()
    _check_causal(module)
    module.set_experts_implementation("eager")
    _give_values(module)
    answer_scores(module, chunk_tokens=None)
    tokens = torch.arange(_SECOND)
    with _LowRank():
        packed = _packed(module, tokens)
        module.set_attn_implementation("eager")
        logits = module(input_ids=tokens[None], use_cache=False).logits[0]
    return packed, logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]


def _check_causal(module: nn.Module) -> None:
    for child in module.modules():
        if getattr(child, "is_causal", True) is False:
            raise ValueError(f"{type(child).__name__} is not causal")


def _difference(packed: Tensor, expected: Tensor) -> str | None:
    """Return what is wrong with the log-probabilities of a packed segment; None if they are as expected."""
    if not expected.isfinite().all():
        return "its output is not finite"
    if packed.isnan().any():
        return "its layers carry state over from one packed row into the next"
    if (packed - expected).abs().max() > _TOLERANCE:
        return "its attention is not what the learner computes"
    return None


def _with_near_windows(config: PretrainedConfig) -> PretrainedConfig:
    changed = copy.deepcopy(config)
    for name in _WINDOWS:
        if isinstance(getattr(changed, name, None), int):
            setattr(changed, name, _WINDOW)
    return changed


def _packed(module: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the learner's log-probabilities of `tokens`, packed as the second segment. They are NaN where
    they depend on the first one.
    """

    def spoil(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
        is_first = torch.arange(_FIRST + _SECOND) < _FIRST
        return embedded.masked_fill(is_first[:, None], torch.nan)

    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    request = ScoreRequest(_FIRST + torch.arange(_SECOND - 1), tokens[1:], 1.0)
    arguments = packed_arguments(SEGMENT_SDPA, [_FIRST, _SECOND], device=tokens.device)
    hook = module.get_input_embeddings().register_forward_hook(spoil)
    try:
        logprobs, _ = module(
            score=request, input_ids=positions, position_ids=positions, use_cache=False, **arguments
        )
    finally:
        hook.remove()
    found: Tensor = logprobs
    return found


def _give_values(module: nn.Module) -> None:
    """Replace the parameters by views that take no memory."""
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    values = torch.randn(max(map(sum, shapes)), generator=torch.Generator().manual_seed(0))
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                view = values.as_strided(parameter.shape, (1,) * parameter.ndim)
                own = view.contiguous() if view.numel() <= _SMALL else view
                child._parameters[name] = nn.Parameter(own, requires_grad=False)


class _LowRank(TorchFunctionMode):
    """Multiplies with a matrix of low rank in place of the weight of each linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(1)
        self._factors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            self._product(*args, **kwargs or {}) if func is functional.linear else func(*args, **kwargs or {})
        )

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        num_out, num_in = weight.shape
        product = input @ self._of(num_in).T @ self._of(num_out) / (num_in * _RANK) ** 0.5
        return product if bias is None else product + bias

    def _of(self, size: int) -> Tensor:
        if size not in self._factors:
            self._factors[size] = torch.randn(_RANK, size, generator=self._generator)
        return self._factors[size]
