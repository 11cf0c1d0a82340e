"""On-policy distillation: advantages from a teacher's log-probabilities of the tokens that the policy
sampled.

Axes: A action tokens of the batch in sampling order, N trajectories.
"""

from __future__ import annotations

from torch import Tensor

from agentrl.algorithms.advantages.scan import sums_to_go


def teacher_advantages(kl_A: Tensor, num_tokens_N: Tensor, *, coefficient: float, gamma: float) -> Tensor:
    """Return -coefficient * (kl_t + gamma * kl_{t+} + gamma^2 ...) of every action token, f[A].

    With gamma 1 and no other reward, the expected policy gradient is exactly that of -coefficient * KL(policy
    || teacher) of whole trajectories; with gamma 0 it is that of the KL of each next token, given what the
    policy wrote before.

    Args:
        kl_A: f[A], log policy - log teacher of the sampled token, the estimate k1 of the reverse KL, in nats.
        num_tokens_N: i64[N], action tokens of each trajectory; they sum to A.
        coefficient: > 0. gamma: in [0, 1], discount per action token.

    Source: Agarwal et al. 2024, arXiv:2306.13649 (on-policy data, reverse KL); Gu et al. 2024,
        arXiv:2306.08543, section 2.2 (policy gradient of the reverse KL); Lu and Thinking Machines Lab 2025,
        "On-Policy Distillation" (per-token advantage, gamma 0).
    """
    return -coefficient * (sums_to_go(kl_A, num_tokens_N, gamma) if gamma > 0 else kl_A)
