"""The reward model of the run as one of its reward terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from agentrl.config.reward_model import REWARD_MODEL
from agentrl.errors import RewardError
from agentrl.plugins import Attempted, BatchReward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject

Ask = Callable[[Sequence[Attempted]], Sequence[RewardResult | None]]
"""Asks the reward model for the scores of a batch; the run gives it, for the model stands beside its learner."""


class RewardModel(BatchReward):
    """What the model of the config's section `reward_model` says of a conversation. Metrics: truncated (its beginning was cut)."""

    name: ClassVar[str] = REWARD_MODEL
    has_own_deadlines = True

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        read_options(Options, self.config, plugin=f"reward {self.name!r}")
        self._ask: Ask | None = None

    def connect(self, ask: Ask) -> None:
        """Score by `ask` from here on."""
        self._ask = ask

    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        if self._ask is None:
            raise RewardError("no reward model runs here; it belongs to `agentrl train`")
        return self._ask(attempts)
