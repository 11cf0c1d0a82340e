"""Attention of packed requests over a paged cache, each over its own keys.

transformers' SDPA path for continuous batching computes all queries against all keys and masks the foreign
ones, so its cost grows with the square of the number of requests. Here each request pays for its own keys
only. Which blocks a forward reads is found out once, in its first layer; each layer copies whole blocks.

Legend: H heads, G key-value heads, Q packed queries, K keys of one request, D head size, R requests that
decode, B blocks of the longest of them, P tokens per block, L = B P keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a forward: its new tokens, and all its tokens so far, which include the new ones."""

    request_id: str
    num_queries: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class _Decoding:
    """What the requests with one new token read. `stale` are places behind a request's last key."""

    queries_R: Tensor
    blocks_RB: Tensor
    mask_R11L: Tensor
    stale: Tensor


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What one request with several new tokens reads; `blocks` is None if all its keys are new."""

    queries: slice
    num_keys: int
    blocks: Tensor | None


class PagedAttention:
    """transformers' attention interface, for the forwards of one engine."""

    def __init__(self) -> None:
        self._rows: Sequence[Row] = ()
        self._reads: tuple[_Decoding | None, list[_Prompt]] | None = None
        self._copies = torch.empty(0)

    def forget_copies(self) -> None:
        """Free the buffer that is kept between forwards."""
        self._copies = torch.empty(0)

    def expect(self, rows: Sequence[Row]) -> None:
        """Set the packing of the next forward."""
        self._rows, self._reads = rows, None

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        cache: Any,
        write_index: Sequence[Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Write the new keys and values to the cache and attend causally within each request.

        A request's queries are its last tokens: query i of n over m keys sees the first m - n + i + 1 keys.

        Args:
            query: f[1, H, Q, D]. key, value: f[1, G, Q, D].
            cache: transformers' PagedAttentionCache.
            write_index: for each of its allocators, the rows of the first layer's keys to write.

        Returns:
            f[1, Q, H, D].
        """
        allocator = cache.layer_to_allocator[module.layer_idx]
        layer = allocator.layer_indices.index(module.layer_idx)
        if self._reads is None:
            self._reads = _reads(self._rows, allocator, query)
        _write(allocator, layer, write_index[allocator.index], key[0], value[0])
        decoding, prompts = self._reads
        output_QHD = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        if decoding is not None:
            keys, values = self._read(allocator, layer, decoding.blocks_RB, decoding.stale)
            output_QHD[decoding.queries_R] = _decode(
                query[0][:, decoding.queries_R], keys, values, decoding.mask_R11L, scaling
            )
        for prompt in prompts:
            key_GKD, value_GKD = key[0][:, prompt.queries], value[0][:, prompt.queries]
            if prompt.blocks is not None:
                keys, values = self._read(allocator, layer, prompt.blocks)
                key_GKD, value_GKD = keys[0, :, : prompt.num_keys], values[0, :, : prompt.num_keys]
            output_QHD[prompt.queries] = _prefill(query[0][:, prompt.queries], key_GKD, value_GKD, scaling)
        return output_QHD.unsqueeze(0), None

    def _read(
        self, allocator: Any, layer: int, blocks_RB: Tensor, stale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of blocks, f[R, G, L, D] each, valid until the next call."""
        page, size = allocator.tokens_per_page, allocator.num_key_value_heads * allocator.head_dim
        # A block holds, layer after layer, a page of keys and a page of values.
        pages = allocator.cache_tensor.view(-1, page * size)
        keys_RB = (blocks_RB * len(allocator.layer_indices) + layer) * 2
        index = torch.cat([keys_RB.flatten(), keys_RB.flatten() + 1])
        # One buffer for all layers: fresh memory of this size would be mapped page by page each time.
        if self._copies.numel() < len(index) * page * size:
            self._copies = pages.new_empty(2 * len(index) * page * size)
        copies = self._copies[: len(index) * page * size].view(len(index), page * size)
        torch.index_select(pages, 0, index, out=copies)
        if stale is not None:
            # A mask does not help against NaN, which an earlier owner of the block may have left.
            copies.view(-1, size).index_fill_(0, stale, 0.0)
        shape = (2, len(blocks_RB), -1, allocator.num_key_value_heads, allocator.head_dim)
        keys, values = copies.view(shape).transpose(2, 3)
        return keys, values


def _reads(rows: Sequence[Row], allocator: Any, query: Tensor) -> tuple[_Decoding | None, list[_Prompt]]:
    """Find out what the requests read, once per forward."""
    device, page, start = query.device, allocator.tokens_per_page, 0
    queries, tables, lengths, prompts = [], [], [], []
    for row in rows:
        table = allocator.block_table[row.request_id][: -(-row.num_keys // page)]
        if row.num_queries == 1:
            queries.append(start)
            tables.append(table)
            lengths.append(row.num_keys)
        else:
            blocks = torch.tensor([table], device=device) if row.num_keys > row.num_queries else None
            prompts.append(_Prompt(slice(start, start + row.num_queries), row.num_keys, blocks))
        start += row.num_queries
    if not queries:
        return None, prompts
    longest = max(map(len, tables))
    # Block 0 is never given to a request: zeros.
    blocks_RB = torch.tensor([table + [0] * (longest - len(table)) for table in tables], device=device)
    is_own_RL = torch.arange(longest * page, device=device) < torch.tensor(lengths, device=device)[:, None]
    stale = (~is_own_RL & (blocks_RB != 0).repeat_interleave(page, dim=1)).flatten().nonzero().squeeze(1)
    mask_RL = torch.zeros(is_own_RL.shape, dtype=query.dtype, device=device).masked_fill_(
        ~is_own_RL, -torch.inf
    )
    decoding = _Decoding(
        torch.tensor(queries, device=device),
        blocks_RB,
        mask_RL[:, None, None, :],
        torch.cat([stale, stale + is_own_RL.numel()]),  # of keys, of values
    )
    return decoding, prompts


def _write(allocator: Any, layer: int, write_index: Tensor, key_GQD: Tensor, value_GQD: Tensor) -> None:
    tokens = allocator.cache_tensor.view(-1, allocator.num_key_value_heads * allocator.head_dim)
    for offset, states in ((2 * layer, key_GQD), (2 * layer + 1, value_GQD)):
        rows = states.transpose(0, 1).flatten(1)
        tokens.index_copy_(0, write_index + offset * allocator.tokens_per_page, rows)


def _decode(
    query_HRD: Tensor, key_RGLD: Tensor, value_RGLD: Tensor, mask_R11L: Tensor, scale: float
) -> Tensor:
    """Attend with one query per request, all requests at once, over keys padded to the longest."""
    num_heads, num_rows, size = query_HRD.shape
    # The query heads that share a key-value head take SDPA's query dimension: no need to repeat the keys.
    query = query_HRD.transpose(0, 1).reshape(num_rows, key_RGLD.shape[1], -1, size)
    output = scaled_dot_product_attention(query, key_RGLD, value_RGLD, attn_mask=mask_R11L, scale=scale)
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
