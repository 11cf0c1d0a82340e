"""The configured policy loss, with its options bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agentrl.algorithms.policy_losses import PolicyLoss, PolicyTokens
from agentrl.algorithms.registry import find_loss
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.errors import ConfigError


def bind_policy_loss(algorithm: AlgorithmConfig) -> Callable[[PolicyTokens], PolicyLoss]:
    """Return `algorithm.policy_loss` with its options bound.

    Raises:
        PluginError: the loss is unknown, or its import fails.
        ConfigError: `algorithm.loss_options` are not its options.
    """
    loss = find_loss(algorithm.policy_loss)
    assert callable(loss.function)
    try:
        return partial(loss.function, **loss.arguments(algorithm))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def sees_sequences(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss of a token depends on the policy at other tokens of its sequence."""
    return (
        find_loss(algorithm.policy_loss).sees_sequences(algorithm)
        or algorithm.correction.opsm_delta is not None
    )
