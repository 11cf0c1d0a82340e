"""What every loss reads from a microbatch (`LossTokens`) and returns for it (`LossPart`), and the metrics of
an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.corrections import correction_metrics
from agentrl.learner.batch import Floats, Microbatch

CORRECTION = "correction/"
"""Prefix of sums and maxima that `correction_metrics` finishes."""
REJECTED = "rejected/"
"""Prefix of the counts of rejected tokens, by stage."""
ACTION_TOKENS = "action_tokens"
_TOTALS = ("loss", "policy_loss")
"""Sums that are already complete: their terms are scaled."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The A loss tokens of a microbatch, on the device.

    Tokens outside the loss are absent instead of masked: no logits are computed for them. Otherwise an
    infinite logit times a mask of 0 would put NaN into the gradient.

    predictors, targets, sequence_ids: i64[A], see `Microbatch`.
    chosen: bool[all action tokens], True for the loss tokens.
    """

    predictors: Tensor
    targets: Tensor
    sequence_ids: Tensor
    chosen: Tensor

    @classmethod
    def of(
        cls, microbatch: Microbatch, device: torch.device, accepted: NDArray[np.bool_] | None = None
    ) -> LossTokens:
        """Return the tokens that a correction accepted (bool[all action tokens]), or those of the
        loss_mask.
        """
        chosen = torch.tensor(microbatch.loss_mask if accepted is None else accepted)
        columns = (microbatch.predictor_positions, microbatch.targets, microbatch.sequence_ids)
        predictors, targets, sequence_ids = (torch.tensor(column)[chosen].to(device) for column in columns)
        return cls(predictors, targets, sequence_ids, chosen)

    def select(self, column: Floats, like: Tensor) -> Tensor:
        """Return f[A], the loss tokens of a column over all action tokens, in dtype and device of `like`."""
        return torch.tensor(column)[self.chosen].to(like)


@dataclass(frozen=True, slots=True, eq=False)
class LossPart:
    """One microbatch's part of the loss (with gradient), sums over its loss tokens, and maxima; 0-d, by
    name.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def finish_metrics(
    sums: Mapping[str, float], maxima: Mapping[str, float], *, num_tokens: int
) -> dict[str, float]:
    """Turn global sums and maxima into metrics.

    The losses are already complete sums, rejected tokens become shares of all action tokens, and all other
    sums become means over loss tokens.
    """
    own = _without(sums, CORRECTION, REJECTED)
    metrics = {name: value if name in _TOTALS else value / num_tokens for name, value in own.items()}
    metrics |= _without(maxima, CORRECTION)
    correction_sums = _only(sums, CORRECTION)
    if correction_sums:
        metrics |= {
            CORRECTION + k: v
            for k, v in correction_metrics(correction_sums, _only(maxima, CORRECTION)).items()
        }
    rejected = _only(sums, REJECTED)
    if rejected:
        action_tokens = max(rejected.pop(ACTION_TOKENS), 1.0)
        metrics |= {CORRECTION + REJECTED + stage: count / action_tokens for stage, count in rejected.items()}
    return metrics


def _without(values: Mapping[str, float], *prefixes: str) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(prefixes)}


def _only(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
