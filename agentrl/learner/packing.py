"""Cut samples into microbatches: whole sequences, no padding, as many for every rank, and as even as can be."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from agentrl.learner.batch import Microbatch, Sample


def pack(samples: Sequence[Sample], *, max_tokens: int, world_size: int) -> list[list[Microbatch]]:
    """Return the microbatches of each rank: `world_size` lists of one length.

    No microbatch exceeds `max_tokens`, but that a longer sequence stands alone. Ranks get fillers where there is too little to
    learn: every forward and backward is a collective, so a rank with fewer of them would leave the others waiting.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("nothing to pack: the batch holds no samples")
    ordered = sorted(samples, key=lambda s: -s.num_tokens)
    num_bins = _round_up(-(-sum(s.num_tokens for s in samples) // max_tokens), world_size)
    while (bins := _spread(ordered, num_bins, max_tokens)) is None:
        num_bins = _round_up(max(num_bins + 1, int(num_bins * 1.1)), world_size)
    return _deal([_concatenate(members) for members in bins if members], world_size)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _spread(ordered: Sequence[Sample], num_bins: int, max_tokens: int) -> list[list[Sample]] | None:
    """Put each sample, longest first, into the emptiest bin; None when one does not fit. (Graham 1969: within 4/3 of even.)"""
    bins: list[list[Sample]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for sample in ordered:
        load, index = loads[0]
        if bins[index] and load + sample.num_tokens > max_tokens:
            return None
        bins[index].append(sample)
        heapq.heapreplace(loads, (load + sample.num_tokens, index))
    return bins


def _deal(microbatches: Sequence[Microbatch], world_size: int) -> list[list[Microbatch]]:
    """Give each rank one of the `world_size` largest, then of the next: ranks wait for each other at every microbatch."""
    shards: list[list[Microbatch]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    ordered = sorted(microbatches, key=lambda m: -m.num_tokens)
    for start in range(0, len(ordered), world_size):
        row = ordered[start : start + world_size]
        row += [filler() for _ in range(world_size - len(row))]
        # The largest of a row goes to the rank that had the least so far.
        for microbatch, rank in zip(row, sorted(range(world_size), key=loads.__getitem__), strict=True):
            shards[rank].append(microbatch)
            loads[rank] += microbatch.num_tokens
    return shards


def filler() -> Microbatch:
    """Return a microbatch of one token with nothing to learn; its gradient is exactly 0."""
    none = np.zeros(0, np.int64)
    floats = np.zeros(0, np.float32)
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    return Microbatch(zero, zero, one, none, none, none, np.zeros(0, np.bool_), floats, floats, -one)


def _concatenate(samples: Sequence[Sample]) -> Microbatch:
    segment_lengths = np.concatenate([s.segment_lengths for s in samples])
    mask = np.concatenate([s.action_mask for s in samples])
    actions = np.flatnonzero(mask)
    token_ids = np.concatenate([s.token_ids for s in samples]).astype(np.int64)
    return Microbatch(
        token_ids=token_ids,
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in segment_lengths]),
        segment_lengths=segment_lengths,
        predictor_positions=actions - 1,  # position 0 of a segment is never an action, so this stays within it
        targets=token_ids[actions],
        sequence_ids=np.repeat(np.arange(len(samples)), [s.num_tokens for s in samples])[actions],
        loss_mask=np.concatenate([s.loss_mask for s in samples])[actions],
        behavior_logprobs=np.concatenate([s.behavior_logprobs for s in samples])[actions],
        advantages=np.concatenate([s.advantages for s in samples])[actions],
        sample_indices=np.array([s.index for s in samples], np.int64),
    )
