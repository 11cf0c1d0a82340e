"""The run's reward model as a reward term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from agentrl.config.reward_model import REWARD_MODEL
from agentrl.errors import RewardError
from agentrl.plugins import Attempted, BatchReward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject

Ask = Callable[[Sequence[Attempted]], Sequence[RewardResult | None]]
"""Returns the reward model's scores of a batch.

The run provides it, because the model runs beside its learner.
"""


class RewardModel(BatchReward):
    """The score of a conversation by the model of the config's section `reward_model`.

    Metrics: truncated (the beginning of the conversation was cut).
    """

    name: ClassVar[str] = REWARD_MODEL
    has_own_deadlines = True

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        read_options(Options, self.config, plugin=f"reward {self.name!r}")
        self._ask: Ask | None = None

    def connect(self, ask: Ask) -> None:
        """Use `ask` for all scores from here on."""
        self._ask = ask

    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        if self._ask is None:
            raise RewardError("no reward model is running; only `agentrl train` has one")
        return self._ask(attempts)
