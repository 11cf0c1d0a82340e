"""Generation without rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from agentrl.config.reward import RewardConfig
from agentrl.plugins import Attempted, Plugins, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn


class Unscored(Reward):
    """A reward that is always 0 and is never used."""

    name: ClassVar[str] = "unscored"
    runs_in: RunsIn = "inline"

    def score(self, attempt: Attempted) -> RewardResult:
        return RewardResult(0.0)


def without_rewards(plugins: Plugins, data_sources: Iterable[str]) -> RewardConfig:
    """Return a reward config with which rows of these sources are played but not scored."""
    plugins.rewards.add(Unscored)
    return RewardConfig(sources=dict.fromkeys(data_sources, Unscored.name))
