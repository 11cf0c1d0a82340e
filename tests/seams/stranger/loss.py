"""A policy loss with an option of its own: the advantage times a power of the ratio."""

import torch
from pydantic import Field

from agentrl.algorithms.policy_losses import PolicyLoss, PolicyTokens
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.losses import Loss
from agentrl.config.section import Section


class Options(Section):
    """Keys of `algorithm.loss_options`."""

    power: float = Field(1.0, gt=0)


def powered(tokens: PolicyTokens, *, power: float) -> PolicyLoss:
    """Return -A rho^power."""
    ratios = torch.exp(tokens.log_ratios())
    return PolicyLoss.of(-tokens.advantages * ratios**power, ratios)


def words(algorithm: AlgorithmConfig) -> str:
    return f"rho^{Options(**algorithm.loss_options).power:g}"


LOSS = Loss("powered", powered, Options, sees="token", words=words)
