"""Attention of packed requests, each over its own keys.

transformers' SDPA path for continuous batching computes all queries against all keys and masks the foreign
ones, so its cost grows with the square of the number of requests. Here each request pays for its own keys
only. Measured on one CPU thread with a model of 0.2 M parameters, 128 requests and prompts of 60 tokens:
4,750 tokens per second instead of 1,900.

Legend: H heads, G key-value heads, Q packed queries, K packed keys, D head size, R requests that decode,
L the largest number of keys among them, S query heads per key-value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def segment_attention(
    query_HQD: Tensor,
    key_GKD: Tensor,
    value_GKD: Tensor,
    *,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """Attend causally within each segment of a packed batch.

    A segment's queries are at its end: query i of n over m keys sees the first m - n + i + 1 keys.

    Args:
        query_HQD, key_GKD, value_GKD: f[H, Q, D], f[G, K, D], f[G, K, D], the segments one after the other.
        query_lengths, key_lengths: sizes of the segments; they sum to Q and K.

    Returns:
        f[Q, H, D].
    """
    query_ends, key_ends = list(accumulate(query_lengths)), list(accumulate(key_lengths))
    decoding = [i for i, length in enumerate(query_lengths) if length == 1]
    output_QHD = query_HQD.new_empty(query_HQD.shape[1], query_HQD.shape[0], query_HQD.shape[2])
    if decoding:
        rows = torch.tensor([query_ends[i] - 1 for i in decoding], device=query_HQD.device)
        starts = [key_ends[i] - key_lengths[i] for i in decoding]
        lengths = [key_lengths[i] for i in decoding]
        output_QHD[rows] = _decode(query_HQD[:, rows], key_GKD, value_GKD, starts, lengths, scale)
    for i, length in enumerate(query_lengths):
        if length > 1:
            queries = slice(query_ends[i] - length, query_ends[i])
            keys = slice(key_ends[i] - key_lengths[i], key_ends[i])
            output_QHD[queries] = _prefill(query_HQD[:, queries], key_GKD[:, keys], value_GKD[:, keys], scale)
    return output_QHD


def _decode(
    query_HRD: Tensor,
    key_GKD: Tensor,
    value_GKD: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """Attend with one query per request, all requests at once, over keys padded to the longest."""
    num_heads, num_rows, size = query_HRD.shape
    groups, device = key_GKD.shape[0], key_GKD.device
    steps_L = torch.arange(max(lengths), device=device)
    is_own_RL = steps_L < torch.tensor(lengths, device=device).unsqueeze(1)
    index_RL = torch.where(is_own_RL, torch.tensor(starts, device=device).unsqueeze(1) + steps_L, 0)
    key_RGLD = key_GKD[:, index_RL].transpose(0, 1)
    value_RGLD = value_GKD[:, index_RL].transpose(0, 1)
    # The query heads that share a key-value head take SDPA's query dimension: no need to repeat the keys.
    query_RGSD = query_HRD.transpose(0, 1).reshape(num_rows, groups, num_heads // groups, size)
    output = scaled_dot_product_attention(
        query_RGSD, key_RGLD, value_RGLD, attn_mask=is_own_RL[:, None, None, :], scale=scale
    )
    return output.reshape(num_rows, num_heads, size)


def _prefill(query_HQD: Tensor, key_GKD: Tensor, value_GKD: Tensor, scale: float) -> Tensor:
    """Attend with the queries of one request over its own keys."""
    repeats = query_HQD.shape[0] // key_GKD.shape[0]
    key_HKD, value_HKD = (
        key_GKD.repeat_interleave(repeats, dim=0),
        value_GKD.repeat_interleave(repeats, dim=0),
    )
    queries, keys = query_HQD.shape[1], key_HKD.shape[1]
    mask = None
    # In a later chunk of a prompt, SDPA's causal flag would align the first query with the first key.
    if keys > queries:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query_HQD.device).tril(keys - queries)
    output = scaled_dot_product_attention(
        query_HQD[None], key_HKD[None], value_HKD[None], attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return output[0].transpose(0, 1)
