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
    bins = _fill_bins(samples, max_tokens)
    microbatches = [_concatenate(members) for members in bins]
    return _deal(microbatches, world_size)


def _fill_bins(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Best-fit decreasing: within 11/9 of the fewest bins, plus one (Johnson 1973)."""
    bins: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda s: -s.num_tokens):
        fitting = [i for i, free in enumerate(room) if free >= sample.num_tokens]
        if fitting:
            best = min(fitting, key=room.__getitem__)
        else:
            best = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[best].append(sample)
        room[best] -= sample.num_tokens
    return bins


def _deal(microbatches: Sequence[Microbatch], world_size: int) -> list[list[Microbatch]]:
    """Give the largest microbatch to the rank with the fewest tokens that has a place left, then fill up."""
    places = -(-len(microbatches) // world_size)
    shards: list[list[Microbatch]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for microbatch in sorted(microbatches, key=lambda m: -m.num_tokens):
        load, rank = heapq.heappop(loads)
        shards[rank].append(microbatch)
        if len(shards[rank]) < places:
            heapq.heappush(loads, (load + microbatch.num_tokens, rank))
    for shard in shards:
        shard.extend(filler() for _ in range(places - len(shard)))
    return shards


def filler() -> Microbatch:
    """Return a microbatch of one token with nothing to learn; its gradient is exactly 0."""
    none = np.zeros(0, np.int64)
    floats = np.zeros(0, np.float32)
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    return Microbatch(zero, zero, one, none, none, none, np.zeros(0, np.bool_), floats, floats, -one)


def _concatenate(samples: Sequence[Sample]) -> Microbatch:
    lengths = np.array([s.num_tokens for s in samples], np.int64)
    mask = np.concatenate([s.action_mask for s in samples])
    actions = np.flatnonzero(mask)
    token_ids = np.concatenate([s.token_ids for s in samples]).astype(np.int64)
    return Microbatch(
        token_ids=token_ids,
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        segment_lengths=lengths,
        predictor_positions=actions - 1,  # position 0 of a sequence is never an action, so this stays within it
        targets=token_ids[actions],
        sequence_ids=np.repeat(np.arange(len(samples)), lengths)[actions],
        loss_mask=np.concatenate([s.loss_mask for s in samples])[actions],
        behavior_logprobs=np.concatenate([s.behavior_logprobs for s in samples])[actions],
        advantages=np.concatenate([s.advantages for s in samples])[actions],
        sample_indices=np.array([s.index for s in samples], np.int64),
    )
