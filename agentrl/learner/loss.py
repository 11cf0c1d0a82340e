"""The policy's loss on one scored microbatch: policy loss with importance weights, KL, entropy bonus.

A loss tokens of the microbatch; E loss tokens of its sequences that are in other microbatches (see
`split_sequences`). `behavior`, `proximal`, `policy` and `ref` are log-probabilities, f[A].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.aggregation import Aggregation, UpdateCounts, token_scales
from agentrl.algorithms.corrections import CorrectionStatistics, correction_statistics, largest, log_products
from agentrl.algorithms.kl import KL_ESTIMATORS, off_policy_kl
from agentrl.algorithms.policy_losses import PolicyLoss, PolicyTokens, opsm_keeps
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.learner.batch import Mode, ScoredMicrobatch
from agentrl.learner.correction import Corrector
from agentrl.learner.loss_part import ACTION_TOKENS, CORRECTION, REJECTED, LossPart, LossTokens
from agentrl.learner.model import Policy
from agentrl.learner.policy_loss import bind_policy_loss, sees_sequences
from agentrl.learner.split_sequences import LossColumns, score_rest, sum_own


class PolicyObjective:
    """The decoupled, bypass or on-policy objective, with KL to the reference and an entropy bonus:

    sum_t scale_t (w_t loss(rho_t, A_t) + beta w_t KL_t - c H_t) over the accepted tokens of the update, with
    the ratio rho = policy / proximal and the importance weight w of proximal over behavior.

    Source: decoupled PPO: Hilton et al. 2021, arXiv:2110.00641.
    """

    def __init__(self, algorithm: AlgorithmConfig, mode: Mode, *, temperature: float) -> None:
        self._aggregation = Aggregation(
            algorithm.aggregation, algorithm.constant_length, algorithm.correction.denominator
        )
        self._policy_loss = bind_policy_loss(algorithm)
        self._corrector = Corrector(algorithm, mode)
        self._algorithm = algorithm
        self._mode = mode
        self._temperature = temperature

    @property
    def needs_scores(self) -> bool:
        """Whether the ratio or rejection needs the policy's log-probabilities from the start of the step."""
        return self._mode == "decoupled" or (
            self._mode == "bypass" and self._algorithm.correction.has_comparison
        )

    def score_rest(self, policy: Policy, minibatch: Sequence[ScoredMicrobatch]) -> list[Tensor] | list[None]:
        """Return per microbatch the policy's log-probabilities of the rest of its sequences, f64[E]. A
        collective.

        None if no rank has split sequences, or if the loss of a token depends on that token alone.
        """
        found = None
        if sees_sequences(self._algorithm):
            found = score_rest(
                policy, [scored.microbatch for scored in minibatch], temperature=self._temperature
            )
        return [None for _ in minibatch] if found is None else found

    def part(
        self,
        policy: Policy,
        scored: ScoredMicrobatch,
        counts: UpdateCounts,
        policy_rest: Tensor | None = None,
    ) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts` describes.

        policy_rest: f64[E] from `score_rest`, or None.
        """
        scored, tokens, logprobs, entropies = self._forward(policy, scored)
        own = self._columns(scored, tokens, logprobs)
        whole = own if policy_rest is None else self._with_rest(own, scored, policy_rest)
        whole_scales = self._scales(scored, tokens, counts, dtype=logprobs.dtype)[: len(whole.weights)]
        scales = whole_scales[: len(logprobs)]

        policy_loss = self._policy_loss(whole.tokens)
        kept = self._kept(whole)
        kl = self._kl(scored, tokens, own)
        policy_term = sum_own(
            whole_scales * whole.weights * torch.where(kept, policy_loss.losses_A, 0.0), len(logprobs)
        )
        # The tokens were sampled by the behavior policy, so the KL term is an expectation under it too and
        # needs the same importance weights as the policy term.
        kl_term = self._algorithm.kl.coefficient * (scales * own.weights * kl).sum()
        loss = policy_term + kl_term - self._algorithm.entropy_coefficient * (scales * entropies).sum()

        policy_loss, kept = policy_loss.first(len(logprobs)), kept[: len(logprobs)]
        mismatch = (logprobs.detach() - own.behavior).abs()
        statistics = self._statistics(scored, own)
        sums = {
            "loss": loss,
            "policy_loss": policy_term,
            "kl": kl.sum(),
            "entropy": entropies.sum(),
            "ppo_kl": (own.tokens.proximal - logprobs).sum(),
            **_clip_sums(policy_loss),
            "mismatch_mean": mismatch.sum(),
            **{CORRECTION + name: value for name, value in statistics.sums.items()},
            **self._rejected(scored, ~kept, like=logprobs),
        }
        maxima = {
            "ratio_max": largest(policy_loss.ratios_A),
            "mismatch_max": largest(mismatch),
            **{CORRECTION + name: value for name, value in statistics.maxima.items()},
        }
        return LossPart(loss, sums, maxima)

    def _forward(
        self, policy: Policy, scored: ScoredMicrobatch
    ) -> tuple[ScoredMicrobatch, LossTokens, Tensor, Tensor]:
        """Return the microbatch, its loss tokens, and their log-probabilities and entropies with gradient.

        If the proximal log-probabilities were left to this forward, the microbatch is returned with them.
        """
        microbatch = scored.microbatch
        tokens = LossTokens.of(microbatch, policy.device, scored.correction.accepted)
        is_proximal = self._mode == "decoupled" and scored.proximal_logprobs is None
        # Weights and statistics are of all action tokens, also of those that are not in the loss.
        every = np.ones(microbatch.num_action_tokens, np.bool_)
        read = LossTokens.of(microbatch, policy.device, every) if is_proximal else tokens
        logprobs, entropies = policy.score(
            microbatch, read.predictors, read.targets, temperature=self._temperature
        )
        if is_proximal:
            proximal = logprobs.detach().cpu().numpy()
            correction = self._corrector.correct_alone(microbatch, proximal)
            scored = replace(scored, proximal_logprobs=proximal, correction=correction)
            chosen = tokens.chosen.to(logprobs.device)
            logprobs, entropies = logprobs[chosen], entropies[chosen]
        return scored, tokens, logprobs, entropies

    def _columns(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor) -> LossColumns:
        behavior = tokens.select(scored.microbatch.behavior_logprobs, logprobs)
        selected = scored.correction.is_selected
        policy_tokens = PolicyTokens(
            policy=logprobs,
            proximal=self._proximal(scored, tokens, logprobs, behavior),
            advantages=tokens.select(scored.microbatch.advantages, logprobs),
            sequence_ids=tokens.sequence_ids,
            is_selected=None
            if selected is None
            else torch.tensor(selected)[tokens.chosen].to(logprobs.device),
        )
        return LossColumns(policy_tokens, behavior, tokens.select(scored.correction.weights, logprobs))

    def _proximal(
        self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, behavior: Tensor
    ) -> Tensor:
        if self._mode == "bypass":
            return behavior
        if self._mode == "on_policy":
            return logprobs.detach()  # the ratio is exactly 1, and its gradient is that of log policy
        assert scored.proximal_logprobs is not None, "see _forward"
        return tokens.select(scored.proximal_logprobs, logprobs)

    def _with_rest(self, own: LossColumns, scored: ScoredMicrobatch, policy_rest: Tensor) -> LossColumns:
        rest = scored.correction.rest
        proximal = policy_rest if self._mode == "on_policy" else torch.from_numpy(rest.proximal_logprobs)
        return own.with_rest(rest, policy=policy_rest, proximal=proximal)

    def _scales(
        self, scored: ScoredMicrobatch, tokens: LossTokens, counts: UpdateCounts, *, dtype: torch.dtype
    ) -> Tensor:
        """Return f[A + E], the scale of each loss token here and in other microbatches."""
        rest = scored.correction.rest
        ids = torch.cat(
            [tokens.sequence_ids, torch.from_numpy(rest.sequence_ids[rest.accepted]).to(tokens.sequence_ids)]
        )
        original = np.concatenate([scored.microbatch.sequence_ids, rest.sequence_ids])
        return token_scales(
            self._aggregation, ids, counts, dtype=dtype, original_ids=torch.tensor(original).to(ids)
        )

    def _kept(self, columns: LossColumns) -> Tensor:
        delta = self._algorithm.correction.opsm_delta
        if delta is None:
            return torch.ones_like(columns.weights, dtype=torch.bool)
        return opsm_keeps(columns.tokens, columns.behavior, delta=delta)

    def _kl(self, scored: ScoredMicrobatch, tokens: LossTokens, own: LossColumns) -> Tensor:
        logprobs = own.tokens.policy
        if scored.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        ref, name = tokens.select(scored.ref_logprobs, logprobs), self._algorithm.kl.estimator
        if self._algorithm.kl.off_policy_ratio:
            return off_policy_kl(name, logprobs, ref, own.tokens.proximal)
        return KL_ESTIMATORS[name](logprobs, ref)

    def _statistics(self, scored: ScoredMicrobatch, own: LossColumns) -> CorrectionStatistics:
        """Measure all scored action tokens.

        Over accepted tokens alone, rejection would look like agreement.
        """
        cap = self._algorithm.correction.cap
        proximal, behavior = own.tokens.proximal, own.behavior
        if scored.proximal_logprobs is None:
            # The log product of a split sequence is not known here, since its other segments are in other
            # microbatches. Leave such sequences out.
            ids = own.tokens.sequence_ids
            is_whole = ~torch.tensor(scored.microbatch.is_split, device=proximal.device)[ids]
            products = log_products((proximal - behavior).detach().double()[is_whole], ids[is_whole])
            return correction_statistics(proximal, behavior, products, cap=cap)
        columns = (
            scored.proximal_logprobs,
            scored.microbatch.behavior_logprobs,
            scored.correction.log_products,
        )
        proximal, behavior, products = (torch.tensor(column, device=proximal.device) for column in columns)
        return correction_statistics(proximal, behavior, products, cap=cap)

    def _rejected(self, scored: ScoredMicrobatch, is_dropped: Tensor, *, like: Tensor) -> dict[str, Tensor]:
        """Return the number of rejected tokens by stage, and the number of all action tokens."""
        counts: dict[str, float] = dict(scored.correction.rejected)
        counts["all"] = scored.num_action_tokens - scored.num_loss_tokens
        if self._algorithm.correction.opsm_delta is not None:
            counts["opsm"] = float(is_dropped.sum())
        counts[ACTION_TOKENS] = scored.num_action_tokens
        return {REJECTED + name: like.new_tensor(float(count)) for name, count in counts.items()}


def _clip_sums(loss: PolicyLoss) -> dict[str, Tensor]:
    return {
        "ratio_mean": loss.ratios_A.sum(),
        "clip_low": loss.is_clipped_low_A.sum(),
        "clip_high": loss.is_clipped_high_A.sum(),
        "clip_dual": loss.is_clipped_dual_A.sum(),
    }
