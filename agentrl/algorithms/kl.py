"""Estimators of KL(policy || reference) per token, for tokens sampled from the policy.

Source: Schulman 2020, "Approximating KL divergence" (k1, k2, k3). Used as a loss on such tokens, k1 has a
gradient of zero in expectation, k2 has the gradient of the KL, and k3 has a biased one. `k3_k2grad` has the
low-variance value of k3 and the unbiased gradient of k2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from agentrl.algorithms.log_ratios import bounded, distance

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return log policy - log ref. For metrics and rewards only: as a loss its expected gradient is zero."""
    return policy_A - ref_A


def k2(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return half the squared log-ratio."""
    return k1(policy_A, ref_A).square() / 2


def k3(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return exp(-k1) - 1 + k1, never negative; k1 is clamped to [-20, 20], and the gradient is 0 outside."""
    log_ratio = bounded(k1(policy_A, ref_A))
    return torch.exp(-log_ratio) - 1 + log_ratio


def absolute(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return the absolute log-ratio, or 0 where it is only rounding noise (policy and reference are
    equal).
    """
    return distance(k1(policy_A, ref_A))


def k3_k2grad(policy_A: Tensor, ref_A: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2."""
    surrogate = k2(policy_A, ref_A)
    return k3(policy_A, ref_A).detach() + (surrogate - surrogate.detach())


KL_ESTIMATORS: Mapping[str, KLEstimator] = {"k2": k2, "k3": k3, "abs": absolute, "k3_k2grad": k3_k2grad}
"""Registered name (`algorithm.kl.estimator`) -> estimator usable in a loss."""


def off_policy_kl(name: str, policy_A: Tensor, ref_A: Tensor, proximal_A: Tensor) -> Tensor:
    """Return policy / proximal times the estimate, for tokens that the proximal policy sampled.

    With k3 the gradient also flows through the ratio: the product then has the exact gradient of KL(policy ||
    reference), which k3 alone does not have. The ratio of the other estimators is detached and only weights
    their own gradient.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556 (unbiased KL estimate).
    """
    ratios = torch.exp(bounded(policy_A - proximal_A.detach()))
    estimate = KL_ESTIMATORS[name](policy_A, ref_A)
    return ratios * estimate if name == "k3" else ratios.detach() * estimate
