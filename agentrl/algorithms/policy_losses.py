"""Policy losses per action token, before aggregation.

rho = exp(policy - proximal) throughout; sg(x) is x without gradient (stop-gradient). The importance weight of
the off-policy correction is not applied here: the caller multiplies these losses by it.

A loss may depend on whole sequences (`sequence_ids`); tokens of a sequence that are in other microbatches are
given as constants. It must not depend on anything wider, or it would depend on how the batch was packed.
Whatever needs the whole batch is computed before the update (`agentrl.algorithms.selection`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentrl.algorithms.corrections import importance_weights, raw_weights
from agentrl.algorithms.log_ratios import bounded, distance
from agentrl.algorithms.rules import ClipConfig, WeightRule


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """The loss tokens of one microbatch and the rest of their sequences, all of length A.

    policy: f[A], log-probabilities of the current policy. Tokens of this microbatch have a gradient; tokens
    that are in other microbatches are constants.
    proximal: f[A], log-probabilities of the proximal policy, without gradient.
    advantages: f[A].
    sequence_ids: i64[A], any labels, equal for the tokens of one sequence. Every sequence is complete.
    is_selected: bool[A], tokens that a rule over the whole batch selected before the update; None if the loss
    has no such rule.
    """

    policy: Tensor
    proximal: Tensor
    advantages: Tensor
    sequence_ids: Tensor
    is_selected: Tensor | None = None

    def log_ratios(self) -> Tensor:
        """Return log rho, f[A], clamped, with gradient."""
        return bounded(self.policy - self.proximal.detach())

    def sequence_means(self, values: Tensor) -> Tensor:
        """Return f[A], for each token the mean of `values` (f[A]) over its sequence."""
        labels, index, lengths = torch.unique(self.sequence_ids, return_inverse=True, return_counts=True)
        return (values.new_zeros(len(labels)).index_add(0, index, values) / lengths)[index]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Loss and clip masks per token.

    losses_A: f[A], with gradient. ratios_A: f[A], detached.
    is_clipped_*_A: bool[A], True where that bound determined the loss.
    """

    losses_A: Tensor
    ratios_A: Tensor
    is_clipped_low_A: Tensor
    is_clipped_high_A: Tensor
    is_clipped_dual_A: Tensor

    @classmethod
    def of(
        cls, losses: Tensor, ratios: Tensor, low: Tensor | None = None, high: Tensor | None = None
    ) -> PolicyLoss:
        """Return a loss without a dual clip. A mask of None means that the loss has no such bound."""
        never = torch.zeros_like(ratios, dtype=torch.bool)
        return cls(
            losses, ratios.detach(), never if low is None else low, never if high is None else high, never
        )

    def first(self, count: int) -> PolicyLoss:
        """Return the loss of the first `count` tokens."""
        return PolicyLoss(*(getattr(self, field.name)[:count] for field in fields(self)))


def ppo_clip(tokens: PolicyTokens, *, clip: ClipConfig) -> PolicyLoss:
    """Return max(-rho A, -clip(rho) A). With a dual clip, the loss is at most -dual * A where A < 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2019, arXiv:1912.09729, eq. 5.
    """
    return _clipped(torch.exp(tokens.log_ratios()), tokens.advantages, clip)


def gspo(tokens: PolicyTokens, *, clip: ClipConfig) -> PolicyLoss:
    """Return the clipped loss of the sequence's ratio s = exp(mean_t log rho), shared by all of its tokens.

    The ratio of each token has the value s and the gradient s * grad log policy_t. So each token's own
    advantage weights its own gradient. Typical bounds are near 1e-4, not 0.2, because a mean over a sequence
    moves little.

    Source: Zheng et al. 2025, arXiv:2507.18071 (the token form: GSPO-token).
    """
    log_ratios = tokens.log_ratios()
    means = tokens.sequence_means(log_ratios.detach())
    # Value s, gradient s * grad log policy_t: log_ratios - sg(log_ratios) is 0 but carries the gradient.
    return _clipped(torch.exp(means + log_ratios - log_ratios.detach()), tokens.advantages, clip)


def gmpo(tokens: PolicyTokens, *, clip: ClipConfig) -> PolicyLoss:
    """Return -A times the geometric mean of the sequence's ratios.

    Each ratio is clipped only on the side where A would push it further out. The bounds are on the log-ratio,
    [-low, high] (0.4 in the paper).

    Source: Zhao et al. 2025, arXiv:2507.20673.
    """
    log_ratios = tokens.log_ratios()
    is_low = (log_ratios < -clip.low) & (tokens.advantages < 0)
    is_high = (log_ratios > clip.high) & (tokens.advantages > 0)
    clipped = torch.where(is_low, -clip.low, torch.where(is_high, clip.high, log_ratios))
    return PolicyLoss.of(
        -torch.exp(tokens.sequence_means(clipped)) * tokens.advantages, torch.exp(log_ratios), is_low, is_high
    )


def cispo(tokens: PolicyTokens, *, clip: ClipConfig) -> PolicyLoss:
    """Return -sg(clip(rho)) A log policy. Unlike PPO's clip, bounding the weight never removes a token's
    gradient.

    Source: MiniMax 2025, arXiv:2506.13585.
    """
    ratios = torch.exp(tokens.log_ratios().detach())
    bounded = ratios.clamp(1 - clip.low, 1 + clip.high)
    return PolicyLoss.of(
        -bounded * tokens.advantages * tokens.policy, ratios, ratios < 1 - clip.low, ratios > 1 + clip.high
    )


def reinforce(tokens: PolicyTokens, *, weight: WeightRule) -> PolicyLoss:
    """Return -sg(w) A log policy: the policy gradient with an importance weight w, computed from rho by
    `weight`.

    Source: Williams 1992, "Simple statistical gradient-following algorithms"; off-policy: Degris et al. 2012,
    arXiv:1205.4839.
    """
    log_ratios = tokens.log_ratios().detach()
    weights, raw = (
        importance_weights(log_ratios, tokens.sequence_ids, weight),
        raw_weights(log_ratios, tokens.sequence_ids, weight),
    )
    low = None if weight.floor is None else raw < weight.floor
    return PolicyLoss.of(
        -weights * tokens.advantages * tokens.policy, torch.exp(log_ratios), low, raw > weight.cap
    )


def gpg(tokens: PolicyTokens) -> PolicyLoss:
    """Return -A log policy, without an importance ratio.

    Source: Chu et al. 2025, arXiv:2504.02546.
    """
    return PolicyLoss.of(-tokens.advantages * tokens.policy, torch.exp(tokens.log_ratios().detach()))


def sapo(tokens: PolicyTokens, *, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """Return -A 4/tau sigmoid(tau (rho - 1)), a soft gate in place of PPO's hard clip; tau depends on the
    sign of A.

    Source: Gao et al. 2025, arXiv:2511.20347.
    """
    ratios = torch.exp(tokens.log_ratios())
    taus = torch.where(tokens.advantages > 0, tau_positive, tau_negative).to(ratios)
    return PolicyLoss.of(-4 / taus * torch.sigmoid(taus * (ratios - 1)) * tokens.advantages, ratios)


def clip_cov(tokens: PolicyTokens, *, clip: ClipConfig) -> PolicyLoss:
    """Return `ppo_clip`, but 0 for tokens selected by their covariance (see `agentrl.algorithms.selection`).

    Source: Cui et al. 2025, arXiv:2505.22617 (Clip-Cov).
    """
    assert tokens.is_selected is not None, "clip_cov needs its selection"
    loss = ppo_clip(tokens, clip=clip)
    others = ~tokens.is_selected
    return PolicyLoss(
        torch.where(tokens.is_selected, 0.0, loss.losses_A),
        loss.ratios_A,
        loss.is_clipped_low_A & others,
        loss.is_clipped_high_A & others,
        loss.is_clipped_dual_A & others,
    )


def kl_cov(tokens: PolicyTokens, *, coefficient: float) -> PolicyLoss:
    """Return -rho A, plus coefficient * |log rho| for tokens selected by their covariance (see
    `agentrl.algorithms.selection`).

    At the first update of a step log rho is 0. The penalty's gradient is then 0 too, whatever the sign of the
    rounding noise (see `distance`).

    Source: Cui et al. 2025, arXiv:2505.22617 (KL-Cov). The absolute log-ratio as the divergence of one token
    follows the authors' code.
    """
    assert tokens.is_selected is not None, "kl_cov needs its selection"
    log_ratios = tokens.log_ratios()
    ratios = torch.exp(log_ratios)
    penalties = torch.where(tokens.is_selected, coefficient * distance(log_ratios), 0.0)
    return PolicyLoss.of(penalties - ratios * tokens.advantages, ratios)


def dppo_tv(
    tokens: PolicyTokens, *, delta_low: float, delta_high: float, cap: float = math.inf
) -> PolicyLoss:
    """Return -sg(min(rho, cap)) A log policy, but 0 where A pushes a token whose probability has already
    moved too far.

    The bounds are on the difference of probabilities, exp(policy) - exp(proximal): at most delta_high for A >
    0, at least -delta_low for A < 0. Unlike a bound on the ratio, they let a rare token multiply its
    probability and stop a frequent one from losing half of it. `cap` bounds the weight of a rare token.

    Source: Qi et al. 2026, arXiv:2602.04879 (binary total variation; truncation: section 5.4).
    """
    ratios = torch.exp(tokens.log_ratios().detach())
    moved = (torch.exp(tokens.policy) - torch.exp(tokens.proximal)).detach()
    is_low = (moved < -delta_low) & (tokens.advantages < 0)
    is_high = (moved > delta_high) & (tokens.advantages > 0)
    losses = -ratios.clamp(max=cap) * tokens.advantages * tokens.policy
    return PolicyLoss.of(torch.where(is_low | is_high, 0.0, losses), ratios, is_low, is_high)


def opsm_keeps(tokens: PolicyTokens, behavior: Tensor, *, delta: float) -> Tensor:
    """Return bool[A], False for tokens with A < 0 in a sequence with mean_t(behavior - policy) > delta.

    Negative samples that the current policy would hardly produce add mostly noise. `behavior` (f[A]) are the
    log-probabilities reported by the server at sampling time. They include staleness and the server's own
    numerics, so the mask can apply at the first update of a step too. Because the current policy decides, the
    mask is computed with the loss and not with the other rejections. As in the paper, dropped tokens still
    count in the denominator.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556 (off-policy sequence masking).
    """
    drift = tokens.sequence_means(bounded(behavior - tokens.policy.detach()))
    return ~((tokens.advantages < 0) & (drift > delta))


def _clipped(ratios: Tensor, advantages: Tensor, clip: ClipConfig) -> PolicyLoss:
    plain = -ratios * advantages
    clipped = -ratios.clamp(1 - clip.low, 1 + clip.high) * advantages
    # Schulman et al. 2017, eq. 7: the pessimistic bound. Ties count as not clipped.
    losses = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    is_negative = advantages < 0
    is_dual = torch.zeros_like(is_negative)
    if clip.dual is not None:
        # Ye et al. 2019, eq. 5: for A < 0 the loss -rho A grows without bound in rho; cap it at -dual * A.
        bound = -clip.dual * advantages
        is_dual = is_negative & (losses > bound)
        losses = torch.where(is_negative, torch.minimum(losses, bound), losses)
    return PolicyLoss(losses, ratios.detach(), is_clipped & is_negative, is_clipped & ~is_negative, is_dual)
