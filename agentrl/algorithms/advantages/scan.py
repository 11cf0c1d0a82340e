"""Discounted sums from each element to the end of its segment, without a loop over the elements.

Shapes: A elements, N segments, B elements of a block, M blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.compact import repeat

BLOCK = 32
"""Elements summed by one matrix product: larger blocks cost more arithmetic, smaller ones more rounds."""


def sums_to_go(values_A: Tensor, lengths_N: Tensor, decay: float) -> Tensor:
    """Return y with y_t = x_t + decay * y_{t+1} within each segment of `lengths_N` neighbors.

    At the last element of a segment y = x. Each segment is cut into blocks. The sums within a block are one
    product with the triangular matrix of powers of `decay`. The contribution of later blocks is the same
    problem over the first elements of the blocks with decay^B, so a segment of T elements takes log_B(T)
    rounds. No power exceeds 1, so powers never overflow at any length.

    Args:
        values_A: f[A]. lengths_N: i64[N], sum to A, may be 0. decay: in [0, 1].
    """
    if not len(values_A) or int(lengths_N.max()) == 1:
        return values_A
    blocks_N = -(-lengths_N // BLOCK)  # rounded up
    places_A = _places(lengths_N, blocks_N)
    powers_B = torch.pow(decay, torch.arange(BLOCK + 1, dtype=torch.float64)).to(values_A.dtype)
    offsets_BB = torch.arange(BLOCK)[:, None] - torch.arange(BLOCK)  # [later, earlier]
    triangle_BB = torch.where(offsets_BB >= 0, powers_B[offsets_BB.clamp(min=0)], 0.0)
    padded_MB = (
        values_A.new_zeros(int(blocks_N.sum()) * BLOCK).index_copy_(0, places_A, values_A).view(-1, BLOCK)
    )
    sums_MB = padded_MB @ triangle_BB

    # Recurse over the first element of each block: its full sum is its block's sum plus decay^B times that of
    # the next block.
    heads_M = sums_to_go(sums_MB[:, 0].contiguous(), blocks_N, decay**BLOCK)
    following_M = torch.cat([heads_M[1:], heads_M.new_zeros(1)])
    following_M[blocks_N.cumsum(0) - 1] = 0.0
    # Element b of a block is B - b steps before the first element of the next block, hence decay^(B - b).
    sums_MB += following_M[:, None] * powers_B[1:].flip(0)
    return sums_MB.view(-1)[places_A]


def following(values_A: Tensor, lengths_N: Tensor, last_N: Tensor | None = None) -> Tensor:
    """Return f[A], the next element of the same segment; for its last element `last_N` of the segment, or
    0.
    """
    shifted = torch.cat([values_A[1:], values_A.new_zeros(min(1, len(values_A)))])
    is_any = lengths_N > 0
    shifted[lengths_N.cumsum(0)[is_any] - 1] = 0.0 if last_N is None else last_N[is_any]
    return shifted


def _places(lengths_N: Tensor, blocks_N: Tensor) -> Tensor:
    """Return i64[A]: the index of each element once every segment is padded to whole blocks."""
    gaps_N = blocks_N * BLOCK - lengths_N
    return torch.arange(int(lengths_N.sum())) + repeat(gaps_N.cumsum(0) - gaps_N, lengths_N)
