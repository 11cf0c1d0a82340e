"""The learner's input types: trajectories as samples, and samples packed into microbatches.

Only numpy arrays, so Ray can share them without copies.

Shapes: T tokens, A action tokens, S sequences (trajectories), G segments. A segment is one training row of a
sequence and attends only to itself. With shared prefixes a microbatch is cut finer: the tokens that some rows
share are a segment, and each way in which they continue is another. Per-token columns of a microbatch exist
for action tokens only, because nothing is learned, scored or counted on a context token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.data.prefix_marks import Mark, find_marks
from agentrl.types import PlacedImage

Floats = NDArray[np.floating]

Mode = Literal["decoupled", "bypass", "on_policy"]
"""The origin of the proximal policy (`algorithm.mode`, with auto resolved)."""


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What packing needs of a sample: its lengths.

    segments: tokens of each segment, and how many of them are action tokens.
    num_loss_tokens: of the whole sample.
    marks: of each segment, see `find_marks`; empty if it shares no tokens.
    """

    segments: tuple[tuple[int, int], ...]
    num_loss_tokens: int
    marks: tuple[tuple[Mark, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(length for length, _ in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory to learn from; all arrays have length T.

    index: its index in the batch.
    action_mask: True where the policy sampled the token. The first token of a segment is never an action,
    since nothing predicts it.
    loss_mask: tokens accepted for the loss, a subset of action_mask.
    behavior_logprobs, advantages: read only where action_mask is True.
    segment_starts: index of the first token of each segment. Segments do not attend to each other, but count
    as one sequence.
    values: the critic's estimates at the start of the step; None without a critic.
    returns: regression targets of the critic; None without a critic.
    experts: i16[T, W], see `Trajectory.experts`; None: not recorded.
    segment_names: the conversation of each segment; (): not known.
    images: by their positions in `token_ids`, in order.
    """

    index: int
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    segment_starts: tuple[int, ...] = (0,)
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    experts: NDArray[np.int16] | None = None
    segment_names: tuple[str, ...] = ()
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        columns = (
            self.token_ids,
            self.action_mask,
            self.loss_mask,
            self.behavior_logprobs,
            self.advantages,
            self.values,
            self.returns,
            self.experts,
        )
        lengths = {len(a) for a in columns if a is not None}
        assert len(lengths) == 1, f"per-token arrays disagree in length: {sorted(lengths)}"
        assert len(self.token_ids) > 0, "a sample without tokens"
        bounds = (*self.segment_starts, len(self.token_ids))
        assert bounds[0] == 0, "the first segment does not begin at the first token"
        assert all(start < end for start, end in itertools.pairwise(bounds)), (
            f"segment starts that do not rise: {self.segment_starts}"
        )
        assert not self.action_mask[list(self.segment_starts)].any(), (
            "a segment's first token is an action, but nothing predicts it"
        )
        assert not (self.loss_mask & ~self.action_mask).any(), "loss_mask is True off the action mask"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def segment_lengths(self) -> NDArray[np.int64]:
        return np.diff([*self.segment_starts, self.num_tokens]).astype(np.int64)

    @property
    def shape(self) -> SampleShape:
        num_actions = np.add.reduceat(self.action_mask, self.segment_starts, dtype=np.int64)
        segments = tuple(zip(self.segment_lengths.tolist(), num_actions.tolist(), strict=True))
        marks = find_marks(self.token_ids, self.action_mask, self.segment_starts)
        # Equal tokens may have gone to different experts, and equal placeholders are of different images.
        if self.experts is not None or self.images:
            marks = tuple(() for _ in marks)
        return SampleShape(segments, int(self.loss_mask.sum()), marks)

    def segments(self) -> list[Sample]:
        """Return each segment as a sample of its own with the same index."""
        bounds = itertools.pairwise((*self.segment_starts, self.num_tokens))
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        per_token = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
        alone = {"segment_starts": (0,)}
        names: list[tuple[str, ...]] = [(name,) for name in self.segment_names]
        names = names or [()] * len(self.segment_starts)
        return [
            Sample(
                **columns
                | {name: c[a:b] for name, c in per_token.items()}
                | alone
                | {"segment_names": own, "images": images_between(self.images, a, b)}
            )
            for (a, b), own in zip(bounds, names, strict=True)
        ]

    @classmethod
    def supervised(
        cls,
        index: int,
        token_ids: NDArray[np.int32],
        mask: NDArray[np.bool_],
        segment_starts: tuple[int, ...] = (0,),
        images: tuple[PlacedImage, ...] = (),
    ) -> Sample:
        """Return a sample for supervised learning; `mask` (bool[T]) is True on the tokens to learn."""
        mask = mask.copy()
        mask[list(segment_starts)] = False  # nothing predicts the first token of a segment
        zeros = np.zeros(len(token_ids), np.float32)
        ids = np.asarray(token_ids, np.int32)
        return cls(index, ids, mask, mask, zeros, zeros, segment_starts, images=images)

    @classmethod
    def pair(cls, index: int, chosen: NDArray[np.int32], rejected: NDArray[np.int32]) -> Sample:
        """Return a pair as one sample of two segments. chosen, rejected: i32[T], at least 2 tokens each."""
        token_ids = np.concatenate([chosen, rejected])
        mask = np.zeros(len(token_ids), np.bool_)
        mask[-1] = True
        return cls.supervised(index, token_ids, mask, (0, len(chosen)))


def images_between(images: Sequence[PlacedImage], start: int, end: int) -> tuple[PlacedImage, ...]:
    """Return the images at tokens `start` to `end`, by their positions from `start` on."""
    return tuple(image.moved(-start) for image in images if start <= image.position < end)


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Segments of sequences, concatenated without padding: the input of one forward of one rank.

    token_ids: i64[T].
    position_ids: i64[T]; they restart at each segment, but go on in a segment that continues another.
    segment_lengths: i64[G].
    prefix_segments: i64[G], index of an earlier segment that this one continues: it attends to that one, and
    to those that that one attends to, before its own tokens; -1: none.
    predictor_positions: i64[A], position whose logits predict the action token. An action token that several
    sequences share has an entry for each.
    targets: i64[A], the action token.
    sequence_ids: i64[A], index of the token's sequence in sample_indices.
    action_places: i64[A], index of the token among all action tokens of its sequence.
    loss_mask: bool[A]. behavior_logprobs, advantages: f32[A].
    sample_indices: i64[S], `Sample.index`; -1 for a filler, which only keeps ranks in step.
    is_split: bool[S], True if other segments of the sequence are in other microbatches.
    is_counted: bool[S], True in exactly one microbatch of each sequence that has action tokens.
    loss_lengths: i64[S], loss_mask tokens of the whole sequence, including those in other microbatches.
    values, returns: f32[A], None without a critic.
    experts: i16[T, W], which experts computed the tokens on the servers, -1 where none is recorded (see
        `Trajectory.experts`); None: none is.
    segment_names: the conversation of each of the G segments; () if that is not known of all, or if segments
        continue others.
    images: by their positions in the microbatch, in order.
    rope_positions: i64[3, T], positions with three axes (see `images.layout`); None: there are no images.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    segment_lengths: NDArray[np.int64]
    prefix_segments: NDArray[np.int64]
    predictor_positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    action_places: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: Floats
    advantages: Floats
    sample_indices: NDArray[np.int64]
    is_split: NDArray[np.bool_]
    is_counted: NDArray[np.bool_]
    loss_lengths: NDArray[np.int64]
    values: Floats | None = None
    returns: Floats | None = None
    experts: NDArray[np.int16] | None = None
    segment_names: tuple[str, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    rope_positions: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        """Packed tokens; 0 for a filler."""
        return 0 if self.is_filler else len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        return len(self.targets)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_sequences(self) -> int:
        """Sequences with at least one action token.

        A split sequence counts in only one of its microbatches.
        """
        return int(self.is_counted.sum())

    @property
    def has_repeated_actions(self) -> bool:
        """Whether several action tokens may be predicted by one position."""
        return len(np.unique(self.predictor_positions)) < len(self.predictor_positions)

    def num_computed(self, chosen: NDArray[np.bool_]) -> int:
        """Return how many of these action tokens (bool[A]) are scored: one that sequences share is one."""
        pairs = np.stack([self.predictor_positions[chosen], self.targets[chosen]])
        return int(np.unique(pairs, axis=1).shape[1])

    @property
    def is_filler(self) -> bool:
        return bool((self.sample_indices < 0).all())


def count_tokens(microbatches: Sequence[Microbatch]) -> int:
    """Return the packed tokens of all microbatches, without fillers."""
    return sum(m.num_tokens for m in microbatches)


@dataclass(frozen=True, slots=True, eq=False)
class RestOfSequences:
    """The E action tokens of a microbatch's sequences that are in other microbatches, on any rank.

    Usually there are none: only a sequence longer than a microbatch is split.
    sequence_ids: i64[E], index in the microbatch's sample_indices.
    accepted, is_selected: bool[E]. weights, advantages, behavior_logprobs: f64[E].
    proximal_logprobs: f64[E]; those of the behavior policy in mode bypass and where nothing was scored.
    """

    sequence_ids: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    is_selected: NDArray[np.bool_]
    weights: Floats
    advantages: Floats
    behavior_logprobs: Floats
    proximal_logprobs: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Decisions about a microbatch's action tokens, made before the update with a view of all of it.

    accepted: bool[A], the tokens of the loss: loss_mask minus rejected tokens.
    weights: f[A], importance weight of the policy term and of the KL term.
    is_selected: bool[A], tokens that the policy loss singles out; None if it has no such rule.
    rejected: stage -> tokens rejected. Each stage counts on its own, except M2PO, which sees only what the
    others left.
    log_products: f64[.], log of the product of proximal / behavior over each sequence that is counted here.
    rest: the same for tokens in other microbatches.
    """

    accepted: NDArray[np.bool_]
    weights: Floats
    is_selected: NDArray[np.bool_] | None
    rejected: Mapping[str, int]
    log_products: Floats
    rest: RestOfSequences


@dataclass(frozen=True, slots=True, eq=False)
class ScoredMicrobatch:
    """A microbatch with log-probabilities from before the step's first update, f[A].

    proximal_logprobs: by the policy. None if nothing needs them (on_policy, and bypass without rejection). In
    mode decoupled, None if the update's own forward gives them; `correction` then accepts the whole
    loss_mask. In bypass the behavior policy is the proximal policy, and these serve rejection only.
    ref_logprobs: by the reference; None without KL in the loss.
    """

    microbatch: Microbatch
    proximal_logprobs: Floats | None
    ref_logprobs: Floats | None
    correction: Correction

    @property
    def num_action_tokens(self) -> int:
        return self.microbatch.num_action_tokens

    @property
    def num_loss_tokens(self) -> int:
        return int(self.correction.accepted.sum())

    @property
    def num_sequences(self) -> int:
        return self.microbatch.num_sequences
