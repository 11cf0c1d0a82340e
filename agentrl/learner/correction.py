"""Decisions that need the whole update beforehand: rejected tokens, importance weights, selected tokens.

Everything here follows from the batch and the proximal log-probabilities, which do not change during the
step. Sums and order statistics are over the microbatches of ALL ranks, so neither packing nor the number of
ranks changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.corrections import importance_weights
from agentrl.algorithms.log_ratios import off_rounding
from agentrl.algorithms.rejection import RejectionRule, accepts, second_moment_cut
from agentrl.algorithms.rules import WeightRule
from agentrl.algorithms.selection import covariances, fair_keys, largest_first, num_selected, smallest_cut
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.losses import TokenSelection
from agentrl.learner.batch import Correction, Floats, Microbatch, Mode, RestOfSequences
from agentrl.learner.ranks import add_over_ranks, gather_over_ranks
from agentrl.learner.split_sequences import SplitSequences

MAX_LAG = "max_lag"
M2PO = "m2po"


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """One microbatch with its log-ratios.

    log_ratios: f64[A], log rho'; 0 where nothing was scored.
    whole_ratios, whole_ids: f64[A + E], i64[A + E], log rho' and sequences of its own tokens, then of those
    of the same sequences in other microbatches.
    logprobs: f64[A], proximal log-probabilities; the behavior policy's where nothing was scored.
    """

    microbatch: Microbatch
    log_ratios: Tensor
    whole_ratios: Tensor
    whole_ids: Tensor
    logprobs: Tensor

    def own(self, values: Tensor) -> Tensor:
        """Return the part of `values` (f[A + E]) of the microbatch's own tokens."""
        return values[: len(self.log_ratios)]


class Corrector:
    """The rejection and weighting of `algorithm.correction`, and the token selection of the policy loss."""

    def __init__(self, algorithm: AlgorithmConfig, mode: Mode = "decoupled") -> None:
        self._algorithm = algorithm
        self._mode = mode
        self._config = config = algorithm.correction
        self._weight_rule = (
            WeightRule(config.weight, config.cap, config.floor, config.outside)
            if config.weight != "none" and mode == "decoupled"
            else None
        )
        self._rules = {
            name: RejectionRule(r.statistic, r.level, r.lower, r.upper) for name, r in config.reject.items()
        }

    def correct_alone(self, microbatch: Microbatch, proximal: Floats) -> Correction:
        """Return the Correction of one microbatch of whole sequences. Not a collective.

        Only where no decision depends on other microbatches: see `agentrl.config.proximal`.
        """
        [correction] = self.correct([microbatch], [proximal], SplitSequences.none([microbatch]))
        return correction

    def correct(
        self,
        microbatches: Sequence[Microbatch],
        proximal: Sequence[Floats | None],
        split: SplitSequences | None = None,
    ) -> list[Correction]:
        """Return one Correction for each microbatch of this rank's part of ONE update. A collective.

        proximal: f[A] per microbatch, the policy's log-probabilities at the start of the step. None where
        nothing was scored; nothing is corrected then. Only mode decoupled gives weights other than 1.
        split: the split sequences of the update; None: they are searched.
        """
        if split is None:
            split = SplitSequences.find(microbatches)
        facts = _find_facts(microbatches, proximal, split)
        accepted, rejected = self._reject(facts)
        weights: Sequence[Tensor] = [torch.ones_like(f.log_ratios) for f in facts]
        if (rule := self._weight_rule) is not None and all(p is not None for p in proximal):
            weights = [f.own(importance_weights(f.whole_ratios, f.whole_ids, rule)) for f in facts]
            if self._config.self_normalize:
                weights = self._self_normalized(weights, facts, accepted, split)
        selected = self._select(facts, accepted)
        rests = _exchange_decisions(
            facts, split, accepted, weights, selected, is_bypass=self._mode == "bypass"
        )
        dtypes = [
            m.behavior_logprobs.dtype if p is None else p.dtype
            for m, p in zip(microbatches, proximal, strict=True)
        ]
        columns = zip(facts, dtypes, accepted, weights, selected, rejected, rests, strict=True)
        return [
            Correction(a.numpy(), w.numpy().astype(dtype), s, r, log_products=_products_of(f), rest=rest)
            for f, dtype, a, w, s, r, rest in columns
        ]

    # ---------------------------------------------------------------------------------------------- rejection

    def _reject(self, facts: Sequence[_Facts]) -> tuple[list[Tensor], list[dict[str, int]]]:
        accepted = [torch.tensor(f.microbatch.loss_mask) for f in facts]
        rejected: list[dict[str, int]] = [{} for _ in facts]
        # Already removed from the loss mask, where the versions are known.
        if self._config.max_lag is not None:
            for f, counts in zip(facts, rejected, strict=True):
                counts[MAX_LAG] = f.microbatch.num_action_tokens - f.microbatch.num_loss_tokens
        kept_by = {
            name: [f.own(accepts(f.whole_ratios, f.whole_ids, rule)) for f in facts]
            for name, rule in self._rules.items()
        }
        for name, kept in kept_by.items():
            for f, counts, own in zip(facts, rejected, kept, strict=True):
                counts[name] = int((torch.tensor(f.microbatch.loss_mask) & ~own).sum())
        for kept in kept_by.values():
            accepted = [a & own for a, own in zip(accepted, kept, strict=True)]
        if self._config.m2po_threshold is not None:
            accepted = self._bound_second_moment(facts, accepted, rejected, self._config.m2po_threshold)
        return accepted, rejected

    def _bound_second_moment(
        self,
        facts: Sequence[_Facts],
        accepted: Sequence[Tensor],
        rejected: Sequence[dict[str, int]],
        threshold: float,
    ) -> list[Tensor]:
        """Reject by M2PO, last in the chain: the mean of the tokens that remain must be under the
        threshold.
        """
        # Rounding noise must not separate equal attempts.
        squares = [off_rounding(f.log_ratios).square() for f in facts]
        cut = second_moment_cut(_gather(squares, accepted), threshold)
        kept = [a & (s <= cut) for a, s in zip(accepted, squares, strict=True)]
        for counts, before, after in zip(rejected, accepted, kept, strict=True):
            counts[M2PO] = int(before.sum() - after.sum())
        return kept

    # ------------------------------------------------------------------------------------------------ weights

    def _self_normalized(
        self,
        weights: Sequence[Tensor],
        facts: Sequence[_Facts],
        accepted: Sequence[Tensor],
        split: SplitSequences,
    ) -> Sequence[Tensor]:
        """Scale the weights so that their mean is 1: self-normalized importance sampling."""
        # A weight shared by a sequence counts once in the mean, whatever the sequence's length.
        shares = (
            [a.double() for a in accepted]
            if self._config.weight == "token"
            else _shares_of_sequences(facts, accepted, split)
        )
        weight = sum(float((w * s).sum()) for w, s in zip(weights, shares, strict=True))
        local = {"weight": weight, "count": sum(float(s.sum()) for s in shares)}
        sums = add_over_ranks(local)
        return [w * (sums["count"] / sums["weight"]) for w in weights] if sums["weight"] > 0 else weights

    # ---------------------------------------------------------------------------------------------- selection

    def _select(self, facts: Sequence[_Facts], accepted: Sequence[Tensor]) -> list[NDArray[np.bool_] | None]:
        selection = self._algorithm.loss.selects(self._algorithm)
        return [None for _ in facts] if selection is None else _selected(facts, accepted, selection)


def _selected(
    facts: Sequence[_Facts], accepted: Sequence[Tensor], selection: TokenSelection
) -> list[NDArray[np.bool_] | None]:
    """Select a share of all accepted tokens by their covariance.

    A choice by chance is pseudo-random, but the same for any packing and number of ranks (see `fair_keys`).
    """
    advantages = [torch.tensor(f.microbatch.advantages).double() for f in facts]
    logprobs = [f.logprobs for f in facts]
    tokens = float(sum(int(a.sum()) for a in accepted))
    sums = add_over_ranks(
        {"tokens": tokens, "logprob": _sum(logprobs, accepted), "advantage": _sum(advantages, accepted)}
    )
    total = max(sums["tokens"], 1.0)
    means = {"mean_logprob": sums["logprob"] / total, "mean_advantage": sums["advantage"] / total}
    covariance = [covariances(p, a, **means) for p, a in zip(logprobs, advantages, strict=True)]
    eligible = [
        a & (c > selection.lower) & (c < selection.upper) for a, c in zip(accepted, covariance, strict=True)
    ]
    keys = [_keys(f.microbatch) for f in facts]
    if selection.by == "largest":
        keys = [largest_first(c, own) for c, own in zip(covariance, keys, strict=True)]
    cut = smallest_cut(_gather(keys, eligible), num_selected(selection.share, int(sums["tokens"])))
    return [(e & (k < cut)).numpy() for e, k in zip(eligible, keys, strict=True)]


def _find_facts(
    microbatches: Sequence[Microbatch], proximal: Sequence[Floats | None], split: SplitSequences
) -> list[_Facts]:
    behavior = [torch.tensor(m.behavior_logprobs).double() for m in microbatches]
    logprobs = [b if p is None else torch.tensor(p).double() for b, p in zip(behavior, proximal, strict=True)]
    ratios = [p - b for p, b in zip(logprobs, behavior, strict=True)]
    rest = split.gather([r[:, None] for r in ratios])
    whole = [torch.cat([r, e[:, 0]]) for r, e in zip(ratios, rest, strict=True)]
    ids = [
        torch.tensor(np.concatenate([m.sequence_ids, e]))
        for m, e in zip(microbatches, split.sequence_ids, strict=True)
    ]
    return [_Facts(*columns) for columns in zip(microbatches, ratios, whole, ids, logprobs, strict=True)]


def _exchange_decisions(
    facts: Sequence[_Facts],
    split: SplitSequences,
    accepted: Sequence[Tensor],
    weights: Sequence[Tensor],
    selected: Sequence[NDArray[np.bool_] | None],
    *,
    is_bypass: bool,
) -> list[RestOfSequences]:
    """Exchange the decisions about split sequences; return those of the tokens in other microbatches."""
    tables = []
    for f, a, w, s in zip(facts, accepted, weights, selected, strict=True):
        is_selected = torch.zeros_like(w) if s is None else torch.tensor(s).double()
        advantages = torch.tensor(f.microbatch.advantages).double()
        behavior = torch.tensor(f.microbatch.behavior_logprobs).double()
        proximal = behavior if is_bypass else f.logprobs
        tables.append(torch.stack([a.double(), is_selected, w, advantages, behavior, proximal], dim=1))
    found = []
    for ids, table in zip(split.sequence_ids, split.gather(tables), strict=True):
        accepted_E, is_selected_E, *others = table.numpy().T
        found.append(RestOfSequences(ids, accepted_E > 0, is_selected_E > 0, *others))
    return found


def _shares_of_sequences(
    facts: Sequence[_Facts], accepted: Sequence[Tensor], split: SplitSequences
) -> list[Tensor]:
    """Return f64[A] per microbatch: 1 / number of accepted tokens of the sequence on accepted tokens, else
    0.
    """
    found = []
    for f, a, rest in zip(
        facts, accepted, split.gather([a.double()[:, None] for a in accepted]), strict=True
    ):
        whole = torch.cat([a.double(), rest[:, 0]])
        counts = torch.zeros(len(f.microbatch.sample_indices), dtype=torch.float64).index_add_(
            0, f.whole_ids, whole
        )
        found.append(a.double() / counts.clamp(min=1.0)[f.own(f.whole_ids)])
    return found


def _products_of(facts: _Facts) -> NDArray[np.float64]:
    """Return f64[.], sum of log rho' of each sequence counted here, over all of its action tokens."""
    microbatch = facts.microbatch
    sums = torch.zeros(len(microbatch.sample_indices), dtype=torch.float64).index_add_(
        0, facts.whole_ids, facts.whole_ratios
    )
    products: NDArray[np.float64] = sums.numpy()[microbatch.is_counted]
    return products


def _keys(microbatch: Microbatch) -> Tensor:
    samples = microbatch.sample_indices[microbatch.sequence_ids]
    return torch.from_numpy(fair_keys(samples, microbatch.action_places, microbatch.targets))


def _gather(columns: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    return gather_over_ranks(torch.cat([c[m] for c, m in zip(columns, masks, strict=True)]))


def _sum(columns: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
    return float(sum(c[m].sum() for c, m in zip(columns, masks, strict=True)))
