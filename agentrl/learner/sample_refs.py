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

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.proximal_files import ProximalRun
from agentrl.errors import LearnerError
from agentrl.learner.batch import Floats, Microbatch, Sample, SampleShape
from agentrl.learner.packing import MicrobatchPlan
from agentrl.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class SampleRef:
    """A trajectory to learn from. Columns per action token are in the order of positions.

    index: its index in the batch.
    attempt: its facts, among them where the trajectory is stored.
    advantages: f32[R], equal over runs of action tokens; run_lengths: i64[R], tokens of each run.
    dropped_versions: tokens of these versions are not in the loss.
    values, returns: f32[A], see `Sample`.
    has_end: the sample gets one more action token behind the segment of its last sampled token, so that the
        value before it is the value at the end.
    """

    index: int
    attempt: AttemptFacts
    advantages: NDArray[np.float32]
    run_lengths: NDArray[np.int64]
    dropped_versions: tuple[int, ...] = ()
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    has_end: bool = False

    @classmethod
    def plain(cls, index: int, attempt: AttemptFacts, *, advantage: float = 0.0) -> SampleRef:
        """Return a sample with one advantage for all of its action tokens."""
        lengths = np.array([attempt.num_action_tokens], np.int64)
        return cls(index, attempt, np.array([advantage], np.float32), lengths)

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
            DiskError: the trajectory is missing or damaged.
        """
        source = self.attempt.source
        stored = source if isinstance(source, Trajectory) else source.load(has_messages=False)
        mask = stored.action_mask
        sample = Sample(
            self.index,
            stored.token_ids,
            mask,
            mask & ~np.isin(stored.versions, self.dropped_versions) if self.dropped_versions else mask,
            stored.behavior_logprobs,
            _on_actions(np.repeat(self.advantages, self.run_lengths), mask),
            stored.segment_starts,
            values=None if self.values is None else _on_actions(self.values, mask),
            returns=None if self.returns is None else _on_actions(self.returns, mask),
            experts=stored.experts_of_tokens,
            segment_names=self.attempt.segment_names,
        )
        return self._with_end(sample) if self.has_end else sample

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


def end_place(attempt: AttemptFacts) -> tuple[int, int]:
    """Return the segment of the token sampled last, and the action tokens up to that segment's end."""
    last_turn = max(turn for turn, _ in attempt.turns)
    ends = np.cumsum([length for _, length in attempt.turns])
    last = max(end for (turn, _), end in zip(attempt.turns, ends, strict=True) if turn == last_turn)
    segment_ends = np.cumsum([number for _, number in attempt.segments])
    segment = int(np.searchsorted(segment_ends, last))
    return segment, int(segment_ends[segment])


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


def lay_by_sample(
    refs: Sequence[SampleRef], microbatches: Sequence[PlannedMicrobatch], columns: Sequence[Floats]
) -> list[NDArray[np.float32]]:
    """Return each sample's values of `columns`, f[A] per microbatch: f32[A] in the order of positions."""
    laid = [np.zeros(sum(n for _, n in ref.shape.segments), np.float32) for ref in refs]
    for microbatch, column in zip(microbatches, columns, strict=True):
        start = 0
        for piece in microbatch.plan.pieces:
            own = column[start : start + piece.num_actions]
            laid[piece.sample][piece.first_place : piece.first_place + piece.num_actions] = own
            start += piece.num_actions
    return laid


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
