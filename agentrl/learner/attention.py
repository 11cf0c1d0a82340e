"""Attention over packed sequences: each segment sees itself alone, or itself behind one other, the prompt that it shares.

On a CPU one call of SDPA per segment is exact and costs the sum of squares of the lengths, where a dense block mask costs the
square of their sum. On a GPU flash attention (varlen) or FlexAttention do the same in one kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from agentrl.errors import ConfigError
from agentrl.learner.sequence_parallel import heads_to_tokens, tokens_to_heads

if TYPE_CHECKING:  # seconds to import, and the controller names what ranks do without doing it
    from transformers import PreTrainedModel

SEGMENT_SDPA = "segment_sdpa"
_FLASH = "flash_attention_2"


class Segments:
    """Where the segments of a packed row lie: their lengths, which sum to the row, and the segment that each one continues (-1: none).

    An object of its own rather than tensors, tuples or a frozen dataclass: a compiled layer hands it on unread, so that no graph is
    bound to the number of segments or to there being prefixes, and FSDP leaves it on the CPU, where it is read.
    """

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int] | None = None) -> None:
        self.lengths = list(lengths)
        self.prefixes = None if prefixes is None else list(prefixes)


def choose_attention(requested: str, *, device: str, dtype: str, shares_rows: bool = False, shares_prefixes: bool = False) -> str:
    """Resolve `model.attention` for a device type (`cpu`, `cuda`) and the dtype computed in (`float32`, ...); `shares_rows`: with
    sequence parallelism; `shares_prefixes`: with prompts that several segments continue.

    Raises:
        ConfigError: flash attention is asked for, and it is not installed, or knows no such device or dtype.
    """
    if shares_prefixes or shares_rows:
        return SEGMENT_SDPA
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if requested == _FLASH:
        _check_flash(device, dtype, is_installed=has_flash)
    if requested != "auto":
        return requested
    if device == "cpu":
        return SEGMENT_SDPA
    return _FLASH if has_flash and dtype != "float32" else "flex_attention"


def register_attention() -> None:
    """Let transformers know `segment_sdpa`; before a model is made."""
    from transformers import AttentionInterface

    # Not compiled: its shapes are those of each segment, which would be a graph of its own for every packing.
    AttentionInterface.register(SEGMENT_SDPA, torch.compiler.disable(segment_sdpa))


def _check_flash(device: str, dtype: str, *, is_installed: bool) -> None:
    if not is_installed:
        raise ConfigError("model.attention=flash_attention_2 needs the package flash-attn; install it or use model.attention=auto")
    if device == "cpu":
        raise ConfigError("model.attention=flash_attention_2 runs on GPUs, and the ranks compute on CPUs; use model.attention=auto")
    if dtype == "float32":
        raise ConfigError(
            "model.attention=flash_attention_2 computes in bfloat16 or float16, and model.dtype=float32; use model.dtype=bfloat16, "
            "or model.attention=auto"
        )


def packed_arguments(
    attention: str,
    segment_lengths: Sequence[int],
    *,
    device: torch.device,
    sequence_group: ProcessGroup | None = None,
    prefix_segments: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward that tell its attention where sequences start.

    FlexAttention and dense SDPA need none: transformers reads the restarts of the position ids. `sequence_group`: the ranks that share
    the row, each with a part of it in its forward; None: the row is whole. `prefix_segments`: see `Microbatch`; none: no segment has one.
    """
    has_prefixes = any(segment >= 0 for segment in prefix_segments)
    if attention == SEGMENT_SDPA:
        return {"segments": Segments(segment_lengths, prefix_segments if has_prefixes else None), "sequence_group": sequence_group}
    assert sequence_group is None, f"{attention} computes whole rows"
    assert not has_prefixes, f"{attention} knows no segment that continues another"
    if attention == _FLASH:
        starts = torch.tensor([0, *segment_lengths], device=device).cumsum(0, dtype=torch.int32)
        longest = max(segment_lengths)
        return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return {}


def attention_parity(module: PreTrainedModel) -> float:
    """Return the length, in tokens, at which the attention of a segment costs as much as all matrices of the model.

    n tokens take 2 n P operations in P parameters, and 2 n^2 L W in the causal attention of L layers with heads of W columns together.
    """
    config = module.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return module.num_parameters() / (config.num_hidden_layers * width)


def segment_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    sequence_group: ProcessGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each segment of one packed row; the signature is transformers' attention interface.

    Args:
        query: f[1, H, T, D]; key, value: f[1, K, T, D] with H a multiple of K.
        segments: of the row; the keys and values of the segment that one continues stand before its own.
        sequence_group: N ranks that share the row: query, key, value and the result hold T/N tokens of it.

    Returns:
        f[1, T, H, D], and no attention weights.
    """
    assert segments is not None, f"{type(module).__name__} does not pass segments on to its attention"
    if sequence_group is not None:
        query, key, value = tokens_to_heads((query, key, value), sequence_group)
    queries, keys, values = (t.split(segments.lengths, dim=2) for t in (query, key, value))
    if segments.prefixes is not None:
        keys, values = (_behind_prefixes(t, segments.prefixes) for t in (keys, values))
    outputs = [
        scaled_dot_product_attention(q, k, v, **_causal(q, k, sliding_window), dropout_p=dropout, scale=scaling, enable_gqa=True)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    attended = torch.cat(outputs, dim=2)
    if sequence_group is not None:
        attended = heads_to_tokens(attended, sequence_group)
    return attended.transpose(1, 2), None


def _behind_prefixes(segments: Sequence[Tensor], prefix_segments: Sequence[int]) -> list[Tensor]:
    return [own if prefix < 0 else torch.cat([segments[prefix], own], dim=2) for own, prefix in zip(segments, prefix_segments, strict=True)]


def _causal(query: Tensor, key: Tensor, sliding_window: int | None) -> dict[str, Any]:
    """Return how SDPA is told that each query, of the last ones of the keys, sees what stands before it."""
    length, num_keys = query.shape[2], key.shape[2]
    window = num_keys if sliding_window is None else sliding_window
    if length == num_keys <= window:
        return {"is_causal": True}
    ends = torch.arange(num_keys - length, num_keys, device=query.device)
    distance = ends[:, None] - torch.arange(num_keys, device=query.device)[None, :]
    return {"attn_mask": (distance >= 0) & (distance < window)}
