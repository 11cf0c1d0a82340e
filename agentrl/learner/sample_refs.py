"""Samples and microbatches by reference: what the controller has of them. The ranks load what they refer to.

The controller decides by lengths alone which rank gets what; it never sees a token. A rank reads the
trajectories of its microbatches from their files (`agentrl.data.attempt_files`) when it needs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.algorithms.advantages.reinforce import Moments
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.proximal_files import ProximalRun
from agentrl.data.token_columns import Numbers, TokenColumn, keep
from agentrl.errors import LearnerError
from agentrl.fast_pickle import pickled_fast
from agentrl.learner.batch import Floats, Microbatch, Sample, SampleShape
from agentrl.learner.packing import MicrobatchPlan
from agentrl.learner.shared_prefix import PackedPiece
from agentrl.learner.token_credit import (
    NO_COLUMNS,
    TokenColumns,
    TokenCredit,
    TokenRules,
    end_place,
    moments_of,
    token_credit,
)
from agentrl.types import Trajectory


@pickled_fast
@dataclass(frozen=True, slots=True, eq=False)
class SampleRef:
    """A trajectory to learn from.

    index: its index in the batch.
    attempt: its facts, among them where the trajectory is stored.
    advantages: f64[R], equal over runs of action tokens; run_lengths: i64[R], tokens of each run. They are in
        the order of crediting (see `token_credit`), and not read if `rules` name an estimator.
    dropped_versions: tokens of these versions are not in the loss.
    columns, rules: what credit per token is computed from. rules: None: the advantages are all there is.
    returns: f64[A], regression targets of a critic in the order of crediting; None: those of the rules.
    has_end: the sample gets one more action token behind the segment of its last sampled token, so that the
        value before it is the value at the end.
    """

    index: int
    attempt: AttemptFacts
    advantages: NDArray[np.float64]
    run_lengths: NDArray[np.int64]
    dropped_versions: tuple[int, ...] = ()
    columns: TokenColumns = NO_COLUMNS
    rules: TokenRules | None = None
    returns: NDArray[np.float64] | None = None
    has_end: bool = False

    @classmethod
    def plain(cls, index: int, attempt: AttemptFacts, *, advantage: float = 0.0) -> SampleRef:
        """Return a sample with one advantage for all of its action tokens."""
        lengths = np.array([attempt.num_action_tokens], np.int64)
        return cls(index, attempt, np.array([advantage]), lengths)

    @property
    def shape(self) -> SampleShape:
        attempt = self.attempt
        segments = list(attempt.segments)
        if self.has_end:
            last, _ = end_place(attempt)
            length, num_actions = segments[last]
            segments[last] = (length + 1, num_actions + 1)
        num_loss = sum(n for version, n in attempt.versions if version not in self.dropped_versions)
        return SampleShape(tuple(segments), num_loss, attempt.marks)

    def replace(self, **changes: Any) -> SampleRef:
        return dataclasses.replace(self, **changes)

    def load(self) -> Sample:
        """Read the trajectory and return the sample.

        Raises:
            DiskError: the trajectory or a column is missing or damaged.
        """
        source = self.attempt.source
        stored = source if isinstance(source, Trajectory) else source.load(has_messages=False)
        mask, own = stored.action_mask, self._credit()
        sample = Sample(
            self.index,
            stored.token_ids,
            mask,
            mask & ~np.isin(stored.versions, self.dropped_versions) if self.dropped_versions else mask,
            stored.behavior_logprobs,
            _on_actions(own.advantages, mask),
            stored.segment_starts,
            values=None if own.values is None else _on_actions(own.values, mask),
            returns=None if own.returns is None else _on_actions(own.returns, mask),
            experts=stored.experts_of_tokens,
            segment_names=self.attempt.segment_names,
            images=stored.images,
        )
        return self._with_end(sample) if self.has_end else sample

    def _credit(self) -> TokenCredit:
        runs = (self.advantages, self.run_lengths)
        if self.rules is None:
            return TokenCredit(np.repeat(*runs).astype(np.float32), None, None)
        return token_credit(self.attempt, self.columns, self.rules, runs, self.returns)

    def moments(self) -> Moments:
        """Return the moments of the advantages per token, before they are whitened.

        Raises:
            DiskError: a column is missing.
        """
        assert self.rules is not None, "only the advantages of an estimator have moments"
        return moments_of(self.attempt, self.columns, self.rules)

    def teacher_logprobs(self) -> NDArray[np.float32]:
        """Read the teacher's log-probabilities of the action tokens, f32[A], in the order of positions.

        Raises:
            DiskError: the trajectory is missing or damaged.
            LearnerError: no teacher was asked about the attempt.
        """
        source = self.attempt.source
        stored = source if isinstance(source, Trajectory) else source.load(has_messages=False)
        if len(stored.teacher_logprobs) != self.attempt.num_action_tokens:
            raise LearnerError(
                f"member {self.attempt.member} of group {self.attempt.group_id} was played without "
                "algorithm.distillation.servers, so no teacher scored it; start a new run"
            )
        return stored.teacher_logprobs

    def _with_end(self, sample: Sample) -> Sample:
        segment, _ = end_place(self.attempt)
        end = (*sample.segment_starts, sample.num_tokens)[segment + 1]

        def grown(column: NDArray[Any], value: float | bool) -> NDArray[Any]:
            return np.insert(column, end, value)

        return dataclasses.replace(
            sample,
            token_ids=grown(sample.token_ids, 0),
            action_mask=grown(sample.action_mask, True),
            loss_mask=grown(sample.loss_mask, False),
            behavior_logprobs=grown(sample.behavior_logprobs, 0.0),
            advantages=grown(sample.advantages, 0.0),
            segment_starts=tuple(start + 1 if start >= end else start for start in sample.segment_starts),
            experts=None,  # the critic's forward, which this is for, has no recorded experts
        )


def _on_actions(values_A: NDArray[np.float32], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    laid = np.zeros(len(mask), np.float32)
    laid[mask] = values_A
    return laid


@pickled_fast
@dataclass(frozen=True, slots=True, eq=False)
class PlannedMicrobatch:
    """A microbatch by reference. samples: those of its pieces, by `PackedPiece.sample`."""

    plan: MicrobatchPlan
    samples: Mapping[int, SampleRef]

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens


Packed = Microbatch | PlannedMicrobatch
"""What the learner's methods take. A rank loads what is planned."""


def planned(plans: Sequence[MicrobatchPlan], refs: Sequence[SampleRef]) -> list[PlannedMicrobatch]:
    """Return the microbatches of `plans`, each with the samples that it needs."""
    return [PlannedMicrobatch(plan, {p.sample: refs[p.sample] for p in plan.pieces}) for plan in plans]


def loaded(microbatches: Sequence[Packed]) -> list[Microbatch]:
    """Return the microbatches; those that are planned are loaded, each of their samples once.

    Raises:
        DiskError: a trajectory is missing or damaged.
    """
    samples: dict[int, Sample] = {}  # segments of one sample may be in several microbatches
    found: list[Microbatch] = []
    for microbatch in microbatches:
        if isinstance(microbatch, Microbatch):
            found.append(microbatch)
            continue
        for place, ref in microbatch.samples.items():
            if place not in samples:
                samples[place] = ref.load()
        found.append(microbatch.plan.assemble(samples))
    return found


def runs_of(planned: Sequence[PlannedMicrobatch], columns: Sequence[Floats]) -> Iterator[ProximalRun]:
    """Yield whose action tokens the values of `columns` are, f[A] per microbatch."""
    for microbatch, column in zip(planned, columns, strict=True):
        start = 0
        for piece in microbatch.plan.pieces:
            attempt = microbatch.samples[piece.sample].attempt
            own = np.asarray(column[start : start + piece.num_actions], np.float32)
            yield ProximalRun(attempt.group_id, attempt.member, piece.first_place, own)
            start += piece.num_actions


@dataclass(frozen=True, slots=True, eq=False)
class Assessed:
    """What a rank found about the A action tokens of a microbatch.

    numbers: f32[A], by reference. num_bad: how many of them are not finite.
    sums: per piece of the microbatch, f64: the sum of the numbers over each run of `AttemptFacts.turns` that
        the piece overlaps, in order; () if nobody reads them.
    """

    numbers: Numbers
    num_bad: int
    sums: tuple[NDArray[np.float64], ...] = ()


def assessments(
    columns: Sequence[Floats], folder: str | None, *, summed_for: Sequence[PlannedMicrobatch] | None = None
) -> list[Assessed]:
    """Keep the columns, f[A] per microbatch, in `folder`, and return what is there.

    folder: None: in memory.
    summed_for: the microbatches, if sums over turns are needed; None: without sums.

    Raises:
        DiskError: the columns cannot be written.
    """
    columns = [np.asarray(column, np.float32) for column in columns]
    sums = [_sums_over_turns(*pair) for pair in zip(summed_for, columns, strict=True)] if summed_for else None
    return [
        Assessed(numbers, int((~np.isfinite(column)).sum()), () if sums is None else sums[place])
        for place, (numbers, column) in enumerate(zip(keep(columns, folder), columns, strict=True))
    ]


def columns_by_sample(
    refs: Sequence[SampleRef], microbatches: Sequence[PlannedMicrobatch], found: Sequence[Assessed]
) -> list[TokenColumn]:
    """Return each sample's column, from those of the microbatches that its pieces are in."""
    pieces: list[list[tuple[int, Numbers]]] = [[] for _ in refs]
    for microbatch, one in zip(microbatches, found, strict=True):
        start = 0
        for piece in microbatch.plan.pieces:
            pieces[piece.sample].append((piece.first_place, one.numbers.part(start, piece.num_actions)))
            start += piece.num_actions
    sizes = [sum(number for _, number in ref.shape.segments) for ref in refs]
    return [TokenColumn(size, tuple(own)) for size, own in zip(sizes, pieces, strict=True)]


def sums_by_sample(
    refs: Sequence[SampleRef], microbatches: Sequence[PlannedMicrobatch], found: Sequence[Assessed]
) -> list[NDArray[np.float64]]:
    """Return the sums of each sample's column over the runs of its `AttemptFacts.turns`, f64 each."""
    sums = [np.zeros(len(ref.attempt.turns)) for ref in refs]
    for microbatch, one in zip(microbatches, found, strict=True):
        for piece, own in zip(microbatch.plan.pieces, one.sums, strict=True):
            first, _ = _runs_within(refs[piece.sample].attempt, piece)
            sums[piece.sample][first : first + len(own)] += own
    return sums


def _sums_over_turns(
    microbatch: PlannedMicrobatch, column: NDArray[np.float32]
) -> tuple[NDArray[np.float64], ...]:
    sums, start = [], 0
    for piece in microbatch.plan.pieces:
        own = column[start : start + piece.num_actions].astype(np.float64)
        start += piece.num_actions
        _, cuts = _runs_within(microbatch.samples[piece.sample].attempt, piece)
        sums.append(np.add.reduceat(own, cuts) if len(own) else np.empty(0))
    return tuple(sums)


def _runs_within(attempt: AttemptFacts, piece: PackedPiece) -> tuple[int, NDArray[np.int64]]:
    """Return the first run of turns that a piece overlaps, and where each one begins in the piece."""
    ends = np.cumsum([length for _, length in attempt.turns])
    first = int(np.searchsorted(ends, piece.first_place, side="right"))
    last = int(np.searchsorted(ends, piece.first_place + piece.num_actions, side="left"))
    return first, np.concatenate([[0], ends[first:last] - piece.first_place])


def stored_teacher_logprobs(microbatches: Sequence[Packed]) -> list[Floats]:
    """Return per planned microbatch the stored log-probabilities of its action tokens by a teacher, f32[A].

    Raises:
        DiskError: a trajectory is missing or damaged.
        LearnerError: no teacher was asked about an attempt.
    """
    columns: dict[int, NDArray[np.float32]] = {}
    found: list[Floats] = []
    for microbatch in microbatches:
        assert isinstance(microbatch, PlannedMicrobatch), "what a teacher scored is stored with trajectories"
        for place, ref in microbatch.samples.items():
            if place not in columns:
                columns[place] = ref.teacher_logprobs()
        pieces = [
            columns[piece.sample][piece.first_place : piece.first_place + piece.num_actions]
            for piece in microbatch.plan.pieces
        ]
        found.append(np.concatenate([np.empty(0, np.float32), *pieces]))
    return found
