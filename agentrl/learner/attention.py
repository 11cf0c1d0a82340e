"""Attention over packed sequences: each segment attends to itself and to those that it continues, if any.

On a CPU, one SDPA call per segment is exact and costs the sum of the squared lengths; a dense block mask
would cost the square of their sum. On a GPU, one kernel computes all segments: FlashAttention (varlen), which
is a part of torch, or FlexAttention.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from agentrl.errors import ConfigError
from agentrl.learner.sequence_parallel import heads_to_tokens, tokens_to_heads

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel

SEGMENT_SDPA = "segment_sdpa"
_FLASH = "flash_attention_2"

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_HEAD = (8, 256)
"""Multiple and maximum of the width of a head in FlashAttention."""
_VARLEN_CAPABILITY = (8, 0)
"""The first GPUs with FlashAttention: Ampere."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Where S segments begin and end on a device, as FlashAttention reads it.

    queries, keys: i32[S + 1], running sums of their numbers. longest_query, longest_key: of one segment.
    places: i64[K], the token of each key; None: keys and tokens are the same.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    places: Tensor | None


class Segments:
    """The segments of a microbatch: their lengths, and the segment that each one continues (-1: none).

    The lengths sum to the microbatch's tokens. This is a class of its own, not tensors, tuples or a frozen
    dataclass, for two reasons. A compiled layer passes it through without specializing its graph on the
    number of segments or on the presence of prefixes. FSDP does not move it to the GPU, and it is read on the
    CPU.
    """

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int] | None = None) -> None:
        self.lengths = list(lengths)
        self.prefixes = None if prefixes is None else list(prefixes)
        self._bounds: Bounds | None = None

    def bounds(self, device: torch.device) -> Bounds:
        """Return the segments' bounds on a device. They are computed once, not in each layer."""
        if self._bounds is None or self._bounds.queries.device != device:
            self._bounds = self._on(device)
        return self._bounds

    def _on(self, device: torch.device) -> Bounds:
        starts = [0, *accumulate(self.lengths)]
        queries = torch.tensor(starts, dtype=torch.int32, device=device)
        longest = max(self.lengths)
        if self.prefixes is None:
            return Bounds(queries, queries, longest, longest, None)
        keys = _behind_prefixes(torch.arange(starts[-1]).split(self.lengths), self.prefixes, dim=0)
        return Bounds(
            queries,
            torch.tensor([0, *accumulate(map(len, keys))], dtype=torch.int32, device=device),
            longest,
            max(map(len, keys)),
            torch.cat(keys).to(device),
        )


def choose_attention(
    requested: str,
    *,
    device: str,
    dtype: str,
    shares_microbatches: bool = False,
    shares_prefixes: bool = False,
) -> str:
    """Resolve `model.attention` for a device type (`cpu`, `cuda`) and a compute dtype (`float32`, ...).

    shares_microbatches: True with sequence parallelism.
    shares_prefixes: True if segments always may continue others.

    Raises:
        ConfigError: flash attention is requested but not installed, or does not support the device or dtype.
    """
    if shares_prefixes or shares_microbatches:
        return SEGMENT_SDPA
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if requested == _FLASH:
        _check_flash(device, dtype, is_installed=has_flash)
    if requested != "auto":
        return requested
    if device == "cpu":
        return SEGMENT_SDPA
    if dtype == "float32":
        return "flex_attention" if importlib.util.find_spec("triton") is not None else SEGMENT_SDPA
    return _FLASH if has_flash else SEGMENT_SDPA


def register_attention() -> None:
    """Let transformers know `segment_sdpa`; before a model is made."""
    from transformers import AttentionInterface

    # Not compiled: its shapes are those of each segment, which would be a graph of its own for every packing.
    AttentionInterface.register(SEGMENT_SDPA, torch.compiler.disable(segment_sdpa))


def _check_flash(device: str, dtype: str, *, is_installed: bool) -> None:
    if not is_installed:
        raise ConfigError(
            "model.attention=flash_attention_2 needs the package flash-attn; install it or use "
            "model.attention=auto"
        )
    if device == "cpu":
        raise ConfigError(
            "model.attention=flash_attention_2 runs on GPUs, but the ranks compute on CPUs; use "
            "model.attention=auto"
        )
    if dtype == "float32":
        raise ConfigError(
            "model.attention=flash_attention_2 computes in bfloat16 or float16, but "
            "model.dtype=float32; use model.dtype=bfloat16, or model.attention=auto"
        )


def packed_arguments(
    attention: str,
    segment_lengths: Sequence[int],
    *,
    device: torch.device,
    sequence_group: ProcessGroup | None = None,
    prefix_segments: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward that mark where segments start.

    FlexAttention and dense SDPA need none: transformers reads the restarts of the position ids.

    Args:
        sequence_group: the ranks that share the microbatch, each with a part of it in its forward; None: not
            shared.
        prefix_segments: see `Microbatch`; empty: no segment continues another.
    """
    has_prefixes = any(segment >= 0 for segment in prefix_segments)
    if attention == SEGMENT_SDPA:
        return {
            "segments": Segments(segment_lengths, prefix_segments if has_prefixes else None),
            "sequence_group": sequence_group,
        }
    assert sequence_group is None, f"{attention} computes whole microbatches"
    assert not has_prefixes, f"{attention} knows no segment that continues another"
    if attention == _FLASH:
        bounds = Segments(segment_lengths).bounds(device)
        return {
            "cu_seq_lens_q": bounds.queries,
            "cu_seq_lens_k": bounds.keys,
            "max_length_q": bounds.longest_query,
            "max_length_k": bounds.longest_key,
        }
    return {}


def attention_parity(module: PreTrainedModel) -> float:
    """Return the segment length, in tokens, at which attention costs as much as all matrices of the model.

    n tokens cost 2 n P operations for P parameters, and 2 n^2 L W in the causal attention of L layers whose
    heads are W columns wide in total. Both are equal at n = P / (L W).
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
    """Attend causally within each segment of one microbatch; the signature is transformers' interface.

    Args:
        query: f[1, H, T, D]; key, value: f[1, K, T, D] with H a multiple of K.
        segments: of the microbatch. A segment that continues another attends to all that that one attends to,
            too.
        sequence_group: N ranks that share the microbatch: query, key, value and the result have T/N tokens of
            it.

    Returns:
        f[1, T, H, D], and None in place of attention weights.

    Raises:
        ValueError: the model does not pass `segments` on.
    """
    if segments is None:
        raise ValueError(f"{type(module).__name__} does not pass segments on to its attention")
    if sequence_group is not None:
        query, key, value = tokens_to_heads((query, key, value), sequence_group)
    if dropout == 0.0 and _has_varlen(query, value):
        attended = varlen(query, key, value, segments, scaling=scaling, sliding_window=sliding_window)
    else:
        attended = _each(query, key, value, segments, scaling, dropout, sliding_window)
    if sequence_group is not None:
        attended = heads_to_tokens(attended, sequence_group)
    return attended.transpose(1, 2), None


class VarlenKernel(Protocol):
    """Causal attention over packed segments; query i of n over m keys sees the first m - n + i + 1 of them,
    of these the last `window`.
    """

    def __call__(
        self,
        query_THD: Tensor,
        key_KGD: Tensor,
        value_KGD: Tensor,
        bounds: Bounds,
        *,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Return f[T, H, D]."""


def flash(
    query_THD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    bounds: Bounds,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """`VarlenKernel` by torch's own FlashAttention, on a GPU.

    The operator itself, not `torch.nn.attention.varlen`, which is absent in older versions and has other
    arguments in each.
    """
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query_THD,
        key_KGD,
        value_KGD,
        bounds.queries,
        bounds.keys,
        bounds.longest_query,
        bounds.longest_key,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return output


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float | None,
    sliding_window: int | None,
    kernel: VarlenKernel = flash,
) -> Tensor:
    """Attend within all segments in one call of a kernel; arguments and result are those of SDPA,
    f[1, H, T, D].
    """
    bounds = segments.bounds(query.device)
    query_THD, keys, values = (t[0].transpose(0, 1) for t in (query, key, value))
    if bounds.places is not None:
        keys, values = keys[bounds.places], values[bounds.places]
    output = kernel(query_THD, keys, values, bounds, scaling=scaling, window=sliding_window)
    return output.transpose(0, 1)[None]


def _has_varlen(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's FlashAttention takes these heads."""
    multiple, largest = _VARLEN_HEAD
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _VARLEN_DTYPES
        and width == value.shape[-1] <= largest
        and width % multiple == 0
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= _VARLEN_CAPABILITY
    )


def _each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """Attend within one segment after the other, f[1, H, T, D]."""
    if query.is_cuda and key.shape[1] < query.shape[1]:
        # Shared keys and values of float32, or with a mask, are left to torch's slowest kernel on a GPU: it
        # holds all pairs of tokens.
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    queries, keys, values = (t.split(segments.lengths, dim=2) for t in (query, key, value))
    if segments.prefixes is not None:
        keys, values = (_behind_prefixes(t, segments.prefixes, dim=2) for t in (keys, values))
    outputs = [
        scaled_dot_product_attention(
            q,
            k,
            v,
            **_causal(q, k, sliding_window),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=k.shape[1] < q.shape[1],
        )
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, dim=2)


def _behind_prefixes(segments: Sequence[Tensor], prefix_segments: Sequence[int], *, dim: int) -> list[Tensor]:
    """Return each segment's keys, values or places, preceded by those of all segments that it continues."""
    found: list[Tensor] = []
    for own, prefix in zip(segments, prefix_segments, strict=True):
        found.append(own if prefix < 0 else torch.cat([found[prefix], own], dim=dim))
    return found


def _causal(query: Tensor, key: Tensor, sliding_window: int | None) -> dict[str, Any]:
    """Return SDPA's mask arguments for queries that belong to the last of the keys.

    Each query attends to its own position and those before it, up to `sliding_window` of them.
    """
    length, num_keys = query.shape[2], key.shape[2]
    window = num_keys if sliding_window is None else sliding_window
    if length == num_keys <= window:
        return {"is_causal": True}
    ends = torch.arange(num_keys - length, num_keys, device=query.device)
    distance = ends[:, None] - torch.arange(num_keys, device=query.device)[None, :]
    return {"attn_mask": (distance >= 0) & (distance < window)}
