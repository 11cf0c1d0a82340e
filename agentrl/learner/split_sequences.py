"""Sequences that are split over several microbatches, on one rank or many: exchange of their tokens.

A loss, weight or rejection may depend on a whole sequence, and a trajectory with several segments may be
longer than a microbatch. The tokens of such sequences (usually few) are exchanged as constants. A computation
over a microbatch's own A tokens and these E together gives the same result as a microbatch with the whole
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.policy_losses import PolicyTokens
from agentrl.learner.batch import Microbatch, RestOfSequences
from agentrl.learner.model import Policy
from agentrl.learner.ranks import add_over_ranks, gather_over_ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """The tokens that one microbatch sends and reads.

    sent: bool[A], which of its action tokens it sends.
    read: i64[E], which of all sent tokens it reads. sequence_ids: i64[E], their sequences.
    """

    sent: Tensor
    read: Tensor
    sequence_ids: NDArray[np.int64]


class SplitSequences:
    """The exchange between the microbatches of all ranks of ONE update; empty if no sequence is split."""

    def __init__(self, windows: Sequence[_Window], *, is_empty: bool) -> None:
        self._windows = windows
        self.is_empty = is_empty

    @classmethod
    def find(cls, microbatches: Sequence[Microbatch]) -> SplitSequences:
        """Find the tokens of split sequences in all microbatches. A collective."""
        sent = [m.is_split[m.sequence_ids] for m in microbatches]
        if add_over_ranks({"sent": float(sum(s.sum() for s in sent))})["sent"] == 0:
            return cls.none(microbatches)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # A number unique to each microbatch over all ranks, to tell a microbatch's own tokens from the
        # others.
        homes = [rank + world_size * i for i in range(len(microbatches))]
        labels = _gather(
            [m.sample_indices[m.sequence_ids][s] for m, s in zip(microbatches, sent, strict=True)]
        )
        origins = _gather([np.full(s.sum(), home) for s, home in zip(sent, homes, strict=True)])
        return cls(
            [
                _window(m, s, labels, origins, home)
                for m, s, home in zip(microbatches, sent, homes, strict=True)
            ],
            is_empty=False,
        )

    @classmethod
    def none(cls, microbatches: Sequence[Microbatch]) -> SplitSequences:
        """Return the exchange between microbatches that hold whole sequences. Not a collective."""
        nothing = torch.zeros(0, dtype=torch.int64)
        sent = [torch.zeros(m.num_action_tokens, dtype=torch.bool) for m in microbatches]
        return cls([_Window(s, nothing, nothing.numpy()) for s in sent], is_empty=True)

    @property
    def sequence_ids(self) -> list[NDArray[np.int64]]:
        """Per microbatch i64[E]: index in its sample_indices of each token in other microbatches."""
        return [w.sequence_ids for w in self._windows]

    def gather(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Return per microbatch f64[E, C], the entries of the other microbatches' `tables` (f64[A, C] each).

        A collective.
        """
        num_columns = tables[0].shape[1]
        if self.is_empty:
            return [table.new_zeros(0, num_columns, dtype=torch.float64) for table in tables]
        own = torch.cat([table.double()[w.sent] for table, w in zip(tables, self._windows, strict=True)])
        gathered = gather_over_ranks(own.flatten()).view(-1, num_columns)
        return [gathered[w.read] for w in self._windows]


def _gather(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    gathered: NDArray[np.int64] = (
        gather_over_ranks(torch.from_numpy(np.concatenate(columns)).double()).long().numpy()
    )
    return gathered


def _window(
    microbatch: Microbatch,
    sent: NDArray[np.bool_],
    labels: NDArray[np.int64],
    origins: NDArray[np.int64],
    home: int,
) -> _Window:
    own = {
        int(index): place
        for place, index in enumerate(microbatch.sample_indices)
        if microbatch.is_split[place]
    }
    read = np.flatnonzero(np.isin(labels, list(own)) & (origins != home))
    ids = np.array([own[int(label)] for label in labels[read]], np.int64)
    return _Window(torch.from_numpy(sent), torch.from_numpy(read), ids)


@torch.no_grad()
def score_rest(
    policy: Policy, microbatches: Sequence[Microbatch], *, temperature: float
) -> list[Tensor] | None:
    """Return per microbatch the policy's log-probabilities of the rest of its sequences, f64[E]. A
    collective.

    None if no rank has split sequences; otherwise this costs one more forward.
    """
    split = SplitSequences.find(microbatches)
    if split.is_empty:
        return None
    devices = [policy.device] if policy.device.type == "cuda" else []
    # Restored afterwards, so the forward with gradient draws the same dropout.
    with torch.random.fork_rng(devices=devices):
        own = [
            policy.score_actions(microbatch, temperature=temperature).cpu()[:, None]
            for microbatch in microbatches
        ]
    policy.reshard()
    return [table[:, 0] for table in split.gather(own)]


@dataclass(frozen=True, slots=True, eq=False)
class LossColumns:
    """What the policy loss and its weights read of each token: A of the microbatch, or A + E with the rest.

    behavior: f[any], log-probabilities. weights: f[any], importance weights.
    """

    tokens: PolicyTokens
    behavior: Tensor
    weights: Tensor

    def with_rest(self, rest: RestOfSequences, *, policy: Tensor, proximal: Tensor) -> LossColumns:
        """Return the columns of whole sequences: these A tokens, then the E loss tokens of `rest` as
        constants.

        policy, proximal: log-probabilities of all tokens of the rest.
        """
        accepted = torch.from_numpy(rest.accepted)

        def join(own: Tensor, column: NDArray[np.generic] | Tensor) -> Tensor:
            return torch.cat([own, torch.as_tensor(column)[accepted].to(own)])

        tokens = PolicyTokens(
            policy=join(self.tokens.policy, policy),
            proximal=join(self.tokens.proximal, proximal),
            advantages=join(self.tokens.advantages, rest.advantages),
            sequence_ids=join(self.tokens.sequence_ids, rest.sequence_ids),
            is_selected=None
            if self.tokens.is_selected is None
            else join(self.tokens.is_selected, rest.is_selected),
        )
        return LossColumns(
            tokens, join(self.behavior, rest.behavior_logprobs), join(self.weights, rest.weights)
        )


def sum_own(values: Tensor, num_own: int) -> Tensor:
    """Return the sum of the first `num_own` values, with the gradient of the sum of all.

    The loss of a token in another microbatch depends on the tokens here, too. Its value is counted in its own
    microbatch; here 0 is added with that gradient. The gradients over all microbatches then sum to the full
    one.
    """
    others = values[num_own:].sum()
    return values[:num_own].sum() + (others - others.detach())


def whole_loss_ids(microbatch: Microbatch) -> Tensor:
    """Return i64[A + E], the sequence of each token of the loss_mask here, then of those in other
    microbatches.
    """
    own = microbatch.sequence_ids[microbatch.loss_mask]
    num_sequences = len(microbatch.sample_indices)
    num_elsewhere = microbatch.loss_lengths - np.bincount(own, minlength=num_sequences)
    return torch.from_numpy(np.concatenate([own, np.repeat(np.arange(num_sequences), num_elsewhere)]))
