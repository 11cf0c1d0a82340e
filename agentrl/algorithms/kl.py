"""Estimators of KL(policy || reference) per token, for tokens sampled from the policy.

Source: Schulman 2020, "Approximating KL divergence" (k1, k2, k3). As a loss, the gradient of k1 is zero in expectation, that of
k2 is right, that of k3 biased; `k3_k2grad` reports the low-variance value and follows the right gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from agentrl.algorithms.log_ratios import bounded, distance

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return log policy - log ref. For reports and rewards only: useless as a loss."""
    return policy_A - ref_A


def k2(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return half the squared log-ratio."""
    return k1(policy_A, ref_A).square() / 2


def k3(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return exp(-k1) - 1 + k1, never negative; with k1 clamped to [-20, 20], so that beyond there is no gradient."""
    log_ratio = bounded(k1(policy_A, ref_A))
    return torch.exp(-log_ratio) - 1 + log_ratio


def absolute(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return the absolute log-ratio, and 0 where it is rounding noise, as at the start, where policy and reference are one."""
    return distance(k1(policy_A, ref_A))


def k3_k2grad(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2."""
    surrogate = k2(policy_A, ref_A)
    return k3(policy_A, ref_A).detach() + (surrogate - surrogate.detach())


KL_ESTIMATORS: Mapping[str, KLEstimator] = {"k2": k2, "k3": k3, "abs": absolute, "k3_k2grad": k3_k2grad}
"""Registered name (`algorithm.kl.estimator`) -> estimator usable in a loss."""


def off_policy_kl(name: str, policy_A: Tensor, ref_A: Tensor, proximal_A: Tensor) -> Tensor:
    """Return policy / proximal times the estimate, for tokens that the proximal policy sampled.

    Through k3 the gradient runs in the ratio too: together they have the exact gradient of KL(policy || reference), which k3 alone
    has not. The others have the right gradient (or none) by themselves, and the ratio only weighs it.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556 (unbiased KL estimate).
    """
    ratios = torch.exp(bounded(policy_A - proximal_A.detach()))
    estimate = KL_ESTIMATORS[name](policy_A, ref_A)
    return ratios * estimate if name == "k3" else ratios.detach() * estimate
