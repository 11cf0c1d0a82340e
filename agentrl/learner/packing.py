"""Packing of samples into microbatches: no padding, equally many per rank, balanced by compute."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.config.learner import SharedPrefix
from agentrl.data.image_layout import rope_positions
from agentrl.learner.batch import Microbatch, Sample, SampleShape, images_between
from agentrl.learner.prefix_tree import PrefixTree, prefix_lengths, segment_costs
from agentrl.learner.shared_prefix import Bundle, PackedPiece, bundle_pieces

PARITY_TOKENS = 16384.0
"""Default for a model of unknown size.

Models of 0.5 B to 8 B parameters have 20,000 to 60,000; the quickstart's has 1,000.
"""


def segment_cost(
    lengths: NDArray[np.int64], prefix_segments: NDArray[np.int64], parity_tokens: float
) -> float:
    """Return the cost of segments (see `segment_costs`). prefix_segments: see `Microbatch`."""
    return float(segment_costs(lengths, prefix_lengths(lengths, prefix_segments), parity_tokens).sum())


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """A microbatch before its samples are there: which pieces it has, in order. A filler has none."""

    bundles: tuple[Bundle, ...] = ()

    @property
    def pieces(self) -> list[PackedPiece]:
        return [piece for bundle in self.bundles for piece in bundle.pieces]

    @property
    def num_tokens(self) -> int:
        """Packed tokens; 0 for a filler."""
        return sum(bundle.num_tokens for bundle in self.bundles)

    def cost(self, parity_tokens: float) -> float:
        """Return its cost (see `segment_cost`)."""
        return sum(_cost(bundle, parity_tokens) for bundle in self.bundles)

    def assemble(self, samples: Mapping[int, Sample]) -> Microbatch:
        """Return the microbatch. samples: those of its pieces, by `PackedPiece.sample`."""
        return _concatenate(self.bundles, samples) if self.bundles else filler()


def pack(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    world_size: int,
    parity_tokens: float = PARITY_TOKENS,
    may_split: bool = True,
    shared_prefix: SharedPrefix = False,
) -> list[list[Microbatch]]:
    """Return the microbatches of each rank: `world_size` lists of equal length (see `plan_microbatches`).

    Raises:
        ValueError: there are no samples.
    """
    plans = plan_microbatches(
        [sample.shape for sample in samples],
        max_tokens=max_tokens,
        world_size=world_size,
        parity_tokens=parity_tokens,
        may_split=may_split,
        shared_prefix=shared_prefix,
    )
    by_place = dict(enumerate(samples))
    return [[plan.assemble(by_place) for plan in shard] for shard in plans]


def plan_microbatches(
    shapes: Sequence[SampleShape],
    *,
    max_tokens: int,
    world_size: int,
    parity_tokens: float = PARITY_TOKENS,
    may_split: bool = True,
    shared_prefix: SharedPrefix = False,
) -> list[list[MicrobatchPlan]]:
    """Return which pieces are in which microbatch of which rank: `world_size` lists of equal length.

    A microbatch has at most `max_tokens` tokens, unless a single piece is longer; such a piece is alone in
    its microbatch. Within this limit the costs are balanced (`segment_cost`). A piece is a whole sequence, or
    one segment of a sequence that is longer than `max_tokens`. These segments may go to different
    microbatches and ranks; with `may_split` False no sequence is cut. With `shared_prefix`, tokens that
    several segments begin with are stored once per microbatch; auto: where that costs less.

    Ranks with too little data get fillers. Every forward and backward is a collective, so a rank with fewer
    microbatches would leave the others waiting.

    Raises:
        ValueError: there are no samples.
    """
    if not shapes:
        raise ValueError("nothing to pack: the batch holds no samples")
    tree = PrefixTree.grow(
        [length for shape in shapes for length, _ in shape.segments],
        [marks if shared_prefix else () for shape in shapes for marks in shape.marks],
    )
    if shared_prefix == "auto":
        tree = tree.worthwhile(parity_tokens)
    pieces = _cut_all(shapes, tree, max_tokens if may_split else None)
    bundles = bundle_pieces(pieces, tree, max_tokens=max_tokens, world_size=world_size)
    ordered = sorted(((b, _cost(b, parity_tokens)) for b in bundles), key=lambda pair: -pair[1])
    # A piece that is too long fills one microbatch, not as many as its tokens would.
    num_bins = _round_up(-(-sum(min(b.size, max_tokens) for b in bundles) // max_tokens), world_size)
    while (bins := _spread(ordered, num_bins, max_tokens)) is None:
        num_bins = _round_up(max(num_bins + 1, int(num_bins * 1.1)), world_size)
    return _deal([MicrobatchPlan(tuple(members)) for members in bins if members], world_size, parity_tokens)


class Sized(Protocol):
    """Something with a number of packed tokens: a microbatch, or the plan of one."""

    @property
    def num_tokens(self) -> int: ...


def budget_metrics(microbatches: Sequence[Sized], *, num_tokens: int, max_tokens: int) -> dict[str, float]:
    """Return `microbatches_over_budget`, `microbatch_tokens_max` and `shared_tokens` of packed samples.

    The first counts microbatches of more than `max_tokens`: single pieces that are longer than the limit.
    `shared_tokens` counts tokens that are not computed, since another row's are the same. `num_tokens`: of
    all samples.
    """
    sizes = [m.num_tokens for m in microbatches]
    return {
        "microbatches_over_budget": float(sum(n > max_tokens for n in sizes)),
        "microbatch_tokens_max": float(max(sizes)),
        "shared_tokens": float(num_tokens - sum(sizes)),
    }


def _cost(bundle: Bundle, parity_tokens: float) -> float:
    own = bundle.segmentation
    return segment_cost(own.lengths, own.prefix_segments, parity_tokens)


def _cut_all(shapes: Sequence[SampleShape], tree: PrefixTree, max_tokens: int | None) -> list[PackedPiece]:
    """Return the pieces of all samples. max_tokens: of a piece, if it can be cut; None: no sample is cut."""
    found: list[PackedPiece] = []
    first_row = 0
    for place, shape in enumerate(shapes):
        whole = _whole(place, shape, first_row)
        is_cut = max_tokens is not None and Bundle.of([whole], tree).size > max_tokens
        found += _cut(whole, shape) if is_cut else [whole]
        first_row += len(shape.segments)
    return found


def _whole(place: int, shape: SampleShape, first_row: int) -> PackedPiece:
    lengths = tuple(length for length, _ in shape.segments)
    num_actions = sum(number for _, number in shape.segments)
    return PackedPiece(
        place, None, lengths, num_actions, 0, False, num_actions > 0, shape.num_loss_tokens, first_row
    )


def _cut(whole: PackedPiece, shape: SampleShape) -> list[PackedPiece]:
    """Return a piece per segment; the piece itself if it has only one."""
    if len(whole.lengths) == 1:
        return [whole]
    num_actions = [number for _, number in shape.segments]
    starts = [0, *itertools.accumulate(num_actions)]
    first_with_actions = next((i for i, number in enumerate(num_actions) if number), None)
    return [
        PackedPiece(
            whole.sample,
            i,
            (length,),
            num_actions[i],
            starts[i],
            True,
            i == first_with_actions,
            whole.loss_length,
            whole.first_row + i,
        )
        for i, length in enumerate(whole.lengths)
    ]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _spread(
    ordered: Sequence[tuple[Bundle, float]], num_bins: int, max_tokens: int
) -> list[list[Bundle]] | None:
    """Put each bundle, costliest first, into the cheapest bin with room for it; None if no bin has room.

    Source: Graham 1969 (LPT scheduling). Without the token limit, the costliest bin is within 4/3 of optimal.
    """
    bins: list[list[Bundle]] = [[] for _ in range(num_bins)]
    loads = [(0.0, 0, index) for index in range(num_bins)]  # cost, tokens
    for bundle, cost in ordered:
        # Bins come off the heap cheapest first. Those without room are set aside and pushed back afterwards.
        # An empty bin takes any bundle, even one longer than max_tokens.
        full = []
        while loads and bins[loads[0][2]] and loads[0][1] + bundle.size > max_tokens:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, tokens, index = heapq.heappop(loads)
        bins[index].append(bundle)
        for entry in (*full, (load + cost, tokens + bundle.size, index)):
            heapq.heappush(loads, entry)
    return bins


def _deal(
    plans: Sequence[MicrobatchPlan], world_size: int, parity_tokens: float
) -> list[list[MicrobatchPlan]]:
    """Deal the `world_size` costliest microbatches to the ranks, then the next ones, and so on.

    Ranks wait for each other at every microbatch, so microbatches at the same index should have similar
    costs.
    """
    shards: list[list[MicrobatchPlan]] = [[] for _ in range(world_size)]
    loads = np.zeros(world_size)
    ordered = sorted(((plan.cost(parity_tokens), plan) for plan in plans), key=lambda pair: -pair[0])
    nothing = (0.0, MicrobatchPlan())
    for start in range(0, len(ordered), world_size):
        dealt = ordered[start : start + world_size]
        dealt += [nothing] * (world_size - len(dealt))
        # The costliest of this round goes to the rank with the least load so far.
        for (cost, plan), rank in zip(dealt, np.argsort(loads, kind="stable"), strict=True):
            shards[rank].append(plan)
            loads[rank] += cost
    return shards


def filler() -> Microbatch:
    """Return a microbatch without loss tokens; its gradient is exactly 0.

    It has two tokens, because torch.compile would specialize a separate graph for a size of one.
    """
    zeros, never = np.zeros(2, np.float32), np.zeros(2, np.bool_)
    sample = Sample(-1, np.zeros(2, np.int32), never, never, zeros, zeros, values=zeros, returns=zeros)
    tree = PrefixTree.grow([sample.num_tokens], [()])
    return _concatenate([Bundle.of([_whole(0, sample.shape, 0)], tree)], {0: sample})


def _concatenate(bundles: Sequence[Bundle], by_place: Mapping[int, Sample]) -> Microbatch:
    pieces = [p for bundle in bundles for p in bundle.pieces]
    samples = [_sample_of(p, by_place[p.sample]) for p in pieces]
    starts = np.cumsum([0, *(bundle.num_tokens for bundle in bundles)])
    # Position of each token of each piece in the microbatch; a shared token has one position for several
    # rows.
    positions = [
        start + places
        for bundle, start in zip(bundles, starts[:-1], strict=True)
        for places in bundle.places()
    ]
    token_ids, position_ids = np.zeros((2, starts[-1]), np.int64)
    for sample, own in zip(samples, positions, strict=True):
        token_ids[own] = sample.token_ids
        position_ids[own] = np.concatenate([np.arange(n) for n in sample.segment_lengths])
    mask = np.concatenate([s.action_mask for s in samples])
    actions = np.flatnonzero(mask)
    places = _sequence_places(pieces)
    firsts = np.unique(places, return_index=True)[1]
    counted = {place for place, piece in zip(places, pieces, strict=True) if piece.is_counted}
    return Microbatch(
        token_ids=token_ids,
        position_ids=position_ids,
        segment_lengths=np.concatenate([bundle.segmentation.lengths for bundle in bundles]),
        prefix_segments=_prefix_segments(bundles),
        # Never -1 or in another piece: the first token of a segment is never an action.
        predictor_positions=np.concatenate(positions)[actions - 1],
        targets=np.concatenate([s.token_ids for s in samples]).astype(np.int64)[actions],
        sequence_ids=np.repeat(places, [s.num_tokens for s in samples])[actions],
        action_places=np.concatenate([p.first_place + np.arange(p.num_actions) for p in pieces]),
        loss_mask=np.concatenate([s.loss_mask for s in samples])[actions],
        behavior_logprobs=np.concatenate([s.behavior_logprobs for s in samples])[actions],
        advantages=np.concatenate([s.advantages for s in samples])[actions],
        sample_indices=np.array([samples[i].index for i in firsts], np.int64),
        is_split=np.array([pieces[i].is_split for i in firsts], np.bool_),
        is_counted=np.array([place in counted for place in range(len(firsts))], np.bool_),
        loss_lengths=np.array([pieces[i].loss_length for i in firsts], np.int64),
        values=_join([s.values for s in samples], actions),
        returns=_join([s.returns for s in samples], actions),
        experts=_experts(samples, positions, num_tokens=int(starts[-1])),
        segment_names=_segment_names(bundles, samples),
        images=tuple(
            image.moved(int(own[0]))
            for sample, own in zip(samples, positions, strict=True)
            for image in sample.images
        ),
        rope_positions=_rope_positions(samples, positions, position_ids),
    )


def _sample_of(piece: PackedPiece, sample: Sample) -> Sample:
    return sample if piece.segment is None else sample.segments()[piece.segment]


def _experts(
    samples: Sequence[Sample], positions: Sequence[NDArray[np.int64]], *, num_tokens: int
) -> NDArray[np.int16] | None:
    """Return i16[T, W], the experts of the tokens at their positions in the microbatch."""
    width = next((s.experts.shape[1] for s in samples if s.experts is not None), None)
    if width is None:
        return None
    experts = np.full((num_tokens, width), -1, np.int16)
    for sample, own in zip(samples, positions, strict=True):
        if sample.experts is not None:
            experts[own] = sample.experts
    return experts


def _rope_positions(
    samples: Sequence[Sample], positions: Sequence[NDArray[np.int64]], position_ids: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return i64[3, T], the positions with three axes; None without images."""
    if not any(sample.images for sample in samples):
        return None
    rope = np.tile(position_ids, (3, 1))
    for sample, own in zip(samples, positions, strict=True):
        if not sample.images:
            continue
        assert (np.diff(own) == 1).all(), "a sample with images shares no tokens"
        bounds = itertools.pairwise((*sample.segment_starts, sample.num_tokens))
        rope[:, own] = np.concatenate(
            [rope_positions(images_between(sample.images, a, b), 0, b - a) for a, b in bounds], axis=1
        )
    return rope


def _segment_names(bundles: Sequence[Bundle], samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the conversation of each segment; () if a sample does not know its own, or rows share tokens."""
    num_segments = sum(len(bundle.segmentation.lengths) for bundle in bundles)
    names = tuple(name for sample in samples for name in sample.segment_names)
    return names if len(names) == num_segments == sum(len(s.segment_starts) for s in samples) else ()


def _prefix_segments(bundles: Sequence[Bundle]) -> NDArray[np.int64]:
    per_bundle = [bundle.segmentation.prefix_segments for bundle in bundles]
    starts = np.cumsum([0, *(len(own) for own in per_bundle)])[:-1]
    return np.concatenate(
        [np.where(own >= 0, own + start, -1) for own, start in zip(per_bundle, starts, strict=True)]
    )


def _join(
    columns: Sequence[NDArray[np.float32] | None], actions: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    present = [column for column in columns if column is not None]
    return np.concatenate(present)[actions] if present else None


def _sequence_places(pieces: Sequence[PackedPiece]) -> list[int]:
    """Number the sequences in order of appearance. Pieces of one sample share a number."""
    seen: dict[int, int] = {}
    return [seen.setdefault(piece.sample, len(seen)) for piece in pieces]
