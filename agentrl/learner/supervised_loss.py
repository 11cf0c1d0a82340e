"""Losses without rewards: cross-entropy of tokens, and the Bradley-Terry loss of preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.algorithms.aggregation import Aggregation, UpdateCounts, token_scales
from agentrl.learner.batch import Microbatch
from agentrl.learner.loss_part import LossPart, LossTokens, finish_metrics
from agentrl.learner.model import Policy
from agentrl.learner.ranks import add_over_ranks
from agentrl.learner.reward_model import score_segments
from agentrl.learner.step import count_update


class Objective(Protocol):
    """Computes a microbatch's part of a loss."""

    def part(self, policy: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts`
        describes.
        """
        ...


class SupervisedObjective:
    """Cross-entropy, averaged over all loss tokens of the update."""

    def part(self, policy: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart:
        tokens = LossTokens.of(microbatch, policy.device)
        logprobs, entropies = policy.score(microbatch, tokens.predictors, tokens.targets, temperature=1.0)
        scales = token_scales(Aggregation("token_mean"), tokens.sequence_ids, counts, dtype=logprobs.dtype)
        loss = -(scales * logprobs).sum()
        return LossPart(loss, {"loss": loss, "entropy": entropies.sum()}, {})


class PreferenceObjective:
    """The Bradley-Terry loss, averaged over all pairs of the update.

    A pair is one sample of two segments, the preferred one first (`Sample.pair`).
    It is never split over microbatches and is counted once, so neither packing nor the number of ranks
    matters.
    """

    def part(self, policy: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart:
        scores_P2 = score_segments(policy, microbatch).view(-1, 2)
        chosen, rejected = scores_P2.unbind(dim=1)
        loss = bradley_terry(chosen, rejected).sum() / counts.sequences
        sums = {
            "loss": loss,
            "accuracy": (chosen > rejected).sum(),  # a tie counts as wrong
            "margin": (chosen - rejected).sum(),
            "chosen_score": chosen.sum(),
            "rejected_score": rejected.sum(),
        }
        return LossPart(loss, sums, {})


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return -log sigmoid(s_chosen - s_rejected) per pair, f[P]: its negative log-likelihood.

    Source: Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1.
    """
    return -logsigmoid(chosen_P - rejected_P)


@torch.no_grad()
def measure(policy: Policy, objective: Objective, microbatches: Sequence[Microbatch]) -> dict[str, float]:
    """Return loss and metrics over the microbatches of ALL ranks, as an update would. A collective.

    Dropout is off, and nothing is learned.
    """
    policy.module.eval()
    counts = count_update(microbatches)
    totals: dict[str, float] = {}
    for microbatch in microbatches:
        for name, value in objective.part(policy, microbatch, counts).sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    policy.reshard()
    means = finish_metrics(add_over_ranks(totals), {}, num_tokens=counts.loss_tokens)
    return {**means, "num_tokens": float(counts.loss_tokens), "num_sequences": float(counts.sequences)}
