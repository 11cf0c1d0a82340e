"""Counterfactuals: the effect of other corrections on the same update, measured by their gradients.

The gradients are compared, then discarded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.learner.batch import Floats, Microbatch, Mode, ScoredMicrobatch
from agentrl.learner.correction import Corrector
from agentrl.learner.loss import PolicyObjective
from agentrl.learner.model import Policy
from agentrl.learner.optimizer import gradient_norm, inner_product
from agentrl.learner.ranks import RankPlace, add_over_ranks
from agentrl.learner.step import count_update


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """One correction on one batch, before the batch's first update.

    kept: share of the action tokens that reach the gradient.
    ess: (sum w)^2 / (n sum w^2) of the applied weights, in (0, 1]; 0 if no token is kept. n counts all action
    tokens, so a rejected token lowers it.
    weight_mean: over the tokens of the loss; NaN if there are none.
    loss, grad_norm: of the policy term.
    cosine: between its gradient and the reference gradient; NaN if one of them is 0.
    """

    kept: float
    ess: float
    weight_mean: float
    loss: float
    grad_norm: float
    cosine: float


def compare(
    policy: Policy,
    place: RankPlace,
    microbatches: Sequence[Microbatch],
    proximal: Sequence[Floats],
    reference: Sequence[Microbatch],
    variants: Mapping[str, AlgorithmConfig],
    *,
    temperature: float,
) -> dict[str, Counterfactual]:
    """Return the Counterfactual of each variant. A collective.

    No weight, optimizer state or random state changes.

    Args:
        microbatches, proximal: this rank's part of the batch, and the proximal log-probabilities of its
            action tokens, f[A] each.
        reference: microbatches whose on-policy gradient (ratio 1, no weights, no rejection) is the direction
            to compare with.
        variants: name -> algorithm. Its KL and entropy terms are left out, since no correction changes only
            them.
    """
    policy.module.eval()  # without dropout equal batches have equal gradients
    run = _Gradients(policy, place, temperature)
    plain = _policy_term(next(iter(variants.values()))).model_copy(update={"correction": _NO_CORRECTION})
    _, direction = run.of(_score(reference, [None] * len(reference), plain), plain, "on_policy")
    found = {}
    for name, algorithm in variants.items():
        term = _policy_term(algorithm)
        items = _score(microbatches, proximal, term)
        facts, gradient = run.of(items, term, "decoupled")
        found[name] = Counterfactual(**_weights(items), **facts, cosine=_cosine(gradient, direction))
    return found


_NO_CORRECTION = AlgorithmConfig().correction.model_copy(update={"weight": "none"})


def _policy_term(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    kl = algorithm.kl.model_copy(update={"coefficient": 0.0})
    return algorithm.model_copy(update={"kl": kl, "entropy_coefficient": 0.0})


def _score(
    microbatches: Sequence[Microbatch], proximal: Sequence[Floats | None], algorithm: AlgorithmConfig
) -> list[ScoredMicrobatch]:
    corrections = Corrector(algorithm).correct(microbatches, proximal)
    return [
        ScoredMicrobatch(m, p, None, c) for m, p, c in zip(microbatches, proximal, corrections, strict=True)
    ]


def _weights(items: Sequence[ScoredMicrobatch]) -> dict[str, float]:
    applied = torch.cat(
        [torch.tensor(i.correction.weights).double()[torch.tensor(i.correction.accepted)] for i in items]
    )
    local = {
        "actions": float(sum(i.microbatch.num_action_tokens for i in items)),
        "accepted": float(len(applied)),
        "kept": float((applied > 0).sum()),
        "weight": float(applied.sum()),
        "square": float(applied.square().sum()),
    }
    sums = add_over_ranks(local)
    actions = max(sums["actions"], 1.0)
    return {
        "kept": sums["kept"] / actions,
        "ess": sums["weight"] ** 2 / (actions * sums["square"]) if sums["square"] > 0 else 0.0,
        "weight_mean": sums["weight"] / sums["accepted"] if sums["accepted"] > 0 else math.nan,
    }


class _Gradients:
    """Computes the gradient of an objective over microbatches, and clears it from the weights."""

    def __init__(self, policy: Policy, place: RankPlace, temperature: float) -> None:
        self._policy = policy
        self._place = place
        self._temperature = temperature

    def of(
        self, items: Sequence[ScoredMicrobatch], algorithm: AlgorithmConfig, mode: Mode
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Return {loss, grad_norm} and the gradient, sharded like the weights.

        The gradient is empty if no rank has loss tokens.
        """
        counts = count_update(items)
        if counts.loss_tokens == 0:
            return {"loss": 0.0, "grad_norm": 0.0}, []
        objective = PolicyObjective(algorithm, mode, temperature=self._temperature)
        loss = 0.0
        for item, rest in zip(items, objective.score_rest(self._policy, items), strict=True):
            part = objective.part(self._policy, item, counts, rest)
            # FSDP averages over ranks, but the parts must be summed (see `Stepper`).
            (part.loss * self._place.mesh.size()).backward()
            loss += float(part.loss.detach())
        parameters = [p for p in self._policy.module.parameters() if p.grad is not None]
        norm = float(gradient_norm(parameters))
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return {**add_over_ranks({"loss": loss}), "grad_norm": norm}, gradients


def _cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    if not left or not right:
        return math.nan
    norms = math.sqrt(inner_product(left, left) * inner_product(right, right))
    return inner_product(left, right) / norms if norms > 0 else math.nan
