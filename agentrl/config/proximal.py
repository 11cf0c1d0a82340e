"""When the proximal log-probabilities must be known before an update, and when its own forward gives them."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.schema import Config


def score_reasons(config: Config) -> list[str]:
    """Return why the learner scores the batch with the policy at the start of a step; empty: it need not.

    With one update per step, the policy of the update's forward is the proximal policy. A weight that depends
    on one sequence alone can therefore be computed after that forward. Whatever depends on several sequences
    (which tokens are accepted or selected, a mean weight) must be known before the first backward.
    """
    mode, algorithm = config.policy_mode, config.algorithm
    if mode == "on_policy":
        return []
    if mode == "bypass":
        return list(_stages(algorithm))
    return [*_stored(config), *_differences(config), *_stages(algorithm), *_statistics(algorithm)]


def _stored(config: Config) -> Iterator[str]:
    if config.tracking.token_ratios:
        yield "tracking.token_ratios stores the proximal log-probabilities"


def _differences(config: Config) -> Iterator[str]:
    """Yield why the policy of an update may differ from that at the start of the step."""
    updates = config.learner.minibatches_per_step * config.learner.epochs_per_step
    if updates > 1:
        yield f"{updates:,} updates per step share one proximal policy"
    if config.model.lora.rank > 0 and config.model.lora.dropout > 0:
        yield "model.lora.dropout acts in updates and not in the proximal policy"


def _stages(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield the stages that decide with rho' how many tokens the loss has."""
    if algorithm.correction.reject:
        yield "algorithm.correction.reject decides how many tokens the loss counts"
    if algorithm.correction.m2po_threshold is not None:
        yield "algorithm.correction.m2po_threshold compares all tokens of the update"


def _statistics(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield what else needs the proximal log-probabilities of the whole update."""
    if algorithm.correction.weight != "none" and algorithm.correction.self_normalize:
        yield "algorithm.correction.self_normalize divides by the mean weight of the update"
    if algorithm.loss.selects(algorithm) is not None:
        yield f"algorithm.policy_loss={algorithm.policy_loss} selects tokens of the whole update"
