"""The loss of microbatches without learning from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from agentrl.algorithms.aggregation import UpdateCounts
from agentrl.learner.batch import Microbatch
from agentrl.learner.loss import LossPart, finish_metrics
from agentrl.learner.model import Policy
from agentrl.learner.ranks import add_over_ranks
from agentrl.learner.step import count_update


class Objective(Protocol):
    """Computes a microbatch's part of a loss: cross-entropy of tokens, or the Bradley-Terry loss of pairs."""

    def part(self, policy: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart: ...


@torch.no_grad()
def measure(policy: Policy, objective: Objective, microbatches: Sequence[Microbatch]) -> dict[str, float]:
    """Return loss and metrics over the microbatches of ALL ranks, as an update would. A collective.

    Dropout is off.
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
